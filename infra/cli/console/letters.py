"""Content of a dead letter, as its page may show it.

Guarantee: what is sealed is opened only for a viewer whose key may open it, after the log has a record of that
(`actions.open_sealed`). It is a whole event, or texts in one, each under the key of the answer that it is about. A text that
stays sealed says why.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from infra.store.seal import Keys, is_sealed, open_event, open_text
from schemas import DeadLetter
from schemas.errors import BadFrame, Sealed
from schemas.ids import ANSWER_PREFIX, group_of, session_of
from schemas.records import MAX_LETTER_BYTES

MAX_SHOWN = 20_000  # characters
MAX_OPENED = 64  # texts of one letter
MAX_NAMED = 16  # answers that one letter names, tried for each text
SHUT = "(sealed)"
GONE = "(sealed; its user was forgotten)"
OF_NOBODY = "(sealed; nothing here names the answer it is about)"
TOO_MANY = f"(sealed; of one letter {MAX_OPENED} texts are opened)"


def shown_letter(letter: DeadLetter) -> dict[str, Any]:
    """The record that a letter holds, for viewers who may look: `text` (its JSON, "" where none can be shown), `why` not, `cut`
    (characters that are not shown) and `num_sealed` (texts that a key may open; a whole sealed event counts as one).
    """
    value, shown = letter.value, {"text": "", "why": "", "cut": 0, "num_sealed": 0}
    if not value:
        return shown | {"why": "The letter is empty."}
    if _is_shut(letter):
        return shown | {"why": "Sealed: it concerns an answer of a named user.", "num_sealed": 1}
    try:
        held = msgspec.json.decode(value)
        num_sealed = sum(map(is_sealed, _texts(held)))
        text = json.dumps(_changed(held, lambda text: SHUT if is_sealed(text) else text), indent=2, ensure_ascii=False)
    except (msgspec.DecodeError, RecursionError):
        is_whole = len(value) < MAX_LETTER_BYTES
        size = f"{len(value):,} bytes" if is_whole else f"only the first {len(value):,} bytes were kept"
        return shown | {"why": f"Not JSON: {size}."}
    return shown | {"text": text[:MAX_SHOWN], "cut": max(0, len(text) - MAX_SHOWN), "num_sealed": num_sealed}


def opened_letter(letter: DeadLetter, keys: Keys | None) -> DeadLetter:
    """The letter with its sealed texts opened; one that stays sealed says why. Blocks. Raises StoreError, Sealed where nothing
    can be opened since its user is forgotten, and BadFrame where it was altered or nothing in it is sealed.
    """
    if keys is not None and _is_shut(letter):
        return msgspec.structs.replace(letter, value=open_event(letter.value, keys))
    try:
        held = msgspec.json.decode(letter.value)
        sealed = [text for text in _texts(held) if is_sealed(text)]
    except (msgspec.DecodeError, RecursionError):
        sealed = []
    if keys is None or not sealed:
        raise BadFrame("this letter has no sealed text to open")
    answers = _named_in(held)
    opened = {text: _opened(text, answers, keys) for text in list(dict.fromkeys(sealed))[:MAX_OPENED]}
    found = set(opened.values())
    if found <= {GONE, OF_NOBODY}:
        raise (Sealed("its users were forgotten") if GONE in found else BadFrame("the letter does not name its answer"))
    try:
        value = _changed(held, lambda text: opened.get(text, TOO_MANY) if is_sealed(text) else text)
        return msgspec.structs.replace(letter, value=msgspec.json.encode(value))
    except RecursionError as error:
        raise BadFrame("the letter is nested too deeply to be opened") from error


def _opened(text: str, answers: list[str], keys: Keys) -> str:
    """The text, or the reason why it stays sealed. Each text is bound to its answer and opens only with it."""
    for answer in answers:
        try:
            return open_text(text, keys, answer)
        except Sealed:
            return GONE  # of whatever answer: the key itself is gone
        except BadFrame:
            continue
    return OF_NOBODY


def _named_in(held: object) -> list[str]:
    found: dict[str, None] = {}
    for text in _texts(held):
        name = text.removeprefix(ANSWER_PREFIX)
        try:
            if session_of(group_of(name)):
                found[name] = None
        except ValueError:
            continue
    return list(found)[:MAX_NAMED]


def _is_shut(letter: DeadLetter) -> bool:
    return letter.value.startswith(b'"sealed:')


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
    elif isinstance(value, str):
        yield value


def _changed(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, dict):
        return {name: _changed(part, change) for name, part in value.items()}
    if isinstance(value, list):
        return [_changed(part, change) for part in value]
    return change(value) if isinstance(value, str) else value
