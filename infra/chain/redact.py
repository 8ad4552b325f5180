"""Personal data and secrets in text: their patterns, and masking of the matches.

The gateway, which writes text first, and the redact processor, which checks it again, share this module.

Guarantee: the time is linear in the length of any text, and no single match, which holds the interpreter, looks at more than
MAX_LOOK characters; so a thread that masks a long text does not hold up the others. Limits: a match longer than REACH may be
masked only in part; a national telephone number, and any data without check digits, is known by its shape alone.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["email", "card", "phone", "key", "iban", "ssn"]
MAX_ROW = 8  # bounds the time
KINDS: tuple[Kind, ...] = ("email", "card", "phone", "key", "iban", "ssn")
PIECE, REACH = 16_384, 16_384  # a match begins within a piece, and ends within its reach
MAX_LOOK = PIECE + REACH
_LOCAL_CHARS = 64  # of an address, before the @
_LOCAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._%+-"
# Between the groups of a number: spaces that break no line, and hyphens, too.
_GAP = "[ \u00a0\u2007\u2009\u2011\u202f-]"
_LINE = r"(?:\s|\\[nr]){0,8}"  # a new line, also as JSON spells it
Span = tuple[int, int]
Looks = Callable[["re.Match[str]"], list[Span]]

# Characters of an IBAN by country (ISO 13616 registry).
_IBANS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 FO18 FR27 "
    "GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 "
    "MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 "
    "TN24 TR26 UA29 VA22 VG24 XK20"
)
_IBAN = {found[:2]: int(found[2:]) for found in _IBANS.split()}
_CARD_WITHIN = re.compile(
    rf"(?<!\d)(?=(\d{{4}}({_GAP})\d{{4}}\2\d{{4}}\2\d{{4}}(?!\d)|3\d{{3}}({_GAP})\d{{6}}\3\d{{5}}(?!\d)|\d{{13,19}}(?!\d)))"
)


class Shape(NamedTuple):
    """Shape of one kind of data. pattern: where to look; its repetitions are bounded, or give nothing back and begin
    where no other match can. looks: the data within a match, in their order. kind: its name, as `[email]` shows it.
    """

    kind: str
    pattern: "re.Pattern[str]"
    looks: Looks


class Redactor:
    """Masks the given kinds, as `[email]`. patterns: the user's own, by name; their matches have at most REACH characters."""

    def __init__(self, kinds: Iterable[Kind] = KINDS, patterns: Mapping[str, str] | None = None) -> None:
        self._shapes = shapes(tuple(kinds), tuple(sorted((patterns or {}).items())))
        self._phones = [shape for shape in self._shapes if shape.kind == "phone"]

    def mask(self, text: str) -> tuple[str, frozenset[str]]:
        """The text without such data, and which kinds were found.

        Telephone numbers in a row may hide each other: a second look covers the text next to a masked number, MAX_ROW times.
        """
        text, found = masked(text, self._shapes)
        more = found
        for _ in range(MAX_ROW):
            if "phone" not in more:
                break
            text, more = masked(text, self._phones)
        return text, frozenset(found)

    def mask_json(self, value: object) -> object:
        """A decoded JSON value with every string in it masked, and every number that is such data."""
        if isinstance(value, str):
            return self.mask(value)[0]
        if isinstance(value, Mapping):
            return {self.mask(str(name))[0]: self.mask_json(item) for name, item in value.items()}
        if isinstance(value, Sequence):
            return [self.mask_json(item) for item in value]
        if isinstance(value, int) and not isinstance(value, bool):
            masked, found = self.mask(str(value))
            return masked if found else value
        return value


def masked(text: str, shapes: Iterable[Shape]) -> tuple[str, set[str]]:
    """The text after one look for each shape, and the kinds that were there."""
    found = set()
    for shape in shapes:
        pieces, at = [], 0
        for match in matches(shape.pattern, text):
            for start, stop in shape.looks(match):
                pieces += [text[at : max(at, start)], f"[{shape.kind}]"]
                at = stop
        if pieces:
            found.add(shape.kind)
            text = "".join([*pieces, text[at:]])
    return text, found


def matches(pattern: "re.Pattern[str]", text: str) -> Iterator["re.Match[str]"]:
    """Matches in their order, none within another, looked for in pieces."""
    at = 0
    while at < len(text):
        stop = min(at + PIECE, len(text))
        end = stop
        for match in pattern.finditer(text, at, min(stop + REACH, len(text))):
            if match.start() >= stop:
                break
            yield match
            end = max(end, match.end())
        at = end


