"""Feedback becomes scores: which verdict of which source counts for an answer, and what an answer still waits for.

Rules: feedback belongs to the answer its ref names, and with a discount to the turns before it; no feedback differs from 0;
a newer verdict of the same (source, rater, type) revises the older, a retraction takes all of that rater's back; several
raters of a source are averaged; of several edits the newest stands.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from schemas import Experience, Rating, Score
from schemas.ids import ANSWER_PREFIX
from streams.collect.group import Echo, Said
from streams.processors.correct import CORRECTION, EDITS

Late = Literal["drop", "amend", "retrain"]
OpenText = Callable[[str, str], str | None]
DEFAULT_VERSION = "default"
MAX_RATINGS = 64


class Source(msgspec.Struct, frozen=True):
    """How long answers wait for a source, what its silence means, and what its late word does.

    default: the score when the window closes in silence, None leaves it absent. late: drop counts and forgets; amend
    sends the answer on again as a new revision in its lane; retrain does so in the human lane. discount: γ of what
    earlier turns of a session are credited with, 0 for nothing. per_rater, alike, within_ms: see `streams.collect.held`.

    Example: Source(window_ms=86_400_000, default=None, late="amend")
    """

    window_ms: int
    default: float | None = None
    late: Late = "drop"
    discount: float = 0.0
    per_rater: int = 0
    alike: int = 0
    within_ms: int = 0


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


def returns(said: Iterable[Said], echoes: Iterable[Echo], sources: Mapping[str, Source]) -> dict[str, float]:
    """Source to v + Σ γ^k · v_k: what was said about the answer, and about the one k turns later.

    The discounted return of Sutton and Barto, "Reinforcement Learning" (2nd edition), equation 3.8.
    """
    values = verdicts(said)
    later: dict[tuple[int, str], list[Said]] = {}
    for echo in echoes:
        later.setdefault((echo.turns, answer_of(echo.said.feedback.ref)), []).append(echo.said)
    for (turns, _), heard in sorted(later.items()):
        for name, value in verdicts(heard).items():
            if name in sources:
                values[name] = values.get(name, 0.0) + sources[name].discount ** turns * value
    return values


def ratings(said: Iterable[Said]) -> tuple[Rating, ...]:
    """What people say of answers as it stands, one for each (answer, source, rater), the newest, in log order."""
    standing: dict[tuple[str, str, str], Rating] = {}
    for item in sorted(said, key=lambda item: item.offset):
        feedback = item.feedback
        key = (answer_of(feedback.ref), feedback.source, feedback.rater)
        if feedback.type == "retraction":
            standing.pop(key, None)
        elif feedback.value is not None:
            standing.pop(key, None)
            standing[key] = Rating(
                source=feedback.source, value=feedback.value, rater=feedback.rater, time_ms=item.time_ms
            )
    return tuple(standing.values())[-MAX_RATINGS:]


def as_it_is(text: str, answer: str) -> str | None:
    """A text that nobody sealed."""
    return text


def edit_of(said: Iterable[Said], open_text: OpenText = as_it_is) -> tuple[str | None, int]:
    """The correction that stands, None for none, and how often one was made or taken back.

    open_text: what was written about an answer, None where it is forgotten.
    """
    standing: dict[tuple[str, str], str] = {}
    edits = 0
    for item in said:
        feedback = item.feedback
        key = (feedback.source, feedback.rater)
        if feedback.type == "correction" and feedback.text:
            standing.pop(key, None)
            edits += 1
            if (text := open_text(feedback.text, answer_of(feedback.ref))) is not None:
                standing[key] = text
        elif feedback.type == "retraction" and standing.pop(key, None) is not None:
            edits += 1
    return (list(standing.values())[-1] if standing else None), edits


def credited(
    experience: Experience,
    said: Iterable[Said],
    sources: Mapping[str, Source],
    waits: bool,
    echoes: Iterable[Echo] = (),
) -> Experience:
    """The experience with a score per source; `waits`: its lane waits for feedback, so silence takes the default."""
    values = returns(said, echoes, sources)
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


def with_edit(experience: Experience, said: Iterable[Said], open_text: OpenText = as_it_is) -> Experience:
    """The experience with the edit that stands, for the step `correct`; itself where nobody edited."""
    edit, edits = edit_of(said, open_text)
    if not edits:
        return experience
    return msgspec.structs.replace(experience, meta={**experience.meta, CORRECTION: edit, EDITS: edits})


def is_labelled(said: Iterable[Said], sources: Mapping[str, Source], echoes: Iterable[Echo] = ()) -> bool:
    """Whether every source has spoken about the answer or a later turn, so that nothing is left to wait for."""
    everything = (*said, *(echo.said for echo in echoes))
    heard = {item.feedback.source for item in everything if item.feedback.type != "retraction"}
    return all(source in heard for source in sources)
