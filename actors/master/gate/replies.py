"""Recorded production prompts, answered again by a candidate and by the stable version, compared. Pure.

Answers to prompts without a right one can still differ: twice as long, cut off, refused or out of form.

Guarantee: where each prompt's two answers could as well have been each other's, and where no distance is expected above
`max_distance`, a candidate is held with probability alpha at most (Bonferroni's bound over four tests). It assumes that prompts
are independent of each other; nothing is assumed of how long answers are, or how many.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, ClassVar

import msgspec

from actors.config import GateReplies, joined_patterns
from schemas import Experience

NUM_TESTS = 4  # longer, shorter, failed more often, too far away
FAILURES = ("cut off", "refused", "out of form")

Prompt = bytes  # a hash: nothing that a customer wrote is kept


class ReplyFacts(msgspec.Struct, frozen=True):
    """One answer. num_tokens: sampled. failed: one of FAILURES, or "". words: hashes of neighbouring words.

    Example: ReplyFacts(num_tokens=4, failed="", words=frozenset({b"0123456789abcdef"}))
    """

    num_tokens: int
    failed: str
    words: frozenset[bytes]


Pair = tuple[ReplyFacts, ReplyFacts]  # the candidate's answer, and the stable version's


class Replies:
    """Answers by version and prompt, as evals of the suite bring them back. One answer per prompt counts, the last."""

    KEPT: ClassVar[dict[str, Any]] = {"_known": dict[int, dict[Prompt, ReplyFacts]]}

    def __init__(self, config: GateReplies) -> None:
        self._config = config
        self._refusal = joined_patterns(config.refusals)
        self._form = re.compile(config.form) if config.form else None
        self._known: dict[int, dict[Prompt, ReplyFacts]] = {}

    def take(self, experience: Experience) -> None:
        """Take an answer; those of other suites change nothing."""
        if experience.suite == self._config.suite and experience.last and experience.messages:
            prompt = hashed(part for message in experience.messages[:-1] for part in (message.role, message.content))
            self._known.setdefault(experience.max_version, {})[prompt] = self._facts(experience)

    def forget(self, versions: Iterable[int]) -> None:
        """Drop versions that are compared with nothing any more."""
        for version in versions:
            self._known.pop(version, None)

    def versions(self) -> set[int]:
        return set(self._known)

    def weigh(self, version: int, stable: int) -> tuple[dict[str, float], list[str]]:
        """Numbers of the comparison, and reasons to hold the version. Only prompts that both answered count."""
        new, old = self._known.get(version, {}), self._known.get(stable, {})
        pairs = [(new[prompt], old[prompt]) for prompt in sorted(new.keys() & old.keys())]
        if stable < 0 or version == stable or not pairs:
            return {f"{self._config.suite}/prompts": 0.0}, []
        numbers = compared(pairs)
        faults = [f"{self._config.suite}: {fault}" for fault in self._faults(numbers, pairs, stable)]
        return {f"{self._config.suite}/{name}": value for name, value in numbers.items()}, faults

    def _faults(self, numbers: Mapping[str, float], pairs: Sequence[Pair], stable: int) -> list[str]:
        config, faults = self._config, []
        alpha = config.alpha / NUM_TESTS
        longer = [float(new.num_tokens - old.num_tokens) for new, old in pairs]
        is_longer = numbers["length"] > config.max_longer and sign_chance(longer) <= alpha
        is_shorter = numbers["length"] < 1.0 / config.max_longer and sign_chance([-gap for gap in longer]) <= alpha
        if is_longer or is_shorter:
            faults.append(f"answers {numbers['length']:.2f} times as long as the stable version {stable}'s")
        failed = [float(bool(new.failed) - bool(old.failed)) for new, old in pairs]
        if numbers["failed"] > numbers["stable failed"] + config.max_failed and sign_chance(failed) <= alpha:
            faults.append(
                f"{numbers['failed']:.3f} cut off, refused or out of form, the stable version {stable} has "
                f"{numbers['stable failed']:.3f}"
            )
        if mean_chance([distance(pair) for pair in pairs], config.max_distance) <= alpha:
            faults.append(f"{numbers['distance']:.3f} away from the stable version {stable}'s answers")
        return faults

    def _facts(self, experience: Experience) -> ReplyFacts:
        text, failed = experience.response, ""
        if experience.end != "terminal":
            failed = "cut off"
        elif self._refusal.search(text[:200]):
            failed = "refused"
        elif self._form is not None and self._form.fullmatch(text.strip()) is None:
            failed = "out of form"
        # The ends count as words, so that a single word has two neighbours.
        words = frozenset(hashed(pair) for pair in pairwise(("", *text.split(), "")))
        return ReplyFacts(experience.num_sampled, failed, words)


def compared(pairs: Sequence[Pair]) -> dict[str, float]:
    """Numbers about answers to the same prompts, new and old: prompts, length (mean tokens, new over old), shares of failed
    answers in all and by kind, and the mean distance.
    """
    count, new, old = len(pairs), [new for new, _ in pairs], [old for _, old in pairs]
    return {
        "prompts": float(count),
        "length": sum(reply.num_tokens for reply in new) / max(1, sum(reply.num_tokens for reply in old)),
        "failed": sum(bool(reply.failed) for reply in new) / count,
        **{kind: sum(reply.failed == kind for reply in new) / count for kind in FAILURES},
        "stable failed": sum(bool(reply.failed) for reply in old) / count,
        "distance": sum(map(distance, pairs)) / count,
    }


def distance(pair: Pair) -> float:
    """Jaccard's distance of two answers' neighbouring words, 0 to 1."""
    new, old = pair[0].words, pair[1].words
    return 1.0 - len(new & old) / len(new | old)


def hashed(texts: Iterable[str]) -> bytes:
    """Some texts in their order, as 16 bytes."""
    return blake2b(msgspec.msgpack.encode(list(texts)), digest_size=16).digest()


def sign_chance(gaps: Sequence[float]) -> float:
    """Bound on the probability that differences add up to so much where each is as likely to have the other sign: given their
    sizes, the sum of independent signs (Hoeffding, 1963, theorem 2).

    >>> round(sign_chance([1.0] * 12 + [0.0] * 88), 5), sign_chance([3.0, -4.0]), sign_chance([])
    (0.00248, 1.0, 1.0)
    """
    total = math.fsum(gaps)
    return math.exp(-(total**2) / (2.0 * math.fsum(gap * gap for gap in gaps))) if total > 0.0 else 1.0


def mean_chance(values: Sequence[float], most: float) -> float:
    """Bound on the probability that the mean of independent values from 0 to 1 is so high where none is expected above `most`
    (Hoeffding, 1963, theorem 1).

    >>> round(mean_chance([1.0] * 10, 0.5), 6) == round(0.5**10, 6), mean_chance([0.2, 0.4], 0.5)
    (True, 1.0)
    """
    mean = math.fsum(values) / max(1, len(values))
    if mean <= most:
        return 1.0
    if most <= 0.0:
        return 0.0
    above = mean * math.log(mean / most)
    below = (1.0 - mean) * math.log((1.0 - mean) / (1.0 - most)) if mean < 1.0 else 0.0
    return math.exp(-len(values) * (above + below))