@lru_cache(maxsize=16)
def shapes(kinds: tuple[str, ...], patterns: tuple[tuple[str, str], ...]) -> tuple[Shape, ...]:
    """Shapes of the kinds and of the user's patterns, in the order of the search."""
    built_in: dict[str, Sequence[tuple[str, Looks]]] = {
        "key": _KEYS,
        "iban": [(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?:[ \u00a0]?[A-Z0-9]){11,30}", _iban)],
        "card": [(rf"(?<![\d.])\d(?:{_GAP}?\d){{12,}}+(?!\.\d)", _card)],
        "ssn": [(r"(?<![\w-])(?!000|666|9)\d{3}([-\u2011])(?!00)\d{2}\1(?!0000)\d{4}(?![\w-])", _whole)],
        # The @ first: text before it is read only where there is one.
        "email": [(r"@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}", _address)],
        "phone": _PHONES,
    }
    # In this order, for any choice of kinds: data with check digits or a name is not taken for a telephone number.
    found = [(kind, *shape) for kind, known in built_in.items() if kind in kinds for shape in known]
    found += [(name, pattern, _whole) for name, pattern in patterns]
    return tuple(Shape(kind, re.compile(pattern), looks) for kind, pattern, looks in found)


def _whole(match: "re.Match[str]") -> list[Span]:
    return [match.span()] if match.group() else []


def _address(match: "re.Match[str]") -> list[Span]:
    before = match.string[max(0, match.start() - _LOCAL_CHARS) : match.start()]
    size = len(before) - len(before.rstrip(_LOCAL))
    return [(match.start() - size, match.end())] if size else []


def _card(match: "re.Match[str]") -> list[Span]:
    if 13 <= sum(map(str.isdigit, match.group())) <= 19 and _luhn(match.group()):
        return [match.span()]
    found: list[Span] = []
    for within in _CARD_WITHIN.finditer(match.group()):
        start, stop = match.start() + within.start(1), match.start() + within.end(1)
        if _luhn(within[1]) and (not found or start >= found[-1][1]):
            found.append((start, stop))
    return found


def _national(match: "re.Match[str]") -> list[Span]:
    return [match.span()] if 10 <= sum(map(str.isdigit, match.group())) <= 14 else []


def _mixed(match: "re.Match[str]") -> list[Span]:
    """Matches as random as a secret, and neither a hexadecimal hash nor a name."""
    text = match.group()
    upper, lower, digits = (sum(map(test, text)) for test in (str.isupper, str.islower, str.isdigit))
    return [match.span()] if upper >= 5 and lower >= 5 and digits else []


def _iban(match: "re.Match[str]") -> list[Span]:
    """Matches of the length of their country, with correct check digits (ISO 7064, MOD 97-10)."""
    text, length = match.group(), _IBAN.get(match.group()[:2], 0)
    places = [at for at, character in enumerate(text) if character.isalnum()][:length]
    if not length or len(places) < length:
        return []
    stop = places[-1] + 1
    letters = [text[at] for at in places]
    check = int("".join(str(int(letter, 36)) for letter in letters[4:] + letters[:4])) % 97
    return [(match.start(), match.start() + stop)] if check == 1 and not text[stop : stop + 1].isalnum() else []


def _luhn(text: str) -> bool:
    """True if the digits carry a card number's check digit (ISO/IEC 7812-1, annex B)."""
    digits = [int(character) for character in text if character.isdigit()][::-1]
    doubled = [digit * 2 - 9 if digit > 4 else digit * 2 for digit in digits[1::2]]
    return (sum(digits[0::2]) + sum(doubled)) % 10 == 0


_PHONES: tuple[tuple[str, Looks], ...] = (
    (r"(?<![\w.])\+\d{1,3}(?:[ \u00a0\u202f./()-]{0,2}\d){7,12}(?!\w)", _whole),
    # Of North America, in the forms that numbers in a row have not.
    (
        r"(?<![\w.+-])(?:1[ .-])?(?:\([2-9]\d\d\)[ -]?[2-9]\d\d[ .-]|[2-9]\d\d([.-])[2-9]\d\d\1)\d{4}(?![\w-]|\.\d)",
        _whole,
    ),
    # With a 0 before the area: groups with one kind of gap, and no more of them before or behind, as in a dump of bytes.
    (
        r"(?<![\w.+/:-])(?<!\d[ \u00a0])00?[1-9]\d{0,4}([ \u00a0-])\d{2,8}(?:\1\d{2,8}){0,3}(?![\w:/]|[ \u00a0.-]\d)",
        _national,
    ),
    (r"(?<![\w.+/:-])0[1-9](?:\.\d\d){4}(?![\w:/]|[.-]\d)", _whole),
    (r"(?<![\w.+/:-])0[1-9]\d{1,4} ?/ ?\d{4,8}(?:[ -]\d{2,4}){0,2}(?![\w:/]|[ .-]\d)", _national),
)


_KEYS: tuple[tuple[str, Looks], ...] = (
    (r"\b(?:(?:[spr]k|xox[abeprs])[-_]|glpat-|github_pat_|GOCSPX-|ya29\.)[-_A-Za-z0-9]{16,}+", _whole),
    (r"\b(?:gh[opusr]_[A-Za-z0-9]{16,}+|hf_[A-Za-z0-9]{30,}+|npm_[A-Za-z0-9]{36,}+|A[KS]IA[A-Z0-9]{16,}+)", _whole),
    (r"\bAIza[0-9A-Za-z_-]{35}|\bhr-[a-z]{16}-[A-Za-z0-9_-]{43}", _whole),
    # A signed token of JSON (RFC 7519), with its signature or without.
    (r"(?<![A-Za-z0-9_.-])eyJ[A-Za-z0-9_-]{8,}+\.eyJ[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+)?", _whole),
    # The secret beside an access key: by its name, or by how it looks.
    (
        r"(?i:secret[_ -]?(?:access[_ -]?)?key|aws[_ -]?secret)[\"']?[ \t]{0,4}[=:]{1,2}>?[ \t]{0,4}[\"']?"
        r"([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
        lambda match: [match.span(1)],
    ),
    (r"(?<![A-Za-z0-9/+=_.-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=_.-])", _mixed),
    # A private key with the lines after its first: base64 (of a key that was cut off, too), headers among them.
    (
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        rf"(?:{_LINE}(?:[A-Za-z-]{{1,20}}: [^\n\\]{{0,80}}|[A-Za-z0-9+/=]{{16,}}+))*+"
        rf"(?:(?:{_LINE}[A-Za-z0-9+/=]{{1,80}})?{_LINE}-----END [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----)?",
        _whole,
    ),
)
