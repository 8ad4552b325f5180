"""Score of equality with the reference answer."""

import unicodedata

from infra.chain.processor import score
from schemas import Experience

MAX_PARTS = 4  # into which normal form C takes a character apart at most: a longer response is never the same text
MAX_MARKS = 64  # combining marks in a row; no language writes more than a few
_MARKS_BY_PARTS = "\u0f73\u0f75\u0f81\uff9e\uff9f"  # no marks themselves, though all that they are made of are


@score(version=1, inline=True)
def exact(experience: Experience, *, strip: bool = True, case: bool = True, answer: str = "answer") -> float | None:
    """1.0 if the response equals the reference answer, else 0.0. None without a reference.

    Text is compared in Unicode normal form C, so that different encodings of a letter are equal.

    strip: Whether white space at both ends is ignored. case: Whether upper and lower case differ. answer: Source of the
    reference answer, see `Experience.reference`.
    """
    expected = experience.reference(answer)
    if expected is None:
        return None
    return float(is_exact(experience.response, str(expected), strip=strip, case=case))


def is_exact(response: str, wanted: str, *, strip: bool = True, case: bool = True) -> bool:
    if strip:
        response, wanted = response.strip(), wanted.strip()
    if len(response) > MAX_PARTS * len(wanted):
        return False
    return _normal(response, case) == _normal(wanted, case)


def _normal(text: str, case: bool) -> str:
    text = normalized(text)
    return text if case else text.casefold()


def normalized(text: str) -> str:
    """The text in normal form C, unchanged if more than MAX_MARKS combining marks follow each other: sorting such a run
    takes time quadratic in its length.
    """
    if text.isascii():
        return text
    run = 0
    for letter in text:
        run = run + 1 if unicodedata.combining(letter) or letter in _MARKS_BY_PARTS else 0
        if run > MAX_MARKS:
            return text
    return unicodedata.normalize("NFC", text)
