"""What lay in a dead letter, as its page may show it.

Guarantee: nothing sealed is opened for it, and where a part of it is sealed, that is said in its place.
"""

import json

import msgspec

from infra.store.seal import is_sealed
from schemas import DeadLetter
from schemas.records import MAX_LETTER_BYTES

MAX_SHOWN = 20_000  # characters
SHUT = "(sealed)"


class ShownLetter(msgspec.Struct, frozen=True):
    """text: the JSON of the record, "" where `why` says why there is none. cut: characters that are not shown."""

    text: str = ""
    why: str = ""
    cut: int = 0


def shown_letter(letter: DeadLetter) -> ShownLetter:
    """The record that a letter holds, for who may look."""
    value = letter.value
    if not value:
        return ShownLetter(why="It holds nothing.")
    if value.startswith(b'"sealed:'):
        return ShownLetter(why="Sealed: it is about an answer of a named user.")
    try:
        text = json.dumps(_without_sealed(msgspec.json.decode(value)), indent=2, ensure_ascii=False)
    except (msgspec.DecodeError, RecursionError):
        is_whole = len(value) < MAX_LETTER_BYTES
        size = f"{len(value):,} bytes" if is_whole else f"the first {len(value):,} bytes of it were kept"
        return ShownLetter(why=f"Not JSON: {size}.")
    return ShownLetter(text[:MAX_SHOWN], cut=max(0, len(text) - MAX_SHOWN))


def _without_sealed(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_sealed(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_sealed(one) for one in value]
    return SHUT if isinstance(value, str) and is_sealed(value) else value
