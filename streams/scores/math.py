"""Score of mathematical equality with the reference answer (math-verify, in a child process).

Guarantees: only the last answer counts. A comparison that takes too long raises TimeoutError and does not stop the worker. The
search for the answer takes time linear in the response. A response above MAX_CHARS, a last line above MAX_LINE_CHARS and an
answer above MAX_ANSWER_CHARS characters count as no answer; an answer with more than MAX_SIDES sides (a = b = c = …) is wrong.
"""

import importlib.util
import re

from infra.chain.processor import score
from schemas import Experience
from schemas.errors import ConfigError
from streams.scores.child import ScoreChild

MAX_CHARS = 1_000_000
MAX_LINE_CHARS = 20_000
MAX_ANSWER_CHARS = 2000
MAX_SIDES = 8
_MARKER = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_SYMBOL = re.compile(r"\\?[A-Za-z]{1,8}(?:_\{?\w{1,8}\}?)?(?:\([A-Za-z]\))?")
_WORD = re.compile(r"(?<!\\)\b(?:[A-Za-z]{3,}|it|is|so|or|of|we|be|to|as|by)\b", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_BRACKETS_OR_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)|[([{][^)\]}]*[)\]}]")
_FORMULA = re.compile(r"[\^_=+*<>\\{}]")


@score(version=1)
class Math:
    """1.0 if the last answer equals the reference, 0.0 if it differs or is missing. None without a reference.

    The answer is the last \\boxed{…}; else the text after "answer is" or "answer:" in the last line; else the last line, if it
    is a bare expression; else the only number in that line, unless the line is a sentence with a formula.

    answer: Source of the reference, see `Experience.reference`. boxed: Whether only \\boxed{…} counts. timeout_s: Maximum
    seconds of a comparison.
    """

    def __init__(self, *, answer: str = "answer", boxed: bool = False, timeout_s: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the score math needs math-verify: pip install 'headrace[streams]'")
        self.answer = answer
        self.boxed = boxed
        self.timeout_s = timeout_s
        self._child = ScoreChild("streams.scores.math_worker")

    def __call__(self, experience: Experience) -> float | None:
        expected = experience.reference(self.answer)
        if expected is None:
            return None
        candidate = final_answer(experience.response, boxed=self.boxed)
        if candidate is None or len(candidate) > MAX_ANSWER_CHARS:
            return 0.0
        gold = str(expected).strip()
        if candidate == gold:
            return 1.0
        sides = _sides(gold, candidate)
        return float(len(sides) <= MAX_SIDES and all(self.equal(gold, side) for side in sides))

    def equal(self, gold: str, candidate: str) -> bool:
        """Compare two answers as mathematics. Raises TimeoutError, ValueError."""
        try:
            reply = self._child.ask({"gold": gold, "candidate": candidate}, self.timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"comparing {candidate[:80]!r} with {gold[:80]!r}: {error}") from error
        if "error" in reply:
            raise ValueError(str(reply["error"]))
        return bool(reply["equal"])

    def close(self) -> None:
        self._child.close()


def final_answer(response: str, *, boxed: bool = False) -> str | None:
    r"""The one answer of a response, or None.

    >>> final_answer("so \\boxed{1}, no: \\boxed{\\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> final_answer("The answer is 280.")
    '280'
    >>> final_answer("6, not 5") is None
    True
    """
    if len(response) > MAX_CHARS:
        return None
    inside = _last_boxed(response)
    if inside is not None or boxed:
        return inside
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    if not lines:
        return None
    line = lines[-1]
    if len(line) > MAX_LINE_CHARS:
        return None
    markers = list(_MARKER.finditer(line))
    if markers:
        line = line[markers[-1].end() :]
    line = line.strip().rstrip(".!").strip().strip("$*").strip()
    if not _WORD.search(line) and "," not in _outside(line):
        return line or None
    numbers = [] if _FORMULA.search(line) else _NUMBER.findall(line)
    return numbers[0].strip() if len(numbers) == 1 else None


def _sides(gold: str, candidate: str) -> list[str]:
    if "=" in gold or "=" not in candidate:
        return [candidate]
    sides = [side.strip() for side in candidate.split("=")]
    return [side for side in sides if not _SYMBOL.fullmatch(side)] or [candidate]


def _outside(line: str) -> str:
    """Drop bracketed parts and commas of thousands. Brackets after the last closing bracket stay, so the search is linear."""
    end = max(line.rfind(bracket) for bracket in ")]}") + 1
    return _BRACKETS_OR_THOUSANDS.sub("", line[:end]) + _THOUSANDS.sub("", line[end:])


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    first = start + len("\\boxed")
    for position in range(first, min(first + 2 * MAX_ANSWER_CHARS, len(text))):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position].strip()
    return None
