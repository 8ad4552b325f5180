"""exact: the response is the reference answer, to the letter."""

from infra.chain.processor import score
from schemas import Experience
from streams.scores.words import normalized

MAX_PARTS = 4  # into which normal form C takes a character apart at most: a longer response is never the same text


@score(version=1, inline=True)
def exact(experience: Experience, *, strip: bool = True, case: bool = True, answer: str = "answer") -> float | None:
    """1.0 where the response equals the reference answer, else 0.0; None without one.

    strip: ignore white space at both ends. case: upper and lower case differ. answer: see `Experience.reference`. Text is
    compared in Unicode normal form C, so that one letter written two ways is one letter.
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
    text = normalized("NFC", text)
    return text if case else text.casefold()
