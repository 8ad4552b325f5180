"""What lay in a dead letter, as its page may show it.

Guarantee: nothing sealed is opened for it but an event that is sealed as a whole, for a viewer whose key may and once the log
has said so (`actions.open_sealed`); where a part of it is sealed, that is said in its place.
"""

import json

import msgspec

from infra.store.seal import Keys, is_sealed, open_event
from schemas import DeadLetter
from schemas.errors import BadFrame
from schemas.records import MAX_LETTER_BYTES

MAX_SHOWN = 20_000  # characters
SHUT = "(sealed)"


class ShownLetter(msgspec.Struct, frozen=True):
    """What is shown of a dead letter. text: the JSON of the record, "" where none can be shown. why: there is none.
    cut: characters that are not shown. is_sealed: as a whole, so that a key may open it.
    """

    text: str = ""
    why: str = ""
    cut: int = 0
    is_sealed: bool = False


def shown_letter(letter: DeadLetter) -> ShownLetter:
    """The record that a letter holds, for who may look."""
    value = letter.value
    if not value:
        return ShownLetter(why="It holds nothing.")
    if _is_shut(letter):
        return ShownLetter(why="Sealed: it is about an answer of a named user.", is_sealed=True)
    try:
        text = json.dumps(_without_sealed(msgspec.json.decode(value)), indent=2, ensure_ascii=False)
    except (msgspec.DecodeError, RecursionError):
        is_whole = len(value) < MAX_LETTER_BYTES
        size = f"{len(value):,} bytes" if is_whole else f"the first {len(value):,} bytes of it were kept"
        return ShownLetter(why=f"Not JSON: {size}.")
    return ShownLetter(text[:MAX_SHOWN], cut=max(0, len(text) - MAX_SHOWN))


def opened_letter(letter: DeadLetter, keys: Keys | None) -> DeadLetter:
    """The letter with its event as it came. Blocks; raises StoreError, Sealed where its user is forgotten, and BadFrame where
    it was altered or is not sealed as a whole.
    """
    if keys is None or not _is_shut(letter):
        raise BadFrame("this letter is not sealed as a whole: there is nothing to open")
    return msgspec.structs.replace(letter, value=open_event(letter.value, keys))


def _is_shut(letter: DeadLetter) -> bool:
    return letter.value.startswith(b'"sealed:')


def _without_sealed(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_sealed(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_sealed(one) for one in value]
    return SHUT if isinstance(value, str) and is_sealed(value) else value
