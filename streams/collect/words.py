"""What stands of all that was said about one answer, and what follows from it: verdicts, ratings, the edit that stands.

Guarantees: of each (source, rater, type) the newest word stands, a retraction takes all of that rater's back, and the same
value again changes nothing; feedback that is delivered again while it is among the last `MAX_KNOWN` heard is heard once; at
most `MAX_WORDS` words of a source stand, the first ones, so that neither what an answer holds nor what one word more costs
grows with the number of words.
"""

import hashlib
import math
from collections.abc import Callable, Iterable

import msgspec

from schemas import Feedback, Rating
from schemas.ids import ANSWER_PREFIX
from streams.collect.group import LoggedFeedback, Words

MAX_WORDS = 64
MAX_KNOWN = 256
MAX_RATINGS = 64
TOO_MANY = "more words about one answer than stand"
OpenText = Callable[[str, str], str | None]


def answer_of(ref: str) -> str:
    """Experience id of a ref, which may be the answer id a client saw."""
    return ref.removeprefix(ANSWER_PREFIX)


def as_it_is(text: str, answer: str) -> str | None:
    """A text that nobody sealed."""
    return text


def is_repeat(words: Words | None, feedback: Feedback) -> bool:
    """Whether this very feedback was heard before: same source and id."""
    return words is not None and _digest(feedback) in words.known


def hear(words: Words, said: LoggedFeedback, open_text: OpenText = as_it_is) -> str:
    """Take in one word about the answer. Returns why it does not stand, "" where it does or changes nothing.

    open_text: what was written about an answer, None where it is forgotten.
    """
    feedback = said.feedback
    words.known[_digest(feedback)] = None
    if len(words.known) > MAX_KNOWN:
        del words.known[next(iter(words.known))]
    if feedback.type == "retraction":
        back = [old for old in words.standing if _rater(old) == _rater(said)]
        words.standing = [old for old in words.standing if _rater(old) != _rater(said)]
        words.edits += any(_is_edit(old) for old in back)
        return ""
    before = edit_of(words, open_text) if _is_edit(said) else None
    old = next((old for old in words.standing if _key(old) == _key(said)), None)
    if old is None and sum(other.feedback.source == feedback.source for other in words.standing) >= MAX_WORDS:
        return TOO_MANY
    if old is not None and not _is_edit(said) and old.feedback.value == feedback.value:
        return ""
    words.standing = [*(other for other in words.standing if other is not old), said]
    words.edits += _is_edit(said) and (before is None or edit_of(words, open_text) != before)
    return ""


def verdicts(words: Words | None) -> dict[str, float]:
    """Source to the mean of its raters' values: what counts of all that was said about one answer."""
    values: dict[str, list[float]] = {}
    for said in [] if words is None else words.standing:
        if said.feedback.value is not None:
            values.setdefault(said.feedback.source, []).append(said.feedback.value)
    return {source: math.fsum(heard) / len(heard) for source, heard in values.items()}


def ratings(answers: Iterable[Words]) -> tuple[Rating, ...]:
    """What people say of answers as it stands, one for each (answer, source, rater), the newest `MAX_RATINGS`, in log order.

    No credit of later turns is in them: they are for whoever counts what people think.
    """
    found: list[tuple[int, Rating]] = []
    for words in answers:
        newest = {_rater(said): said for said in words.standing if said.feedback.value is not None}
        found += [(said.offset, _rating(said)) for said in newest.values()]
    return tuple(rating for _, rating in sorted(found, key=lambda one: one[0])[-MAX_RATINGS:])


def edit_of(words: Words, open_text: OpenText = as_it_is) -> str | None:
    """The correction that stands, the newest of several that can still be opened; None for none."""
    for said in reversed(words.standing):
        text = said.feedback.text
        if _is_edit(said) and text and (opened := open_text(text, answer_of(said.feedback.ref))) is not None:
            return opened
    return None


def _rating(said: LoggedFeedback) -> Rating:
    feedback = said.feedback
    assert feedback.value is not None
    return Rating(source=feedback.source, value=feedback.value, rater=feedback.rater, time_ms=said.time_ms)


def _is_edit(said: LoggedFeedback) -> bool:
    return said.feedback.type == "correction" and bool(said.feedback.text)


def _rater(said: LoggedFeedback) -> tuple[str, str]:
    return said.feedback.source, said.feedback.rater


def _key(said: LoggedFeedback) -> tuple[str, str, str]:
    return (*_rater(said), said.feedback.type)


def _digest(feedback: Feedback) -> int:
    named = msgspec.msgpack.encode((feedback.source, feedback.id))
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")
