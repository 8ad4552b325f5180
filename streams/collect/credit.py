"""Feedback becomes scores: which verdict of which source counts for an answer, and what an answer still waits for.

Rules: feedback belongs to the answer its ref names and to nothing else; no feedback differs from 0; a newer verdict of
the same (source, rater, type) revises the older, a retraction takes all of that rater's back; several raters of a
source are averaged.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from schemas import Experience, Score
from schemas.ids import ANSWER_PREFIX
from streams.collect.group import Said

Late = Literal["drop", "amend", "retrain"]
DEFAULT_VERSION = "default"


class Source(msgspec.Struct, frozen=True):
    """How long answers wait for a source, what its silence means, and what its late word does.

    default: the score when the window closes in silence, None leaves it absent. late: drop counts and forgets; amend
    sends the answer on again as a new revision in its lane; retrain does so in the human lane.

    Example: Source(window_ms=86_400_000, default=None, late="amend")
    """

    window_ms: int
    default: float | None = None
    late: Late = "drop"


def answer_of(ref: str) -> str:
    """Experience id of a ref, which may be the answer id a client saw."""
    return ref.removeprefix(ANSWER_PREFIX)


def is_repeat(said: Iterable[Said], new: Said) -> bool:
    """Whether this very feedback was heard before: same source and id."""
    return any((old.feedback.source, old.feedback.id) == (new.feedback.source, new.feedback.id) for old in said)


def verdicts(said: Iterable[Said]) -> dict[str, float]:
    """Source to value: what counts of all that was said about one answer, in log order."""
    standing: dict[tuple[str, str, str], float | None] = {}
    for item in said:
        feedback = item.feedback
        if feedback.type == "retraction":
            for key in [key for key in standing if key[:2] == (feedback.source, feedback.rater)]:
                del standing[key]
        else:
            standing[(feedback.source, feedback.rater, feedback.type)] = feedback.value
    values: dict[str, list[float]] = {}
    for (source, _, _), value in standing.items():
        if value is not None:
            values.setdefault(source, []).append(value)
    return {source: sum(heard) / len(heard) for source, heard in values.items()}


def credited(experience: Experience, said: Iterable[Said], sources: Mapping[str, Source], waits: bool) -> Experience:
    """The experience with a score per source; `waits`: its lane waits for feedback, so silence takes the default."""
    values = verdicts(said)
    scores = [Score(name=source, value=value) for source, value in sorted(values.items())]
    if waits:
        scores += [
            Score(name=name, value=source.default, version=DEFAULT_VERSION)
            for name, source in sorted(sources.items())
            if name not in values and source.default is not None
        ]
    if not scores:
        return experience
    given = {score.name for score in scores}
    others = tuple(score for score in experience.scores if score.name not in given)
    return msgspec.structs.replace(experience, scores=(*others, *scores))


def is_labelled(said: Iterable[Said], sources: Mapping[str, Source]) -> bool:
    """Whether every source has spoken about the answer, so that nothing is left to wait for."""
    heard = {item.feedback.source for item in said if item.feedback.type != "retraction"}
    return all(source in heard for source in sources)
