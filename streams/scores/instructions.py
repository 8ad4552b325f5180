"""Score of instructions that code can check."""

import json
import re

import msgspec

from infra.chain.processor import score
from schemas import Experience

MAX_CHARS = 20_000
Argument = bool | int | str | list[str]
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE = re.compile(r"([^.!?]+)([.!?]+[\"”')\]]*(?=\s|$))?")


@score(version=1, inline=True)
def instructions(experience: Experience, *, answer: str = "answer") -> float | None:
    """Share of the task's instructions that the answer follows, 0 to 1. None without a reference.

    An answer cut off at its token limit scores 0. Raises ValueError for a malformed reference.

    answer: Source of the reference, see `Experience.reference`. The reference is a JSON list of [kind, argument].
    """
    reference = experience.reference(answer)
    if reference is None:
        return None
    try:
        rules = msgspec.json.decode(str(reference), type=list[tuple[str, Argument]])
    except msgspec.DecodeError as error:
        raise ValueError(f"the reference {str(reference)[:80]!r} is no list of [kind, argument]: {error}") from error
    if experience.end != "terminal" or len(experience.response) > MAX_CHARS or not rules:
        return 0.0
    return sum(follows(experience.response, kind, argument) for kind, argument in rules) / len(rules)


def follows(text: str, kind: str, argument: Argument) -> bool:
    """True if a text follows an instruction. Raises ValueError for an unknown kind or an argument of another type.

    >>> follows("Rain falls on the sea.", "max_words", 5)
    True
    """
    text = text.strip()
    match kind, argument:
        case ("word", str(word)):
            return word.casefold() in words(text)
        case ("max_words", int(most)):
            return 0 < len(words(text)) <= most
        case ("sentences", int(count)):
            ends = [end for before, end in _SENTENCE.findall(text) if _WORD.search(before)]
            return len(ends) == count and all(ends)
        case ("lower_case", _):
            return bool(words(text)) and text == text.lower()
        case ("no_commas", _):
            return bool(words(text)) and not re.search("[,،，、]", text)
        case ("ending", str(phrase)):
            return text.casefold().rstrip(".!\"'” ").endswith(phrase.casefold())
        case ("start", str(word)):
            return words(text)[:1] == [word.casefold()]
        case ("bullets", int(count)):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return len(lines) == count and all(re.match(r"[-*•]\s+\w", line) for line in lines)
        case ("quotes", _):
            return len(text) > 2 and text[0] in '"“' and text[-1] in '"”' and not re.search('["“”]', text[1:-1])
        case ("json", list(keys)):
            return _keys(text) == sorted(keys)
    raise ValueError(f"got the instruction {kind!r} with {argument!r}, expected a known kind and its argument")


def words(text: str) -> list[str]:
    """Split a text into case-folded words."""
    return [word.casefold() for word in _WORD.findall(text)]


def _keys(text: str) -> list[str] | None:
    """The keys of the JSON object that a text is, alone or in a code fence, each with something in it."""
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json").strip()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return sorted(found) if isinstance(found, dict) and all(found.values()) else None
