"""Control tokens (separators of turns and roles) in text that people, tools and tasks write: they are spelled, not obeyed.

A tokenizer finds the names of its special tokens anywhere in a text. Here only names that the chat template wrote count.
Before the template renders a text, random digits split each such name in it, and each part of a name at its edge; the names
that the tokenizer still finds afterwards are the template's. They get secret names, the digits are removed, and a copy of
the tokenizer that obeys only the secret names encodes the text.

Guarantees: the control tokens of a conversation are exactly the template's, also where two fields make up a name together;
without them the ids say the very text; innocent text has the ids of the plain tokenizer; no text raises UnicodeError.

Limits: a template that marks turns by plain words, without tokens of their own, looks the same as a message that says the
same; a name that a template itself puts together around a field (`<|` role `|>`) is the template's; a special token of one
character is obeyed. Added tokens that are not special (`<think>`, `<tool_call>` of many models) are words like any other, so
that a model's own answers can be read back.
"""

import secrets
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any

FREE_CHARS = 4096  # longer texts leave the interpreter to other threads while they are tokenized
_NAMED = ("role", "type")  # a template may build a name of its own around these


class Controls:
    """The control tokens of one tokenizer (of the library `tokenizers`). also: names that its file does not mark special."""

    def __init__(self, backend: Any, also: Collection[str] = ()) -> None:
        self._backend = backend
        added = {} if backend.encode_special_tokens else backend.get_added_tokens_decoder()
        self._tokens = {
            token.content: (number, token)
            for number, token in added.items()
            if len(token.content) > 1 and (token.special or token.content in also)
        }
        # Of a text without a token of its own.
        unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
        self._ids = frozenset(number for number, _ in self._tokens.values()) - {unknown}
        self._cut = f"{secrets.randbits(64):020d}"
        nonce = secrets.token_hex(16)
        self._secret = {number: f"\uf8ff{nonce}-{number}\uf8ff" for number, _ in self._tokens.values()}
        names = self._tokens.keys()
        self._heads = {name[:size] for name in names for size in range(1, len(name))}
        self._tails = {name[size:] for name in names for size in range(1, len(name))}
        self._firsts, self._lasts = {name[0] for name in names}, {name[-1] for name in names}
        self._longest = max(map(len, names), default=0)
        self._normalizes = backend.normalizer is not None and any(
            token.normalized for _, token in self._tokens.values()
        )
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        ids = _ids(self._backend, text)
        return ids if self._ids.isdisjoint(ids) else self._spelled(self._apart(text, edges=False))

    def prepare(self) -> None:
        """Make the copy now: for a process that may not stop for it later."""
        _ids(self._copy, "")

    def encode_rendered(self, given: Any, render: Callable[[Any], str]) -> list[int]:
        """Ids of the text that `render` makes of `given`: texts, in lists and dictionaries. Raises the errors of `render`."""
        apart = self._all_apart(given)
        if apart == given:
            return _ids(self._backend, render(given))
        text = render(apart)
        pieces, end = [], 0
        for number, start, stop in self._found(text):
            pieces += [text[end:start], self._secret[number]]
            end = stop
        return self._spelled("".join([*pieces, text[end:]]))

    def _spelled(self, text: str) -> list[int]:
        """Ids of a text without its cuts, where only secret names are control tokens."""
        ids = _ids(self._copy, text.replace(self._cut, ""))
        if not self._ids.isdisjoint(ids):  # the vocabulary itself knows a name as a word
            ids = [token for piece in text.split(self._cut) for token in _ids(self._copy, piece)]
        return [self._back.get(token, token) for token in ids]

    def _found(self, text: str) -> list[tuple[int, int, int]]:
        """The control tokens that the tokenizer finds in a text: id, start and stop."""
        encoding = _encoded(self._backend, text)
        return [
            (token, start, stop)
            for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            if token in self._ids
        ]

    def _apart(self, text: str, *, edges: bool = True) -> str:
        """The text, cut within each name, and within parts that may become a name together with the text around it."""
        text = whole(text)
        if edges:
            text = self._inserted(text, self._edges(text))
        if not self._normalizes and not any(first in text for first in self._firsts):
            return text
        while found := self._found(text):
            spaces = [len(text[start:stop]) - len(text[start:stop].lstrip()) for _, start, stop in found]
            text = self._inserted(text, {start + skip + 1 for (_, start, _), skip in zip(found, spaces, strict=True)})
        return text

    def _edges(self, text: str) -> set[int]:
        """Places behind the first character of a name's beginning at the end, and before the last one of its end at the start;
        a template may take spaces away.
        """
        found, core = set(), text.strip()
        start = len(text) - len(text.lstrip())
        stop = start + len(core)
        first, last = core[: self._longest], core[-self._longest :]
        if any(letter in last for letter in self._firsts):
            found |= {stop - size + 1 for size in range(1, len(last) + 1) if last[-size:] in self._heads}
        if any(letter in first for letter in self._lasts):
            found |= {start + size - 1 for size in range(1, len(first) + 1) if first[:size] in self._tails}
        return found

    def _inserted(self, text: str, places: Collection[int]) -> str:
        ends = sorted(places)
        return self._cut.join(text[start:stop] for start, stop in pairwise([0, *ends, len(text)]))

    def _all_apart(self, given: Any, *, edges: bool = True) -> Any:
        if isinstance(given, str):
            return self._apart(given, edges=edges)
        if isinstance(given, Mapping):
            return {
                self._all_apart(name, edges=False): self._all_apart(value, edges=name not in _NAMED)
                for name, value in given.items()
            }
        if isinstance(given, list | tuple):
            return [self._all_apart(part) for part in given]
        return given

    @cached_property
    def _back(self) -> Mapping[int, int]:
        return {self._copy.token_to_id(secret): number for number, secret in self._secret.items()}

    @property
    def _copy(self) -> Any:
        """The tokenizer, without obedience. Made when it is needed first: it is as large as the tokenizer."""
        with self._lock:
            return self._made_copy

    @cached_property
    def _made_copy(self) -> Any:
        from tokenizers import AddedToken, Tokenizer

        def like(name: str, token: Any, *, special: bool) -> Any:
            normalized = special and token.normalized
            return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=normalized, special=special)

        copy = Tokenizer.from_str(self._backend.to_str())
        tokens = self._tokens.items()
        copy.add_special_tokens([like(name, token, special=True) for name, (_, token) in tokens])
        copy.add_tokens([like(self._secret[number], token, special=False) for _, (number, token) in tokens])
        copy.encode_special_tokens = True
        return copy


def whole(text: str) -> str:
    """The text, with halves of characters that UTF-8 cannot write made into U+FFFD; pairs of them are characters.

    >>> whole("a\\ud800b")
    'a\ufffdb'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _ids(backend: Any, text: str) -> list[int]:
    text = whole(text)
    if len(text) > FREE_CHARS:
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)  # lets other threads run
    return list(backend.encode(text, add_special_tokens=False).ids)


def _encoded(backend: Any, text: str) -> Any:
    """The ids of a text, each with its place in the text."""
    text = whole(text)
    if len(text) > FREE_CHARS:
        return backend.encode_batch([text], add_special_tokens=False)[0]
    return backend.encode(text, add_special_tokens=False)
