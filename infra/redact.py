"""Personal data and secrets in text: the patterns, and masking what they find.

Shared by what writes text first (the gateway) and by what checks it again (the redact processor). A match cannot be
interrupted, so every built-in pattern has bounded repetitions.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

Kind = Literal["email", "card", "phone", "key"]
KINDS: tuple[Kind, ...] = ("email", "card", "phone", "key")
PATTERNS: Mapping[str, str] = {
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}",
    "card": r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.])",
    "phone": r"(?<![\w.])\+\d{1,3}(?:[ ./()-]{0,2}\d){7,12}(?!\w)",
    "key": (
        r"\b(?:sk|pk|ghp|gho|xox[abp]|AKIA)[-_A-Za-z0-9]{16,128}\b"
        r"|\bhr-[a-z]{16}-[A-Za-z0-9_-]{43}|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    ),
}


class Redactor:
    """Masks what it is told to find, as `[email]`."""

    def __init__(self, kinds: Iterable[Kind] = KINDS, patterns: Mapping[str, str] | None = None) -> None:
        self._compiled = _compiled(tuple(kinds), tuple(sorted((patterns or {}).items())))

    def mask(self, text: str) -> tuple[str, frozenset[str]]:
        """The text without such data, and which kinds were found."""
        found = set()
        for name, pattern in self._compiled:
            masked = pattern.sub(_card if name == "card" else f"[{name}]".replace("\\", "\\\\"), text)
            if masked != text:
                found.add(name)
                text = masked
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


@lru_cache(maxsize=16)
def _compiled(kinds: tuple[str, ...], patterns: tuple[tuple[str, str], ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((name, re.compile(pattern)) for name, pattern in (*((k, PATTERNS[k]) for k in kinds), *patterns))


def _card(match: re.Match[str]) -> str:
    return "[card]" if _luhn(match.group()) else match.group()


def _luhn(text: str) -> bool:
    """Whether the digits carry a card number's check digit (ISO/IEC 7812-1, annex B)."""
    digits = [int(character) for character in text if character.isdigit()][::-1]
    doubled = [digit * 2 - 9 if digit > 4 else digit * 2 for digit in digits[1::2]]
    return (sum(digits[0::2]) + sum(doubled)) % 10 == 0
