"""Short answers in words: when two of them are the same answer.

Guarantee: what is ignored is named here, and nothing else is: case, articles in front, marks around, hyphens against
spaces, runs of spaces, Unicode's several ways to write a letter, thousands separators, number words against digits.
"""

import re
import unicodedata
from collections.abc import Iterable

_ARTICLE = re.compile(r"^(?:the|an|a)\s+")
_INTRODUCTION = re.compile(r"^(?:it\s+is|it's|that\s+is|this\s+is|they\s+are)\s+")
_MARKS = str.maketrans({"‘": "'", "’": "'", "–": "-", "−": "-"})
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = {"thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_VALUES = {word: value for value, word in enumerate(_ONES + _TEENS)} | {
    word: 20 + 10 * index for index, word in enumerate(_TENS)
}


def is_variant(answer: str, accepted: Iterable[str]) -> bool:
    """Whether the answer is one of those accepted.

    >>> is_variant("The Mitochondrion.", ["mitochondrion"]), is_variant("twenty-one", ["21"])
    (True, True)
    """
    return normal(answer) in {normal(one) for one in accepted}


def normal(text: str) -> str:
    """The form in which answers are compared."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"[*`]+|(?<!\w)_+|_+(?!\w)", "", text).translate(_MARKS)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(?<=[^\W\d])-(?=[^\W\d])", " ", text)
    text = re.sub(r"\s+", " ", text).strip(" .!?;:,*_\"'`$“”‘’")
    text = _ARTICLE.sub("", _INTRODUCTION.sub("", text)).strip("\"'“”")
    number = number_of(text)
    return text if number is None else str(number)


def number_of(words: str) -> int | None:
    """The whole number that words say, None for other words.

    >>> number_of("two hundred and five"), number_of("one thousand two hundred"), number_of("two three")
    (205, 1200, None)
    """
    total, group, last = 0, 0, 1_000_000_000_000
    parts = [word for word in words.split() if word != "and"]
    if not parts:
        return None
    step = 1_000  # what the next word of a group has to stay below
    for word in parts:
        if word in _VALUES and _VALUES[word] < step and (len(parts) == 1 or word != "zero"):
            group += _VALUES[word]
            step = 10 if _VALUES[word] >= 20 else 0
        elif word == "hundred" and 0 < group < 10:
            group, step = group * 100, 100
        elif word in _SCALES and group and _SCALES[word] < last:
            total, last = total + group * _SCALES[word], _SCALES[word]
            group, step = 0, 1_000
        else:
            return None
    return total + group
