"""Tokenizing what a conversation adds: the pieces between control tokens are remembered, and only new ones are tokenized.

A tokenizer cuts a text at its control tokens before it does anything else, so the ids of a conversation are those of its pieces
with the control tokens between them. Where it does not (one that looks past the cut, or marks the first word of a text), which
is asked of the tokenizer itself, the whole text is tokenized, as without this.
"""

import hashlib
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from infra.newest import Newest

MAX_TOKENS = 8 * 1024 * 1024  # remembered: 4 bytes each
MAX_PIECES = 65_536
ASKED = 8  # control tokens that are asked about, of many that are alike
_SIDES = ("a", " a", "a ", "\n", "A b\n\n", "1", "é ")

Encode = Callable[[Sequence[str]], list[list[int]]]


class Pieces:
    """Cache of texts that one tokenizer has encoded. ids: control tokens. encode: ids of several texts. Safe in threads."""

    def __init__(self, ids: Mapping[str, int], names: "re.Pattern[str]", encode: Encode) -> None:
        self._ids = ids
        self._split = re.compile(f"({names.pattern})")
        self._encode = encode
        self._known = Newest[bytes, "array[int]"](MAX_PIECES, max_size=MAX_TOKENS, size=len)
        self._lock = Lock()
        self.num_tokenized = 0  # characters, so far

    def ids_of(self, text: str) -> list[int]:
        """Ids of a text that a template wrote."""
        parts = self._split.split(text)  # a piece, a name, a piece and so on
        keys = [hashlib.blake2b(part.encode(), digest_size=16).digest() for part in parts[::2]]
        found = self._recalled(keys)
        unknown = {key: part for key, part in zip(keys, parts[::2], strict=True) if key not in found}
        if unknown:
            made = dict(zip(unknown, self._encode(list(unknown.values())), strict=True))
            found |= self._remembered(made, sum(map(len, unknown.values())))
        ids: list[int] = []
        for at, key in enumerate(keys):
            ids.extend(found[key])
            if 2 * at + 1 < len(parts):
                ids.append(self._ids[parts[2 * at + 1]])
        return ids

    def _recalled(self, keys: Sequence[bytes]) -> "dict[bytes, array[int]]":
        with self._lock:
            return {key: ids for key in keys if (ids := self._known.get(key)) is not None}

    def _remembered(self, made: Mapping[bytes, Sequence[int]], num_chars: int) -> "dict[bytes, array[int]]":
        packed = {key: array("I", ids) for key, ids in made.items()}
        with self._lock:
            self.num_tokenized += num_chars
            for key, ids in packed.items():
                self._known.put(key, ids)
        return packed


def cuts(backend: Any, flags: Mapping[str, Any], ids: Mapping[str, int]) -> bool:
    """True if a tokenizer's control tokens separate the text before them from the text after."""
    if not flags or any(token.lstrip or token.rstrip or token.single_word for token in flags.values()):
        return False
    if backend.normalizer is not None and any(token.normalized for token in flags.values()):
        return False
    others = [token.content for token in backend.get_added_tokens_decoder().values() if token.content not in flags]
    if any(name in other or other in name for other in others for name in flags):
        return False

    def encoded(text: str) -> list[int]:
        found: list[int] = backend.encode(text, add_special_tokens=False).ids
        return found

    alone = {side: encoded(side) for side in _SIDES}
    names = [*flags][: ASKED // 2] + [*flags][-ASKED // 2 :]
    return all(
        encoded(left + name + right) == [*alone[left], ids[name], *alone[right]]
        for name in names
        for left in _SIDES
        for right in _SIDES
    )
