"""Feedback on an answer: selects the feedback that counts, and computes values by source, scores, ratings and the newest edit.

Rules: feedback belongs to the answer that its ref names and, discounted, to the turns before it; absent feedback is not 0; the
value of a source is the mean of its raters.

Guarantees: the newest feedback of each (source, rater, type) counts; a retraction withdraws all feedback of its rater in that
source; the same value again changes nothing. A redelivery changes nothing while the feedback is among the last `MAX_KNOWN` on
the answer. The first `MAX_COUNTED` of a source count, so an answer's state and the cost of one more feedback have a bound.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from infra.chain.processor import Memory
from schemas import Edit, Experience, Feedback, Rating, Score
from schemas.ids import ANSWER_PREFIX
from streams.collect.state import AnswerFeedback, LaterCredit, LoggedFeedback

MAX_COUNTED = 64
MAX_KNOWN = 256
MAX_RATINGS = 64
TOO_MANY = "too much feedback on one answer"
OpenText = Callable[[str, str], str | None]


def named_answer(ref: str) -> str:
    return ref.removeprefix(ANSWER_PREFIX)


def as_it_is(text: str, answer: str) -> str | None:
    return text


def is_repeat(on_answer: AnswerFeedback | None, feedback: Feedback) -> bool:
    return on_answer is not None and _digest(feedback) in on_answer.known


def take_feedback(on_answer: AnswerFeedback, logged: LoggedFeedback, open_text: OpenText = as_it_is) -> str:
    """Take one feedback on the answer. Returns why it does not count, "" where it does or changes nothing.

    open_text: opens a sealed text about an answer; None where it is forgotten.
    """
    feedback = logged.feedback
    on_answer.known[_digest(feedback)] = None
    if len(on_answer.known) > MAX_KNOWN:
        del on_answer.known[next(iter(on_answer.known))]
    if feedback.type == "retraction":
        back = [old for old in on_answer.counted if _rater(old) == _rater(logged)]
        on_answer.counted = [old for old in on_answer.counted if _rater(old) != _rater(logged)]
        on_answer.edits += any(_is_edit(old) for old in back)
        return ""
    before = newest_edit(on_answer, open_text) if _is_edit(logged) else None
    old = next((old for old in on_answer.counted if _key(old) == _key(logged)), None)
    if old is None and sum(other.feedback.source == feedback.source for other in on_answer.counted) >= MAX_COUNTED:
        return TOO_MANY
    if old is not None and not _is_edit(logged) and old.feedback.value == feedback.value:
        return ""
    on_answer.counted = [*(other for other in on_answer.counted if other is not old), logged]
    on_answer.edits += _is_edit(logged) and (before is None or newest_edit(on_answer, open_text) != before)
    return ""


def mean_values(on_answer: AnswerFeedback | None) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for logged in [] if on_answer is None else on_answer.counted:
        if logged.feedback.value is not None:
            values.setdefault(logged.feedback.source, []).append(logged.feedback.value)
    return {source: math.fsum(given) / len(given) for source, given in values.items()}


def ratings(answers: Iterable[AnswerFeedback]) -> tuple[Rating, ...]:
    """The ratings of answers that count, one for each (answer, source, rater), the newest `MAX_RATINGS`, in log order.

    They contain no credit of later turns: they are for statistics of people's opinions.
    """
    found: list[tuple[int, Rating]] = []
    for on_answer in answers:
        newest = {_rater(logged): logged for logged in on_answer.counted if logged.feedback.value is not None}
        found += [(logged.offset, _rating(logged)) for logged in newest.values()]
    return tuple(rating for _, rating in sorted(found, key=lambda entry: entry[0])[-MAX_RATINGS:])


def newest_edit(on_answer: AnswerFeedback, open_text: OpenText = as_it_is) -> str | None:
    """Return the newest correction that can still be opened, None for none."""
    for logged in reversed(on_answer.counted):
        text = logged.feedback.text
        if _is_edit(logged) and text and (opened := open_text(text, named_answer(logged.feedback.ref))) is not None:
            return opened
    return None


def _rating(logged: LoggedFeedback) -> Rating:
    feedback = logged.feedback
    assert feedback.value is not None
    return Rating(source=feedback.source, value=feedback.value, rater=feedback.rater, time_ms=logged.time_ms)


def _is_edit(logged: LoggedFeedback) -> bool:
    return logged.feedback.type == "correction" and bool(logged.feedback.text)


def _rater(logged: LoggedFeedback) -> tuple[str, str]:
    return logged.feedback.source, logged.feedback.rater


def _key(logged: LoggedFeedback) -> tuple[str, str, str]:
    return (*_rater(logged), logged.feedback.type)


def _digest(feedback: Feedback) -> int:
    named = msgspec.msgpack.encode((feedback.source, feedback.id))
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")


Late = Literal["drop", "amend", "retrain"]
DEFAULT_VERSION = "default"
USUAL = "usual verdicts"
MAX_USUAL = 1024
USUAL_WINDOW = 256  # verdicts a mean is of, roughly
USUAL_PRIOR = 8  # neutral verdicts it begins with, one less for each verdict
NEUTRAL = 0.5


class FeedbackRules(msgspec.Struct, frozen=True):
    """Rules of a source: how long answers wait for it, its default, and the effect of its late feedback.

    window_ms: how long collect waits after the answer. default: the score when the window closes in silence, None leaves it
    absent. late: drop counts and forgets; amend sends the answer on again as a new revision in its lane, for copies that were
    not drawn yet; retrain sends it to be trained again, in the human lane; both only where the verdict changed. discount: γ of
    the credit to earlier turns of a session, 0 for no credit.
    """

    window_ms: int
    default: float | None = None
    late: Late = "drop"
    discount: float = 0.0


def returns(
    on_answer: AnswerFeedback | None,
    credits: Iterable[LaterCredit],
    sources: Mapping[str, FeedbackRules],
    usual: Callable[[str], float] = lambda source: NEUTRAL,
) -> dict[str, float]:
    """By source: v + Σ γ^k · (v_k - u). v: value of the answer. v_k: value of the answer k turns later. u: `usual`, the running
    mean of the source's verdicts. An answer without feedback of its own has v = u.

    The discounted differential return of Sutton and Barto, "Reinforcement Learning" (2nd edition), section 10.3, equation
    10.9: if all turns are equally good, an early turn gets no more than a late turn.

    Assumes that the mean verdict does not depend on the position in a session: if people rate later turns d worse, the values
    of earlier turns are too low by at most d · γ / (1 - γ) in total.
    """
    values = mean_values(on_answer)
    for credit in sorted(credits, key=lambda credit: (credit.turns, sorted(credit.values.items()))):
        for name, value in credit.values.items():
            if name in sources:
                more = sources[name].discount ** credit.turns * (value - usual(name))
                values[name] = values.get(name, usual(name)) + more
    return values


def learn_usual(
    memories: dict[str, Memory], tenant: str, before: Mapping[str, float], now: Mapping[str, float]
) -> None:
    """Update the mean of a source with the verdict on an answer, whether it is new, changed or withdrawn.

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
        memory.discard(key)  # so that a key in use becomes the newest, which the memory forgets last
        memory.set(key, [max(count, 0), min(1.0, max(0.0, mean))])


def usual_value(memories: Mapping[str, Memory], tenant: str, source: str) -> float:
    """Return the usual verdict of a tenant's users through a source: the mean of the last verdicts, with neutral
    verdicts added up to `USUAL_PRIOR`.
    """
    count, mean = _known(memories[USUAL], f"{tenant}\x00{source}") if USUAL in memories else (0, 0.0)
    return (count * mean + max(0, USUAL_PRIOR - count) * NEUTRAL) / max(count, USUAL_PRIOR)


def usual_memories(sources: Mapping[str, FeedbackRules]) -> dict[str, Memory]:
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
    if on_answer is None or not on_answer.edits:
        return experience
    return msgspec.structs.replace(experience, edit=Edit(text=newest_edit(on_answer, open_text), count=on_answer.edits))


def is_labelled(on_answer: AnswerFeedback | None, sources: Mapping[str, FeedbackRules]) -> bool:
    """Return True if every source has given feedback on the answer itself, so that collect waits for nothing more.

    Feedback on a later turn ends no wait: the answer's own may still come within its window.
    """
    given = set() if on_answer is None else {logged.feedback.source for logged in on_answer.counted}
    return all(source in given for source in sources)
