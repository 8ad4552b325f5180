"""Score of answers about an image: a count, a text, a choice, or boxes. It compares with the reference, not with the image.

Guarantees: only one answer counts; boxes are matched one to one, by a maximum matching (Kuhn's augmenting paths), so many boxes
or a huge box gain nothing.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from infra.chain.processor import score
from schemas import Experience
from streams.scores.final_answer import final_text
from streams.scores.multiple_choice import is_right_choice
from streams.scores.words import normalized, read_number

Box = tuple[float, float, float, float]  # left, top, right, bottom
Format = Literal["xyxy", "xywh"]
MAX_BOXES = 256
MAX_FAILED = 200
_KEYS = ("bbox_2d", "bbox", "box", "boxes", "bboxes", "objects", "detections")


def read_boxes(text: str, format: Format) -> list[Box] | None:
    """The boxes of the last JSON value in the text that holds any; [] is an answer too. None without such a value.

    A text with more than MAX_FAILED brackets that begin no JSON is looked at no further: trying costs time.

    >>> read_boxes('I see it: {"bbox": [1, 2, 3, 4]}.', "xyxy")
    [(1.0, 2.0, 3.0, 4.0)]
    """
    decoder = json.JSONDecoder()
    found: list[Box] | None = None
    position = failed = 0
    while position < len(text) and failed <= MAX_FAILED:
        start = min((at for at in (text.find("[", position), text.find("{", position)) if at >= 0), default=-1)
        if start < 0:
            break
        try:
            value, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            position, failed = start + 1, failed + 1
            continue
        boxes = _find_boxes(value, format)
        if boxes is not None:
            found = boxes
    return found


def overlap(box: Box, other: Box) -> float:
    """Intersection over union.

    >>> overlap((0, 0, 2, 2), (1, 0, 3, 2))
    0.3333333333333333
    """
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    common = max(width, 0.0) * max(height, 0.0)
    union = _area(box) + _area(other) - common
    return common / union if union > 0 else 0.0


def num_matched(answer: Sequence[Box], reference: Sequence[Box], threshold: float) -> int:
    """The most pairs (one of each) that overlap by the threshold or more."""
    near = [[j for j, other in enumerate(reference) if overlap(box, other) >= threshold] for box in answer]
    owner: dict[int, int] = {}

    def place(index: int, tried: set[int]) -> bool:
        for place_of in near[index]:
            if place_of not in tried:
                tried.add(place_of)
                if place_of not in owner or place(owner[place_of], tried):
                    owner[place_of] = index
                    return True
        return False

    return sum(place(index, set()) for index in range(len(answer)))


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def _find_boxes(value: Any, format: Format) -> list[Box] | None:
    """Boxes in a decoded value: one box, a list of them, or objects with a key that says so; None for anything else."""
    if isinstance(value, dict):
        held = [value[key] for key in _KEYS if key in value]
        return _find_boxes(held[0], format) if len(held) == 1 else None
    if not isinstance(value, list) or len(value) > MAX_BOXES:
        return None
    if len(value) == 4 and all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        box = _box(value, format)
        return None if box is None else [box]
    boxes: list[Box] = []
    for item in value:
        inner = _find_boxes(item, format) if isinstance(item, dict | list) else None
        if inner is None or len(inner) != 1:
            return None
        boxes += inner
    return boxes


def _box(numbers: list[Any], format: Format) -> Box | None:
    try:
        left, top, right, bottom = (float(number) for number in numbers)
    except OverflowError:
        return None
    if format == "xywh":
        right, bottom = left + right, top + bottom
    if not all(math.isfinite(edge) for edge in (left, top, right, bottom)) or right <= left or bottom <= top:
        return None
    return (left, top, right, bottom)


MAX_CHARS = 50_000
MAX_TEXT_CHARS = 1_000
KINDS = ("count", "read", "choose", "box")
_DIGITS = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?")
_QUOTED = re.compile(r"[\"“]([^\"“”]+)[\"”]")
_DENIAL = re.compile(r"\b(?:not|never|no\s+longer)\b|n't\b|\bor\b", re.IGNORECASE)


@score(version=2)
class Vision(msgspec.Struct, frozen=True, kw_only=True):
    """1.0 if the answer about an image is right, else 0.0. None without a reference or a kind.

    The kind "count" expects a number, in digits or words. "read" expects the reference with at most `max_error` edits per
    character. "choose" works as `k12` with meta[options]. "box" expects a one-to-one match of the answer's boxes with the boxes
    of the reference's JSON; two boxes match if their intersection over union is at least `threshold`.

    answer: Source of the reference, see `Experience.reference`. kind: Kind of question. Default "": meta["kind"]. max_error:
    Maximum edits per character for "read"; 0.1 allows one edit in ten characters. case: Whether upper and lower case differ for
    "read". Runs of white space count as a space. options: Key in meta of the choices for "choose". format: Format of the
    answer's boxes: left, top and then right, bottom or width, height. reference_format: Format of the reference's boxes.
    threshold: Minimum intersection over union for "box", 0 to 1. partial: Whether scores are partial: for "read" 1 − edits per
    character, for "box" the F1, 2 · met / (given + wanted).
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
