"""model: a learned sequence classifier's verdict, hot-reloaded from a policy channel of its own.

    policies ─> PolicyFeed ─> fetch, verify, build (thread) ─> one assignment: from the next call on it judges

Guarantees: a version judges only whole, verified and finite; one that is refused is counted and leaves the older one in
charge; each score says which version gave it. Weights are safetensors from the object store, the rest is the JSON of a
local folder: nothing is unpickled, no code of the folder runs. Needs torch and transformers: pip install
'headrace[reward-model]'.
"""

import asyncio
import importlib.util
import logging
import math
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from infra.chain.processor import Verdict, score
from infra.log.log import Log, LogMessage, follow
from infra.model.model import Classifier, Tokenizer, build_classifier, load_into, load_tokenizer
from infra.observe.metrics import Metrics
from infra.policies.beginning import newest_summary
from infra.policies.fetch import PolicyFetcher
from infra.policies.fold import PolicyFeed
from infra.policies.policy import described
from infra.store.store import Store
from schemas import Experience, Message, PolicyEvent
from schemas.errors import ConfigError, PolicyRefused, StoreError
from schemas.topics import POLICIES

logger = logging.getLogger(__name__)

NOT_LOADED = "model not loaded"
RETRY_S = 2.0
CHARS_PER_TOKEN = 8  # read at most: more text than this per token is not even tokenized


class LoadedClassifier(msgspec.Struct, frozen=True):
    version: int
    classifier: Classifier


