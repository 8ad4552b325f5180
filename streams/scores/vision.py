"""vision: answers about an image: a count, a text that was read, a choice, or boxes around things.

Guarantees: one answer is looked at, so guessing several gains nothing; boxes are matched one to one with the reference.
The image itself is not looked at: what is right is in the task.
"""

import re
from typing import Literal

import msgspec

from infra.chain.processor import score
from schemas import Experience
from streams.scores.boxes import Format, num_matched, read_boxes
from streams.scores.final_answer import final_text
from streams.scores.multiple_choice import is_right_choice
from streams.scores.words import normalized, read_number

MAX_CHARS = 50_000
MAX_TEXT_CHARS = 1_000
KINDS = ("count", "read", "choose", "box")
_DIGITS = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?")
_QUOTED = re.compile(r"[\"“]([^\"“”]+)[\"”]")
_DENIAL = re.compile(r"\b(?:not|never|no\s+longer)\b|n't\b|\bor\b", re.IGNORECASE)


@score(version=2)
class Vision(msgspec.Struct, frozen=True, kw_only=True):
    """1.0 where the answer is right, else 0.0; None without a reference, or where no kind is asked for.

    answer: see `Experience.reference`.
    kind: "" takes meta["kind"]; a task that says none, or one of another score, asks nothing of an image. count: one
    number, in digits or words. read: at most max_error edits per character of the reference; max_error: of read, 0.1 allows
    one edit in ten characters; case: upper and lower case differ; white space runs are one space. choose: see `k12`, with
    meta[options]; options: name in meta of what may be chosen.
    box: every box of the JSON in the reference is met by one of the answer's, and none is left over, where met means
    intersection over union of `threshold` or more; format: of the answer's boxes: left, top and right, bottom or width,
    height; reference_format: of the reference's;
    threshold: of that intersection over union.
    partial: for read 1 − edits per character; for boxes 2 · met / (given + wanted), the F1.
    """

    kind: Literal["", "count", "read", "choose", "box"] = ""
    answer: str = "answer"
    options: str = "options"
    format: Format = "xyxy"
    reference_format: Format = "xyxy"
    threshold: float = 0.5
    max_error: float = 0.1
    case: bool = False
    partial: bool = False

    def __call__(self, experience: Experience) -> float | None:
        """Grade one answer; raises ValueError for a reference that is not one of the kind."""
        reference = experience.reference(self.answer)
        if reference is None:
            return None
        wanted, response = str(reference), experience.response
        asked = self.kind or experience.meta.get("kind")
        if asked not in KINDS:
            return None
        if len(response) > MAX_CHARS:
            return 0.0
        if asked == "choose":
            return float(is_right_choice(response, wanted.strip(), experience.meta.get(self.options)))
        if asked == "count":
            return float(_count(response, wanted))
        if asked == "read":
            share = _read(response, wanted, self.case)
            return share if self.partial else float(share >= 1.0 - self.max_error)
        share = _boxes(response, wanted, self.format, self.reference_format, self.threshold)
        return share if self.partial else float(share == 1.0)


vision = Vision  # the name that settings use


def _count(response: str, wanted: str) -> bool:
    try:
        expected = int(wanted)
    except ValueError as error:
        raise ValueError(f"the reference {wanted!r} is no whole number") from error
    final = final_text(response)
    if final is None or len(final) > MAX_TEXT_CHARS or _DENIAL.search(final):
        return False
    numbers = {float(digits.replace(",", "").replace("−", "-")) for digits in _DIGITS.findall(final)}
    run: list[str] = []
    for word in [*re.findall(r"[a-z]+", final.casefold()), ""]:  # the longest runs of words that are a number
        if word and read_number(" ".join([*run, word])) is not None:
            run.append(word)
        elif run:
            numbers.add(float(read_number(" ".join(run)) or 0))
            run = [word] if word and read_number(word) is not None else []
        elif word == "no" and expected == 0:
            numbers.add(0.0)
    return numbers == {float(expected)}


def _read(response: str, wanted: str, case: bool) -> float:
    expected = _plain(wanted, case)
    final = final_text(response)
    if not expected:
        raise ValueError("the reference is empty, expected the text to be read")
    if final is None:
        return 0.0
    last = response.strip().splitlines()[-1]
    quoted = _QUOTED.findall(last)
    got = _plain(quoted[0] if len(quoted) == 1 else final, case)
    if len(got) > MAX_TEXT_CHARS or len(expected) > MAX_TEXT_CHARS or len(got) > 2 * len(expected) + 8:
        return 0.0
    return max(0.0, 1.0 - edits(got, expected) / len(expected))


def edits(text: str, other: str) -> int:
    """Levenshtein's distance: insertions, deletions and replacements of a character.

    >>> edits("kitten", "sitting")
    3
    """
    row = list(range(len(other) + 1))
    for index, letter in enumerate(text, start=1):
        diagonal, row[0] = row[0], index
        for column, wanted in enumerate(other, start=1):
            cost = min(row[column] + 1, row[column - 1] + 1, diagonal + (letter != wanted))
            diagonal, row[column] = row[column], cost
    return row[-1]


def _boxes(response: str, wanted: str, format: Format, reference_format: Format, threshold: float) -> float:
    reference = read_boxes(wanted, reference_format)
    if reference is None:
        raise ValueError(f"the reference {wanted[:60]!r} holds no boxes, expected JSON such as [[0, 0, 10, 10]]")
    given = read_boxes(response, format)
    if given is None:
        return 0.0
    if not given and not reference:
        return 1.0
    return 2 * num_matched(given, reference, threshold) / (len(given) + len(reference))


def _plain(text: str, case: bool) -> str:
    text = " ".join(normalized("NFKC", text).split())
    return text if case else text.casefold()
