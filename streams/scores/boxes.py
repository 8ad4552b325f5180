"""Boxes in an answer: reading them from JSON inside prose, and matching them with the reference by overlap.

Guarantee: each box of the answer is matched with at most one of the reference and the other way round, as many as can be
(Kuhn's augmenting paths), so neither many boxes nor one huge one gain anything.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

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
