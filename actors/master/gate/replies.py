"""Recorded production prompts, answered again by a candidate and by the stable version, compared. Pure.

Answers without a known right answer can still be compared: answers twice as long, cut off, refused or out of form.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec

from actors.config import GateReplies, any_of
from schemas import Experience

Prompt = tuple[tuple[str, str], ...]


class Reply(msgspec.Struct, frozen=True):
    """One answer. failed: "" for one that is fine, else cut off, refused or out of form. words: for the distance.

    Example: Reply(num_tokens=4, failed="", words=frozenset({("the", "answer")}))
    """

    num_tokens: int
    failed: str
    words: frozenset[tuple[str, str]]


class Replies:
    """Answers by version and prompt, as evals of the suite bring them back. One answer per prompt counts, the last."""

    def __init__(self, config: GateReplies) -> None:
        self._config = config
        self._refusal = any_of(config.refusals)
        self._form = re.compile(config.form) if config.form else None
        self._known: dict[int, dict[Prompt, Reply]] = {}

    def take(self, experience: Experience) -> None:
        """An answer came back; those of other suites change nothing."""
        if experience.suite == self._config.suite and experience.last and experience.messages:
            prompt = tuple((one.role, one.content) for one in experience.messages[:-1])
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
        numbers = compared([new[prompt] for prompt in both], [old[prompt] for prompt in both])
        return {f"{suite}/{name}": value for name, value in numbers.items()}, self._faults(numbers, stable)

    def _faults(self, numbers: Mapping[str, float], stable: int) -> list[str]:
        config, faults = self._config, []
        if numbers["length"] > config.max_longer or numbers["length"] < 1.0 / config.max_longer:
            faults.append(
                f"{config.suite}: answers {numbers['length']:.2f} times as long as the stable version {stable}'s"
            )
        if numbers["failed"] > numbers["stable failed"] + config.max_failed:
            faults.append(
                f"{config.suite}: {numbers['failed']:.3f} cut off, refused or out of form, the stable version {stable} has "
                f"{numbers['stable failed']:.3f}"
            )
        if numbers["distance"] > config.max_distance:
            faults.append(f"{config.suite}: {numbers['distance']:.3f} away from the stable version {stable}'s answers")
        return faults

    def _reply(self, experience: Experience) -> Reply:
        text = experience.response
        failed = ""
        if experience.end != "terminal":
            failed = "cut off"
        elif self._refusal.search(text[:200]):
            failed = "refused"
        elif self._form is not None and self._form.fullmatch(text.strip()) is None:
            failed = "out of form"
        return Reply(num_tokens=experience.num_sampled, failed=failed, words=word_pairs(text))


def compared(new: list[Reply], old: list[Reply]) -> dict[str, float]:
    """Of answers to the same prompts, in the same order: prompts, length (mean tokens, new over old), failed and its
    parts, stable failed (shares), distance (mean over prompts, 0 to 1: Jaccard's, of neighbouring words).
    """
    count = len(new)
    kinds = {kind: sum(one.failed == kind for one in new) / count for kind in ("cut off", "refused", "out of form")}
    return {
        "prompts": float(count),
        "length": sum(one.num_tokens for one in new) / max(1, sum(one.num_tokens for one in old)),
        "failed": sum(map(bool, (one.failed for one in new))) / count,
        **kinds,
        "stable failed": sum(map(bool, (one.failed for one in old))) / count,
        "distance": sum(jaccard(one.words, other.words) for one, other in zip(new, old, strict=True)) / count,
    }


def word_pairs(text: str) -> frozenset[tuple[str, str]]:
    """Neighbouring words, the ends included, so that a single word has two.

    >>> sorted(word_pairs("yes"))
    [('', 'yes'), ('yes', '')]
    """
    words = ["", *text.split(), ""]
    return frozenset(pairwise(words))


def jaccard(one: frozenset[tuple[str, str]], other: frozenset[tuple[str, str]]) -> float:
    """Jaccard's distance: 0 for equal sets, 1 for sets without a common member."""
    return 1.0 - len(one & other) / len(one | other)
