"""The two sides of the benchmark of overlap, an engine and a learner that take the time they are given; and what they did.

The engine has places for so many answers at once and takes `token_s` for a token of each, however many are sampled, as one does
that is bound by its memory; who finds no place waits, first come first served. The learner takes `step_s` for a step. Both are
the scripted ones in all else, so that versions are published, loaded and proven as ever.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from actors.engines.engine import Completion, LoadReport, OnChunk, Sampling
from actors.engines.scripted import TENSOR, ScriptedEngine, bigram_logprobs
from actors.engines.trace import Start, spans
from infra.chain.processor import score
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import Tensor, from_numpy
from infra.store.images import Pixels
from infra.store.memory import MemoryStore
from schemas import Experience, Message
from trainer.batch.batch import PackedBatch
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner

VOCABULARY = 64
EOS = 0
FIRST = 4  # of the tokens that answers are made of
LOGPROB = -1.0


@score(version=1, inline=True)
def last_word(experience: Experience) -> float:
    """A verdict on the last token but the end: answers of a group differ in it."""
    return float(int(experience.tokens[-2]) % 2)


class Letters:
    """A tokenizer of a letter a token."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """See ChatTokenizer."""
        text = "".join(message.content for message in messages)
        return [FIRST + ord(letter) % (VOCABULARY - FIRST) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        """See ChatTokenizer."""
        return "".join(chr(ord("0") + token) for token in ids)


class SidesState(msgspec.Struct):
    """How both sides stand. running: answers that have a place. loading, learning: 1 while the engine, the learner is at it.
    issued, buffered, drawn, dropped: groups so far. begun: answers that the engine was asked for.
    """

    running: int = 0
    loading: int = 0
    learning: int = 0
    issued: int = 0
    begun: int = 0
    buffered: int = 0
    drawn: int = 0
    dropped: int = 0


class SidesAccount:
    """Seconds of each side, by what it did or waited for; places of the engine count by their share of all.

    places: of the engine. most: groups that may be outstanding. step: groups of a step. size: answers of a group.
    """

    def __init__(self, clock: Callable[[], float], *, places: int, most: int, step: int, size: int) -> None:
        self.state = SidesState()
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._places = places
        self._most = most
        self._step = step
        self._size = size
        self._at_s = clock()

    def add(self, **changes: int) -> None:
        """The state changes by so much now."""
        self.settle()
        for name, change in changes.items():
            setattr(self.state, name, getattr(self.state, name) + change)

    def settle(self) -> dict[str, float]:
        """What was until now is counted; returns all of it."""
        now_s, state = self._clock(), self.state
        passed_s, self._at_s = now_s - self._at_s, now_s
        busy = state.running / self._places
        if state.loading:
            self.seconds["engine_loads"] += passed_s
        else:
            self.seconds["engine_busy"] += busy * passed_s
            self.seconds[f"engine_{self._why_free()}"] += (1 - busy) * passed_s
        self.seconds["learner_busy" if state.learning else f"learner_{self._why_idle()}"] += passed_s
        return dict(self.seconds)

    def _why_free(self) -> str:
        """Why a place of the engine has no answer."""
        state = self.state
        if state.begun < state.issued * self._size:
            return "waits_for_a_version"
        outstanding = state.issued - state.drawn - state.dropped
        return "waits_for_the_bound" if outstanding >= self._most else "waits_for_the_log"

    def _why_idle(self) -> str:
        """Why the learner has no step."""
        waiting = self.state.buffered - self.state.drawn
        return "waits_for_an_older_group" if waiting >= self._step else "waits_for_groups"


class TimedEngine(ScriptedEngine):
    """lengths: tokens of the answers, in the order in which they are asked for. load_s: for which a load stops all."""

    def __init__(
        self,
        lengths: Iterator[int],
        account: SidesAccount,
        *,
        places: int,
        token_s: float,
        load_s: float,
    ) -> None:
        super().__init__(num_vocabulary=VOCABULARY, max_model_len=10**6)
        self._lengths = lengths
        self._account = account
        self._free = asyncio.Semaphore(places)
        self._token_s = token_s
        self._load_s = load_s
        self._paused_s = 0.0
        self._loads: list[Start] = [Start(0, 0)]
        self._loaded_s: list[float] = [0.0]
        self._num_asked = 0
        self._words = np.random.default_rng(0).integers(FIRST, VOCABULARY, 4096).tolist()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        """As many tokens as are due."""
        number, self._num_asked = self._num_asked, self._num_asked + 1
        length = min(next(self._lengths), sampling.max_tokens)
        self._account.add(begun=1)
        async with self._free:
            self._account.add(running=1)
            try:
                begin_s = self._sampled_s()
                end_s = begin_s + length * self._token_s
                while (left_s := end_s - self._sampled_s()) > 1e-9:  # noqa: ASYNC110 (a load moves the end)
                    await asyncio.sleep(left_s)
            finally:
                self._account.add(running=-1)
        at = number * 17 % (len(self._words) - length)
        return Completion(
            tokens=(*self._words[at : at + length - 2], FIRST + number % 2, EOS),
            logprobs=(LOGPROB,) * length,
            spans=spans(self._starts(begin_s, length), length, sampling),
            stopped=True,
        )

    async def load(self, policy: Policy) -> LoadReport:
        """Nothing is sampled meanwhile."""
        at_s = self._sampled_s()
        self._paused_s += self._load_s
        self._account.add(loading=1)
        await asyncio.sleep(self._load_s)
        self._account.add(loading=-1)
        report = await super().load(policy)
        self._loads.append(Start(policy.version, 0))
        self._loaded_s.append(at_s)
        return report

    def _sampled_s(self) -> float:
        """Seconds that were sampled in."""
        return asyncio.get_running_loop().time() - self._paused_s

    def _starts(self, begin_s: float, length: int) -> list[Start]:
        """Which version sampled from which token on."""
        sampled = [
            Start(one.version, max(0, int((at_s - begin_s) / self._token_s + 1e-6)))
            for one, at_s in zip(self._loads, self._loaded_s, strict=True)
        ]
        return [one for one, after in pairwise((*sampled, Start(-1, length))) if one.at < min(after.at, length)]


class TimedLearner(ScriptedLearner):
    """stepping: called at the beginning of each step, and says how long it takes."""

    def __init__(self, stepping: Callable[[], None]) -> None:
        super().__init__()
        self._stepping = stepping

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = float("inf")
    ) -> StepStats:
        """The scripted one's, and its time."""
        self._stepping()
        return super().step(batch, learning_rate=learning_rate, seed=seed, max_grad_norm=max_grad_norm)

    def tensors(self) -> dict[str, Tensor]:
        """A table for the engine."""
        return {TENSOR: from_numpy(self._table())}

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        """Logprobs under the table."""
        table = self._table()
        return Probe(sequences=sequences, logprobs=tuple(bigram_logprobs(table, one) for one in sequences))

    def _table(self) -> np.ndarray:
        table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
        table[0, : len(self._weights)] = self._weights
        return table


class TimedStore(MemoryStore):
    """A store in memory that takes `publish_s` for the manifest of a version, as if for all of it. spend: of VirtualTime."""

    def __init__(self, spend: Callable[[float], None], publish_s: float) -> None:
        super().__init__()
        self._spend = spend
        self._publish_s = publish_s

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See MemoryStore."""
        if "/manifests/" in key:
            self._spend(self._publish_s)
        super().put(key, data)
