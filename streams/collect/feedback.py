"""Which feedback on one answer counts, and what follows from it: values by source, ratings, the newest edit.

Guarantees: of each (source, rater, type) the newest feedback counts, a retraction takes all of that rater's back, and the
same value again changes nothing; feedback that is delivered again while it is among the last `MAX_KNOWN` taken is taken
once; at most `MAX_COUNTED` of a source count, the first ones, so that neither the size of an answer's state nor the cost of
one more feedback grows with their number.
"""

import hashlib
import math
from collections.abc import Callable, Iterable

import msgspec

from schemas import Feedback, Rating
from schemas.ids import ANSWER_PREFIX
from streams.collect.group import AnswerFeedback, LoggedFeedback

MAX_COUNTED = 64
MAX_KNOWN = 256
MAX_RATINGS = 64
TOO_MANY = "more words about one answer than stand"
OpenText = Callable[[str, str], str | None]


def answer_of(ref: str) -> str:
    """Experience id of a ref, which may be the answer id a client saw."""
    return ref.removeprefix(ANSWER_PREFIX)


def as_it_is(text: str, answer: str) -> str | None:
    """A text that is not sealed."""
    return text


def is_repeat(on_answer: AnswerFeedback | None, feedback: Feedback) -> bool:
    """Whether this very feedback was taken before: same source and id."""
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
    before = edit_of(on_answer, open_text) if _is_edit(logged) else None
    old = next((old for old in on_answer.counted if _key(old) == _key(logged)), None)
    if old is None and sum(other.feedback.source == feedback.source for other in on_answer.counted) >= MAX_COUNTED:
        return TOO_MANY
    if old is not None and not _is_edit(logged) and old.feedback.value == feedback.value:
        return ""
    on_answer.counted = [*(other for other in on_answer.counted if other is not old), logged]
    on_answer.edits += _is_edit(logged) and (before is None or edit_of(on_answer, open_text) != before)
    return ""


def values_of(on_answer: AnswerFeedback | None) -> dict[str, float]:
    """Source to the mean of its raters' values, of the feedback on one answer that counts."""
    values: dict[str, list[float]] = {}
    for logged in [] if on_answer is None else on_answer.counted:
        if logged.feedback.value is not None:
            values.setdefault(logged.feedback.source, []).append(logged.feedback.value)
    return {source: math.fsum(given) / len(given) for source, given in values.items()}


def ratings(answers: Iterable[AnswerFeedback]) -> tuple[Rating, ...]:
    """The ratings of answers that count, one for each (answer, source, rater), the newest `MAX_RATINGS`, in log order.

    No credit of later turns is in them: they are for statistics of what people think.
    """
    found: list[tuple[int, Rating]] = []
    for on_answer in answers:
        newest = {_rater(logged): logged for logged in on_answer.counted if logged.feedback.value is not None}
        found += [(logged.offset, _rating(logged)) for logged in newest.values()]
    return tuple(rating for _, rating in sorted(found, key=lambda one: one[0])[-MAX_RATINGS:])


def edit_of(on_answer: AnswerFeedback, open_text: OpenText = as_it_is) -> str | None:
    """The newest correction that can still be opened; None for none."""
    for logged in reversed(on_answer.counted):
        text = logged.feedback.text
        if _is_edit(logged) and text and (opened := open_text(text, answer_of(logged.feedback.ref))) is not None:
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
