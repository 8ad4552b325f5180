"""redact: personal data and secrets in the text. Off by default here: where data comes from outside, the gateway
redacts before the first write.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from infra.processor import Drop, processor
from schemas import Experience

Kind = Literal["email", "card", "phone", "key"]
PATTERNS: Mapping[str, str] = {
    "email": r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}",
    "card": r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.])",
    "phone": r"(?<![\w.])\+\d{1,3}(?:[ ./()-]{0,2}\d){7,12}(?!\w)",
    "key": r"\b(?:sk|pk|ghp|gho|xox[abp]|AKIA)[-_A-Za-z0-9]{16,128}\b|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----",
}


@processor(version=1)
def redact(
    experience: Experience,
    *,
    kinds: Sequence[Kind] = ("email", "card", "phone", "key"),
    patterns: Mapping[str, str] | None = None,
    action: Literal["drop", "mask"] = "drop",
) -> Experience | Drop:
    """Drop an experience whose text holds such data, or mask the text as `[email]`.

    mask hides the text that people and scores read; the token ids stay as sampled, so what is learned does not change.
    A match cannot be interrupted: bound your own patterns' repetitions, as the built-in ones are.
    """
    compiled = _compiled(tuple(kinds), tuple(sorted((patterns or {}).items())))
    messages, found = [], set()
    for message in experience.messages:
        text = message.content
        for name, pattern in compiled:
            masked = pattern.sub(_card if name == "card" else f"[{name}]".replace("\\", "\\\\"), text)
            if masked != text:
                found.add(name)
                text = masked
        messages.append(message if text == message.content else msgspec.structs.replace(message, content=text))
    if not found:
        return experience
    if action == "drop":
        return Drop("personal data", ", ".join(sorted(found)))
    return experience.with_bulk(messages=tuple(messages))


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
