"""Short answers in words: when two of them are the same answer.

Guarantee: what is ignored is named here, and nothing else is: case, articles in front, marks around, hyphens against
spaces, runs of spaces, Unicode's several ways to write a letter, thousands separators, number words against digits.
"""

import re
import unicodedata
from collections.abc import Iterable
from typing import Literal

MAX_MARKS = 64
_MARKS_BY_PARTS = "\u0f73\u0f75\u0f81\uff9e\uff9f"  # no marks themselves, though all that they are made of are

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
    """Return True if the answer is an accepted one.

    >>> is_variant("The Mitochondrion.", ["mitochondrion"]), is_variant("twenty-one", ["21"])
    (True, True)
    """
    return normal(answer) in {normal(text) for text in accepted}


def normal(text: str) -> str:
    text = normalized("NFKC", text).casefold()
    text = re.sub(r"[*`]+|(?<!\w)_+|(?<!_)_++(?!\w)", "", text).translate(_MARKS)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(?<=[^\W\d])-(?=[^\W\d])", " ", text)
    text = re.sub(r"\s+", " ", text).strip(" .!?;:,*_\"'`$“”‘’")
    text = _ARTICLE.sub("", _INTRODUCTION.sub("", text)).strip("\"'“”")
    number = read_number(text)
    return text if number is None else str(number)


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """The text in a Unicode normal form; as it is where more than MAX_MARKS combining marks follow each other.

    Such a run is sorted in time quadratic in its length. No language writes more than a few.
    """
    if text.isascii():
        return text
    run = 0
    for letter in text:
        run = run + 1 if unicodedata.combining(letter) or letter in _MARKS_BY_PARTS else 0
        if run > MAX_MARKS:
            return text
    return unicodedata.normalize(form, text)


def read_number(words: str) -> int | None:
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