@score(version=1)
class Model:
    """The probability that a classifier gives to `label`: softmax over its classes, or the sigmoid of its only one.

    folder: config.json, tokenizer and chat template, relative to where the worker runs; weights are not read from it.
    policy: the name under which versions are published. label: index of the class, -1 the last. max_tokens: of the
    conversation, the end of which counts; of its text no more than 8 characters per token are read. wait_s: for the first
    version after a start; without one the score is absent.
    """

    def __init__(
        self, *, folder: str, policy: str, label: int = -1, max_tokens: int = 2048, wait_s: float = 5.0
    ) -> None:
        for library in ("torch", "transformers"):
            if importlib.util.find_spec(library) is None:
                raise ConfigError(f"the score model needs {library}: pip install 'headrace[reward-model]'")
        if not (Path(folder) / "config.json").is_file():
            raise ConfigError(f"folder: {folder} holds no config.json, expected the folder of a sequence classifier")
        self.folder = folder
        self.policy = policy
        self.label = label
        self.max_tokens = max_tokens
        self.wait_s = wait_s
        self._loaded: LoadedClassifier | None = None
        self._first = threading.Event()
        self._tokenizer: Tokenizer | None = None

    def __call__(self, experience: Experience) -> Verdict:
        """Judge with the version that is loaded now. Raises ValueError for a verdict that is not finite."""
        if not self._first.wait(self.wait_s):
            return Verdict(reason=NOT_LOADED)
        loaded, tokenizer = self._loaded, self._tokenizer
        assert loaded is not None and tokenizer is not None
        tokens = tokenizer.encode_chat(ending(experience.messages, CHARS_PER_TOKEN * self.max_tokens))[
            -self.max_tokens :
        ]
        if not tokens:
            return Verdict(reason="nothing to judge")
        value = probability(loaded.classifier.logits(tokens), self.label)
        return Verdict(value=value, model=f"{self.policy}-{loaded.version}")

    @property
    def version(self) -> int:
        return -1 if self._loaded is None else self._loaded.version

    async def accompany(self, log: Log, metrics: Metrics) -> None:
        """Follow the policy until cancelled. Raises ConfigError without an object store."""
        if log.store is None:
            raise ConfigError(f"score model: {self.policy} comes from the object store, and this worker has none")
        summary = await newest_summary(log)
        feed = PolicyFeed(self.policy, since=None if summary is None else summary.of(self.policy))
        starts: dict[int, int] | Literal["beginning"] = "beginning" if summary is None else {0: summary.below}
        refused: set[int] = set()
        while True:
            caught_up, changed = asyncio.Event(), asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(
                    follow(
                        log, POLICIES, partial(_apply, feed),
                        metrics=metrics, caught_up=caught_up, changed=partial(_wake, changed), starts=starts,
                    )
                )  # fmt: skip
                await caught_up.wait()
                await self._load_newest(feed, refused, changed, log.store, metrics)
                reading.cancel()
            feed, starts = PolicyFeed(self.policy), "beginning"

    async def _load_newest(
        self, feed: PolicyFeed, refused: set[int], changed: asyncio.Event, store: Store, metrics: Metrics
    ) -> None:
        fetcher = PolicyFetcher(store, self.policy)
        while not feed.lacks(self.version, pinned=(), refused=refused):
            changed.clear()
            feed.forget_below(self.version)
            event = feed.next(self.version, pinned=(), refused=refused)
            if event is None:
                await changed.wait()
            elif not await self._move_to(event, fetcher, store, metrics):
                refused.add(event.version)
                fetcher = PolicyFetcher(store, self.policy)

    async def _move_to(self, event: PolicyEvent, fetcher: PolicyFetcher, store: Store, metrics: Metrics) -> bool:
        try:
            self._loaded = await asyncio.to_thread(self._load, event, fetcher, store)
        except (PolicyRefused, ValueError) as error:
            metrics.counter("reward_models_refused", policy=self.policy).inc()
            logger.warning("reward_model_refused policy=%s version=%d error=%s", self.policy, event.version, error)
            return False
        except StoreError as error:
            metrics.counter("reward_model_fetch_failed", policy=self.policy).inc()
            logger.warning("reward_model_fetch_failed version=%d error=%s", event.version, error)
            await asyncio.sleep(RETRY_S)
            return True
        self._first.set()
        metrics.gauge("reward_model_version", policy=self.policy).set(event.version)
        logger.info("reward_model_loaded policy=%s version=%d", self.policy, event.version)
        return True

    def _load(self, event: PolicyEvent, fetcher: PolicyFetcher, store: Store) -> LoadedClassifier:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        try:
            policy = fetcher.fetch(event)
        except PolicyRefused:  # what was held may be to blame: once more, from the anchor
            policy = PolicyFetcher(store, self.policy).fetch(event)
        if policy.adapter is not None:
            raise PolicyRefused(f"it is {described(policy.adapter)}, expected a whole classifier")
        classifier = build_classifier(self.folder)
        load_into(classifier.module, policy.tensors)
        return LoadedClassifier(policy.version, classifier)


def _apply(feed: PolicyFeed, message: LogMessage) -> None:
    if isinstance(message.value, PolicyEvent):
        feed.apply(message.value, message.offset)


def _wake(changed: asyncio.Event, at: dict[int, int]) -> None:
    changed.set()


def ending(messages: Sequence[Message], max_chars: int) -> tuple[Message, ...]:
    """The messages, of which the first ones lose text until no more than `max_chars` characters are left."""
    left = max_chars
    kept: list[Message] = []
    for message in reversed(messages):
        start = max(0, len(message.content) - left)
        kept.append(msgspec.structs.replace(message, content=message.content[start:]) if start else message)
        left -= len(message.content) - start
    return tuple(reversed(kept))


def probability(logits: list[float], label: int) -> float:
    """The probability of one class.

    >>> probability([0.0], -1), probability([0.0, 0.0], 1)
    (0.5, 0.5)
    """
    if not all(math.isfinite(logit) for logit in logits):
        raise ValueError(f"logits: got {logits}, expected finite numbers")
    if len(logits) == 1:
        return 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, logits[0]))))
    if not -len(logits) <= label < len(logits):
        raise ValueError(f"label: got {label} of {len(logits)} classes")
    highest = max(logits)
    weights = [math.exp(logit - highest) for logit in logits]
    return weights[label] / sum(weights)
