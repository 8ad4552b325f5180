"""exact: the response is the reference answer, to the letter."""

import unicodedata

from infra.processor import score
from schemas import Experience


@score(version=1, inline=True)
def exact(experience: Experience, *, strip: bool = True, case: bool = True, answer: str = "answer") -> float | None:
    """1.0 where the response equals the reference answer, else 0.0; None without one.

    strip: ignore white space at both ends. case: upper and lower case differ. answer: see `Experience.reference`. Text is
    compared in Unicode normal form C, so that one letter written two ways is one letter.
    """
    expected = experience.reference(answer)
    if expected is None:
        return None
    return float(_normal(experience.response, strip, case) == _normal(str(expected), strip, case))


def _normal(text: str, strip: bool, case: bool) -> str:
    text = unicodedata.normalize("NFC", text)
    if strip:
        text = text.strip()
    return text if case else text.casefold()
