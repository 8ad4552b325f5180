"""Recorded production prompts, answered again by a candidate and by the stable version, compared. Pure.

Answers to prompts without a right one can still differ: twice as long, cut off, refused or out of form.

Guarantee: where each prompt's two answers could as well have been each other's, and where the distance of none is expected
above what may be, a candidate is held with probability alpha at most (Bonferroni's bound over four questions). It assumes
that prompts are independent of each other; nothing is assumed of how long answers are, or how many.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, ClassVar

import msgspec

from actors.config import GateReplies, any_of
from actors.master.gate.evidence import mean_chance, sign_chance
from schemas import Experience

QUESTIONS = 4  # longer, shorter, failed more often, too far away

Prompt = bytes  # a hash: nothing that a customer wrote is kept


class ReplyFacts(msgspec.Struct, frozen=True):
    """One answer. num_tokens: sampled ones. failed: "" for one that is fine, else cut off, refused or out of form.
    words: hashes of neighbouring words, for the distance.

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
        self._refusal = any_of(config.refusals)
        self._form = re.compile(config.form) if config.form else None
        self._known: dict[int, dict[Prompt, ReplyFacts]] = {}

    def take(self, experience: Experience) -> None:
        """An answer came back; those of other suites change nothing."""
        if experience.suite == self._config.suite and experience.last and experience.messages:
            prompt = hashed([part for one in experience.messages[:-1] for part in (one.role, one.content)])
            self._known.setdefault(experience.max_version, {})[prompt] = self._reply(experience)

    def forget(self, versions: Iterable[int]) -> None:
        """These are compared with nothing any more."""
        for version in versions:
            self._known.pop(version, None)

    def versions(self) -> set[int]:
        """Versions that answered."""
        return set(self._known)

    def weigh(self, version: int, stable: int) -> tuple[dict[str, float], list[str]]:
        """Numbers of the comparison, and what speaks against the version. Only prompts that both answered count."""
        new, old = self._known.get(version, {}), self._known.get(stable, {})
        both = sorted(new.keys() & old.keys())
        suite = self._config.suite
        if stable < 0 or version == stable or not both:
            return {f"{suite}/prompts": 0.0}, []
        pairs = [(new[prompt], old[prompt]) for prompt in both]
        numbers = compared(pairs)
        return {f"{suite}/{name}": value for name, value in numbers.items()}, self._faults(numbers, pairs, stable)

    def _faults(self, numbers: Mapping[str, float], pairs: Sequence[Pair], stable: int) -> list[str]:
        config, faults = self._config, []
        alpha = config.alpha / QUESTIONS
        longer = [float(one.num_tokens - other.num_tokens) for one, other in pairs]
        is_longer = numbers["length"] > config.max_longer and sign_chance(longer) <= alpha
        is_shorter = numbers["length"] < 1.0 / config.max_longer and sign_chance([-gap for gap in longer]) <= alpha
        if is_longer or is_shorter:
            faults.append(
                f"{config.suite}: answers {numbers['length']:.2f} times as long as the stable version {stable}'s"
            )
        failed = [float(bool(one.failed) - bool(other.failed)) for one, other in pairs]
        if numbers["failed"] > numbers["stable failed"] + config.max_failed and sign_chance(failed) <= alpha:
            faults.append(
                f"{config.suite}: {numbers['failed']:.3f} cut off, refused or out of form, the stable version {stable} has "
                f"{numbers['stable failed']:.3f}"
            )
        if mean_chance([distance(pair) for pair in pairs], config.max_distance) <= alpha:
            faults.append(f"{config.suite}: {numbers['distance']:.3f} away from the stable version {stable}'s answers")
        return faults

    def _reply(self, experience: Experience) -> ReplyFacts:
        text = experience.response
        failed = ""
        if experience.end != "terminal":
            failed = "cut off"
        elif self._refusal.search(text[:200]):
            failed = "refused"
        elif self._form is not None and self._form.fullmatch(text.strip()) is None:
            failed = "out of form"
        return ReplyFacts(
            num_tokens=experience.num_sampled, failed=failed, words=frozenset(map(hashed, word_pairs(text)))
        )


def compared(pairs: Sequence[Pair]) -> dict[str, float]:
    """Of answers to the same prompts, new and old: prompts, length (mean tokens, new over old), failed and its parts, stable
    failed (shares), distance (mean over prompts, 0 to 1: Jaccard's, of neighbouring words).
    """
    count = len(pairs)
    new, old = [one for one, _ in pairs], [other for _, other in pairs]
    kinds = {kind: sum(one.failed == kind for one in new) / count for kind in ("cut off", "refused", "out of form")}
    return {
        "prompts": float(count),
        "length": sum(one.num_tokens for one in new) / max(1, sum(one.num_tokens for one in old)),
        "failed": sum(bool(one.failed) for one in new) / count,
        **kinds,
        "stable failed": sum(bool(one.failed) for one in old) / count,
        "distance": sum(map(distance, pairs)) / count,
    }


def distance(pair: Pair) -> float:
    """How far two answers are from each other."""
    return jaccard(pair[0].words, pair[1].words)


def word_pairs(text: str) -> frozenset[tuple[str, str]]:
    """Neighbouring words, the ends included, so that a single word has two.

    >>> sorted(word_pairs("yes"))
    [('', 'yes'), ('yes', '')]
    """
    words = ["", *text.split(), ""]
    return frozenset(pairwise(words))


def hashed(texts: Iterable[str]) -> bytes:
    """Some texts in their order, as 16 bytes."""
    return blake2b(msgspec.msgpack.encode(list(texts)), digest_size=16).digest()


def jaccard(one: frozenset[Any], other: frozenset[Any]) -> float:
    """Jaccard's distance: 0 for equal sets, 1 for sets without a common member."""
    return 1.0 - len(one & other) / len(one | other)
