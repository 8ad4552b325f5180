"""Feedback becomes scores: which value of which source counts for an answer, and what an answer still waits for.

Rules: feedback belongs to the answer its ref names, and with a discount to the turns before it; no feedback differs from 0;
several raters of a source are averaged; of several edits the newest counts.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from infra.chain.processor import Memory
from schemas import Edit, Experience, Score
from streams.collect.feedback import OpenText, as_it_is, edit_of, values_of
from streams.collect.group import AnswerFeedback, LaterCredit

Late = Literal["drop", "amend", "retrain"]
DEFAULT_VERSION = "default"
USUAL = "usual verdicts"
MAX_USUAL = 1024
USUAL_WINDOW = 256  # verdicts a mean is of, roughly
USUAL_PRIOR = 8  # neutral verdicts it begins with, one less for each verdict
NEUTRAL = 0.5


class FeedbackRules(msgspec.Struct, frozen=True):
    """How long answers wait for a source, what its silence means, and what its late feedback does.

    window_ms: how long collect waits after the answer. default: the score when the window closes in silence, None leaves it
    absent. late: drop counts and forgets; amend sends the answer on again as a new revision in its lane, for copies that were
    not drawn yet; retrain sends it to be trained again, in the human lane; both only where the verdict changed. discount: γ of
    what earlier turns of a session are credited with, 0 for nothing. per_rater: how many feedbacks of one rater count, 0 for
    no limit. alike: how many that say nearly the same, 0 for no limit. within_ms: the time in which both are counted; see
    `streams.collect.limits`.

    Example: FeedbackRules(window_ms=86_400_000, default=None, late="amend")
    """

    window_ms: int
    default: float | None = None
    late: Late = "drop"
    discount: float = 0.0
    per_rater: int = 0
    alike: int = 0
    within_ms: int = 0


def returns(
    on_answer: AnswerFeedback | None,
    credits: Iterable[LaterCredit],
    sources: Mapping[str, FeedbackRules],
    usual: Callable[[str], float] = lambda source: NEUTRAL,
) -> dict[str, float]:
    """Source to v + Σ γ^k · (v_k - u): what counts of the answer, and by how much what counts of the one k turns later differs
    from the usual.

    The discounted differential return of Sutton and Barto, "Reinforcement Learning" (2nd edition), section 10.3, equation
    10.9: of turns that are all equally good, an early one gets no more for having more turns behind it. An answer
    without feedback of its own has the usual value, v = u. usual: the running mean of a source's verdicts.

    Assumes that verdicts have one usual value wherever in a session they fall: where later turns are rated d worse, earlier
    ones lean down by at most d · γ / (1 - γ), together.
    """
    values = values_of(on_answer)
    for credit in sorted(credits, key=lambda credit: (credit.turns, sorted(credit.values.items()))):
        for name, value in credit.values.items():
            if name in sources:
                more = sources[name].discount ** credit.turns * (value - usual(name))
                values[name] = values.get(name, usual(name)) + more
    return values


def learn_usual(
    memories: dict[str, Memory], tenant: str, before: Mapping[str, float], now: Mapping[str, float]
) -> None:
    """Let the verdict on an answer join the mean of its source; one that is changed or taken back counts as it stands.

    before, now: values of the answer by source.
    """
    memory = memories.setdefault(USUAL, Memory(MAX_USUAL))
    for source in sorted(before.keys() | now.keys()):
        old, new = before.get(source), now.get(source)
        if old == new:
            continue
        key = f"{tenant}\x00{source}"
        count, mean = _known(memory, key)
        total = count * mean - (0.0 if old is None else old)
        count += (new is not None) - (old is not None)
        if count > USUAL_WINDOW:
            count, total = USUAL_WINDOW, total * (USUAL_WINDOW - 1) / USUAL_WINDOW
        mean = (total + (0.0 if new is None else new)) / count if count > 0 else 0.0
        memory.discard(key)  # so that what is in use is not the first to be forgotten
        memory.set(key, [max(count, 0), min(1.0, max(0.0, mean))])


def usual_of(memories: Mapping[str, Memory], tenant: str, source: str) -> float:
    """What a tenant's users usually say through a source: the mean of the last verdicts, filled up with neutral ones to
    `USUAL_PRIOR` while there are fewer.
    """
    count, mean = _known(memories[USUAL], f"{tenant}\x00{source}") if USUAL in memories else (0, 0.0)
    return (count * mean + max(0, USUAL_PRIOR - count) * NEUTRAL) / max(count, USUAL_PRIOR)


def usual_memories(sources: Mapping[str, FeedbackRules]) -> dict[str, Memory]:
    """What has to be remembered where earlier turns are credited."""
    return {USUAL: Memory(MAX_USUAL)} if any(source.discount > 0 for source in sources.values()) else {}


def _known(memory: Memory, key: str) -> tuple[int, float]:
    known = memory.get(key)
    return (int(known[0]), float(known[1])) if isinstance(known, list) else (0, 0.0)


def credited(
    experience: Experience,
    on_answer: AnswerFeedback | None,
    sources: Mapping[str, FeedbackRules],
    waits: bool,
    credits: Iterable[LaterCredit] = (),
    usual: Callable[[str], float] = lambda source: NEUTRAL,
) -> Experience:
    """The experience with a score per source; `waits`: its lane waits for feedback, so silence takes the default."""
    values = returns(on_answer, credits, sources, usual)
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


def with_edit(experience: Experience, on_answer: AnswerFeedback | None, open_text: OpenText = as_it_is) -> Experience:
    """The experience with the newest edit, for the step `correct`; itself without edits."""
    if on_answer is None or not on_answer.edits:
        return experience
    return msgspec.structs.replace(experience, edit=Edit(text=edit_of(on_answer, open_text), count=on_answer.edits))


def is_labelled(on_answer: AnswerFeedback | None, sources: Mapping[str, FeedbackRules]) -> bool:
    """Whether every source has given feedback on the answer itself, so that collect waits for nothing more.

    Feedback on a later turn ends no wait: the answer's own may still come within its window.
    """
    given = set() if on_answer is None else {logged.feedback.source for logged in on_answer.counted}
    return all(source in given for source in sources)
