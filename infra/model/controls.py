"""Control tokens (what separates turns and roles) in text that people, tools and tasks write: they are spelled, not obeyed.

A tokenizer finds the names of its special tokens wherever they are in a text. Here only those count that the chat template
wrote itself. For a text with such a name a copy of the tokenizer is used that obeys no special token: the template's own are
passed to it under secret names, and the ids are put back behind it.

    content ── mask: the first (or last) character of a name, by one that occurs nowhere ──> template
                                                                                                │
    ids <── the template's put back <── copy <── mask taken off <── what is left of names is the template's

Guarantees: the control tokens of a conversation are exactly the template's, also where two fields make up a name together;
without them the ids say the very text; innocent text has the ids of the plain tokenizer; no text raises UnicodeError.

Limits: a template that marks turns by plain words, without tokens of their own, looks the same as a message that says the
same; a name that a template itself puts together around a field (`<|` role `|>`) is the template's. Added tokens that are
not special (`<think>`, `<tool_call>` of many models) are words like any other, so that a model's own answers can be read back.
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

FREE_CHARS = 4096  # longer texts leave the interpreter to other threads while they are tokenized
_PRIVATE = range(0xE000, 0xF8FF)  # characters without a meaning; the last of them marks secret names
_NAMED = ("role", "type")  # a template may build a name of its own around these
_COMMON = ("role", "content", "system", "user", "assistant")  # texts of nearly every conversation


class Controls:
    """The control tokens of one tokenizer (of the library `tokenizers`). also: names that its file does not mark special."""

    def __init__(self, backend: Any, also: Collection[str] = ()) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        obeys = not backend.encode_special_tokens
        named = {
            added_token.content: (token, added_token)
            for token, added_token in added.items()
            if obeys and added_token.content
        }
        self._flags = {name: token for name, (_, token) in named.items() if token.special or name in also}
        self.ids: Mapping[str, int] = {name: named[name][0] for name in self._flags}
        unknown = self.ids.get(
            getattr(backend.model, "unk_token", None) or ""
        )  # a text without a token of its own has this id
        self._controls = frozenset(self.ids.values()) - {unknown}
        nonce = secrets.token_hex(16)  # a text cannot guess the names of the control tokens in the copy
        self._secret = {name: f"\uf8ff{nonce}{index}\uf8ff" for index, name in enumerate(self.ids)}
        self._cut = f"\uf8ff{nonce}\uf8ff"
        self._heads = {name[:size] for name in self.ids for size in range(1, len(name))}
        self._tails = {name[size:] for name in self.ids for size in range(1, len(name))}
        self._firsts, self._lasts = {name[0] for name in self.ids}, {name[-1] for name in self.ids}
        self._longest = max(map(len, self.ids), default=0)
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        if not self._stands_in(text):
            return _ids(self._backend, text)
        return self._obeyed(text, [match.start() for match in self._anywhere.finditer(text)])

    def prepare(self) -> None:
        """Make the copy now: for a process that may not stop for it later."""
        self._obeyed("", [])

    def encode_rendered(self, given: Any, render: Callable[[Any], str]) -> list[int]:
        """Ids of what a template makes of `given`: texts, within lists and dictionaries. Raises what `render` raises, and
        ValueError for a text that leaves no character free.
        """
        strings = _strings(given)
        known = self._harmless
        if not any([text not in known and self._may_name(text) for text in strings]):
            return _ids(self._backend, render(given))
        mask = self._mask(strings)
        rendered = render(self._masked(given, mask))
        for hidden in mask.values():
            rendered = rendered.replace(f"\\u{ord(hidden):04x}", hidden)  # a template may write JSON in ASCII
        text = self._whole_names.sub(lambda match: self._secret[match[0]], rendered)
        places = [match.start() for match in re.finditer(f"[{''.join(mask.values())}]", text)]
        for character, hidden in mask.items():
            text = text.replace(hidden, character)
        return self._obeyed(text, places)

    def _obeyed(self, text: str, places: list[int]) -> list[int]:
        """Ids where only secret names are control tokens. places: in `text`, of characters of names that are not."""
        ids = _ids(self._copy, text)
        if self._controls.isdisjoint(ids):
            return [self._back.get(token, token) for token in ids]
        # The vocabulary itself knows such a name as a word: then the text is cut in the midst of it.
        pieces = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]
        ids = _ids(
            self._copy, pieces[0] + "".join(self._cut + piece[:1] + self._cut + piece[1:] for piece in pieces[1:])
        )
        cut = self._copy.token_to_id(self._cut)
        if not self._controls.isdisjoint(ids):
            raise ValueError("the tokenizer spells a control token's name as that token; its vocabulary cannot be used")
        return [self._back.get(token, token) for token in ids if token != cut]

    def _stands_in(self, text: str) -> bool:
        """True if a name is in the text, or would be once the tokenizer has normalized it."""
        if not self.ids:
            return False
        if self._anywhere.search(text):
            return True
        if not self._normalizes:
            return False
        return bool(self._anywhere.search(self._backend.normalizer.normalize_str(whole(text))))

    def _may_name(self, text: str) -> bool:
        return self._stands_in(text) or next(self._edges(text), None) is not None

    def _edges(self, text: str) -> Iterator[int]:
        """Places of the first characters of a name's beginning at the end, and of the last ones of its end at the start;
        a template may take spaces away.
        """
        last = text[-self._longest :] if not text[-1:].isspace() else text.rstrip()[-self._longest :]
        if not self._firsts.isdisjoint(last):
            stop = len(text.rstrip()) if text[-1:].isspace() else len(text)
            yield from (stop - size for size in range(1, len(last) + 1) if last[-size:] in self._heads)
        start = len(text) - len(text.lstrip()) if text[:1].isspace() else 0
        first = text[start : start + self._longest]
        if not self._lasts.isdisjoint(first):
            yield from (start + size - 1 for size in range(1, len(first) + 1) if first[:size] in self._tails)

    def _mask(self, strings: Collection[str]) -> dict[str, str]:
        taken = set[str]().union(*strings)
        written = {found.lower() for text in strings for found in re.findall(r"\\u[efEF][0-9a-fA-F]{3}", text)}
        free = (chr(code) for code in _PRIVATE if chr(code) not in taken and f"\\u{code:04x}" not in written)
        mask = dict(zip(sorted(self._firsts | self._lasts), free, strict=False))
        if len(mask) < len(self._firsts | self._lasts):
            raise ValueError("got every character of the private use area, expected some of them to be free")
        return mask

    def _masked(self, given: Any, mask: Mapping[str, str], *, edges: bool = True) -> Any:
        if isinstance(given, str):
            places = {match.start() for match in self._anywhere.finditer(given)}
            places |= set(self._edges(given)) if edges else set()
            if not places:
                return given
            letters = list(given)
            for at in places:
                letters[at] = mask[letters[at]]
            return "".join(letters)
        if isinstance(given, Mapping):
            return {
                self._masked(name, mask, edges=False): self._masked(value, mask, edges=name not in _NAMED)
                for name, value in given.items()
            }
        if isinstance(given, list | tuple):
            return [self._masked(part, mask) for part in given]
        return given

    @cached_property
    def _harmless(self) -> frozenset[str]:
        """Those of the common texts that name nothing: looked at once."""
        return frozenset(text for text in _COMMON if not self._may_name(text))

    @cached_property
    def _anywhere(self) -> re.Pattern[str]:
        return re.compile(f"(?={_alternatives(self.ids)})")

    @cached_property
    def _whole_names(self) -> re.Pattern[str]:
        """Names as the tokenizer finds them: the leftmost, of these the longest."""
        return re.compile(_alternatives(self.ids))

    @cached_property
    def _normalizes(self) -> bool:
        return self._backend.normalizer is not None and any(token.normalized for token in self._flags.values())

    @cached_property
    def _back(self) -> Mapping[int, int]:
        return {self._copy.token_to_id(secret): self.ids[name] for name, secret in self._secret.items()}

    @property
    def _copy(self) -> Any:
        """The tokenizer, without obedience. Made when it is needed first: it is as large as the tokenizer."""
        with self._lock:
            return self._made_copy

    @cached_property
    def _made_copy(self) -> Any:
        from tokenizers import AddedToken, Tokenizer

        copy = Tokenizer.from_str(self._backend.to_str())
        copy.add_special_tokens([_token(AddedToken, name, token, special=True) for name, token in self._flags.items()])
        copy.add_tokens([_token(AddedToken, self._secret[name], token) for name, token in self._flags.items()])
        copy.add_tokens([AddedToken(self._cut, normalized=False)])
        copy.encode_special_tokens = True
        return copy


def whole(text: str) -> str:
    """The text, with halves of characters that UTF-8 cannot write made into U+FFFD; pairs of them are characters.

    >>> whole("a\\ud800b")
    'a\ufffdb'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _ids(backend: Any, text: str) -> list[int]:
    return _all_ids(backend, [_writable(text)])[0]


def _all_ids(backend: Any, texts: Sequence[str]) -> list[list[int]]:
    if sum(map(len, texts)) > FREE_CHARS:
        found = backend.encode_batch_fast(list(texts), add_special_tokens=False)  # lets other threads run
    else:
        found = [backend.encode(text, add_special_tokens=False) for text in texts]
    return [encoding.ids for encoding in found]


def _writable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return whole(text)
    return text


def _strings(given: Any) -> list[str]:
    found, left = [], [given]
    while left:
        value = left.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return found


def _alternatives(words: Collection[str]) -> str:
    """A pattern of the words, the longest first, that looks at each character of a text once."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: Mapping[str, Any]) -> str:
    ends = "" in node
    found = [re.escape(character) + _branches(below) for character, below in node.items() if character]
    if not found:
        return ""
    if len(found) == 1 and not ends:
        return found[0]
    return f"(?:{'|'.join(found)}){'?' if ends else ''}"


def _token(make: Callable[..., Any], name: str, like: Any, *, special: bool = False) -> Any:
    return make(name, lstrip=like.lstrip, rstrip=like.rstrip, normalized=special and like.normalized, special=special)
