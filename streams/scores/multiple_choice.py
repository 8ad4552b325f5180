"""Multiple choice: the option that a response chooses, or none.

Guarantee: options that are only discussed, listed or denied are not chosen; where two are chosen, none is.
"""

import json
import re
from collections.abc import Mapping

from streams.scores.words import normal

# Possessive throughout (`*+`): what one part has taken no other one tries again, so that a look takes linear time.
_BOXED = re.compile(r"\\boxed\{\s*+(?:\\text\{\s*+)?+\(?+([A-Za-z])\)?+\s*+\}")
_STATED = re.compile(
    r"\b(?:answer|choice|option|choose|pick|select|chose)\b(?:\s++(?:is|would\s++be|should\s++be|option|choice|letter|the|must\s++be)){0,8}+"
    r"\s*+[:=]?+\s*+[*_\"'(\[]*+(?P<denied>not\b|n't\b|neither\b)?+\s*+(?:option\s++)?+[*_\"'(\[]*+(?P<letter>[A-Z])\b(?!')",
    re.IGNORECASE,
)
_DISCUSSED = re.compile(
    r"^[*_)\]\"'\s]*(?:is|was|are|has|can|cannot|would|seems|looks)\b(?!\s+(?:the\s+)?(?:correct|right|best|answer))"
)
_LONE = re.compile(r"[\s*_\"'(\[]*([A-Za-z])[\s*_\"')\].:]*")
_LEADING = re.compile(r"\s*[*_(\[]*([A-Z])[)\].:][*_]*\s+(\S.*)", re.DOTALL)
_ALSO = re.compile(r"^[*_)\]\s]*(?:,|/|&|and|or)\s*[*_(\[]*([A-Z])\b(?![a-z'])")
MAX_LOOK = 1_000  # characters behind a letter in which it may be discussed, or joined by another


def is_right_choice(response: str, wanted: str, listed: object) -> bool:
    """Return True if the response chooses the option `wanted`, a letter or a text, and no other.

    listed: JSON list of texts (A, B, …), or object from letter to text. Raises ValueError where they cannot be read.
    """
    named = _options(listed)
    right = [letter for letter, text in named.items() if letter == wanted.upper().strip("().") or text == wanted]
    if len(right) != 1:
        raise ValueError(f"the reference {wanted!r} is {len(right)} of the options {sorted(named)}, expected one")
    return chosen(response, named) == right[0]


def chosen(response: str, options: Mapping[str, str]) -> str | None:
    r"""The letter chosen, None where none or more than one is.

    In this order: the last \boxed{B}; the last "answer is B", "option B" and the like; a last line that is a letter
    alone, "B) text", or the text of an option.

    >>> chosen("A is too small. The answer is (B).", {"A": "1", "B": "2"})
    'B'
    >>> chosen("The answer is A or B.", {"A": "1", "B": "2"}) is None
    True
    """
    if boxed := _BOXED.findall(response):
        return _known(boxed[-1], options)
    lines = [line for line in response.splitlines() if line.strip()]
    if not lines:
        return None
    stated = [
        match
        for match in _STATED.finditer(response)
        if _is_letter(match["letter"], options) and not _DISCUSSED.match(response[match.end() : match.end() + MAX_LOOK])
    ]
    lone = _LONE.fullmatch(lines[-1])
    if stated:
        last = stated[-1]
        also = _ALSO.match(response[last.end() : last.end() + MAX_LOOK])
        if last["denied"] or (also and also[1] in options):
            return None
        if lone and _known(lone[1], options) not in (None, last["letter"].upper()):
            return None
        return _known(last["letter"], options)
    return _last_line(lines[-1], options)


def _last_line(line: str, options: Mapping[str, str]) -> str | None:
    if lone := _LONE.fullmatch(line):
        return _known(lone[1], options)
    texts = {normal(text): letter for letter, text in options.items()}
    marked = re.split(r"\banswer\s*(?:is|:|=)\s*", line, flags=re.IGNORECASE)[-1]
    if normal(marked) in texts:
        return texts[normal(marked)]
    leading = _LEADING.fullmatch(line)
    if leading and _known(leading[1], options) and normal(leading[2]) == normal(options[leading[1]]):
        return leading[1]
    return None


def _known(letter: str, options: Mapping[str, str]) -> str | None:
    return letter.upper() if letter.upper() in options else None


def _is_letter(letter: str, options: Mapping[str, str]) -> bool:
    return letter in options or (letter != "a" and letter.upper() in options)


def _options(listed: object) -> dict[str, str]:
    try:
        read = json.loads(str(listed))
    except ValueError as error:
        raise ValueError(f"meta: the options are no JSON: {error}") from error
    if isinstance(read, list) and all(isinstance(text, str) for text in read) and 2 <= len(read) <= 26:
        return {chr(ord("A") + index): text.strip() for index, text in enumerate(read)}
    if isinstance(read, dict) and len(read) >= 2 and all(isinstance(text, str) for text in read.values()):
        return {letter.strip().upper(): text.strip() for letter, text in read.items()}
    raise ValueError("meta: got other options than a JSON list of texts, or an object from letter to text")
