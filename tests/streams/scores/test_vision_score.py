"""vision: counts, readings, choices and boxes; right answers, and wrong ones that fool naive checkers."""

import json
from typing import Any

import pytest
from answers import answered
from hypothesis import given
from hypothesis import strategies as st

from streams.scores.boxes import MAX_BOXES, num_matched, overlap, read_boxes
from streams.scores.vision import Vision, edits

COUNT = [
    ("5", "5", 1.0),
    ("5", "There are 5 circles.", 1.0),
    ("5", "There are five circles.", 1.0),
    ("5", "I see 3 squares.\nSo the answer is 5.", 1.0),
    ("21", "twenty-one", 1.0),
    ("0", "There are no circles.", 1.0),
    ("5", "15", 0.0),
    ("5", "5.5", 0.0),
    ("5", "-5", 0.0),
    ("5", "4, 5 or 6", 0.0),
    ("5", "5 or six", 0.0),
    ("5", "not 5", 0.0),
    ("5", "There are 5 circles and 3 squares.", 0.0),
    ("5", "1 2 3 4 5", 0.0),
    ("5", "one two three four five", 0.0),
    ("5", "The answer is 5. No, the answer is 6.", 0.0),
    ("5", "many", 0.0),
    ("5", "", 0.0),
]
READ = [
    ("STOP", "STOP", 1.0),
    ("STOP", 'The sign says "Stop".', 1.0),
    ("STOP", "The answer is: stop", 1.0),
    ("Main Street 12", "Main  Street\t12", 1.0),
    ("Main Street 12", "Main Street 13", 1.0),  # one edit in fourteen: 0.07
    ("Main Street 12", "Main Street 99", 0.0),
    ("STOP", "STOPS", 0.0),
    ("STOP", "GO", 0.0),
    ("STOP", 'It says "STOP" or "GO"', 0.0),
    ("STOP", "The sign with the big letters on it says STOP to all the cars that come along here", 0.0),
    ("STOP", "STOP GO YIELD MERGE", 0.0),
    ("STOP", "", 0.0),
    ("4271", "4 2 7 1", 0.0),
]
ONE = "[[10, 10, 50, 50]]"
TWO = "[[0, 0, 10, 10], [100, 100, 120, 120]]"
BOX: list[tuple[str, str, dict[str, Any], float]] = [
    (ONE, "[10, 10, 50, 50]", {}, 1.0),
    (ONE, 'The cat is here: {"bbox": [11, 9, 50, 52]}, as you see.', {}, 1.0),
    (ONE, '```json\n[{"bbox_2d": [10, 10, 50, 50], "label": "cat"}]\n```', {}, 1.0),
    (ONE, "[10, 10, 40, 40]", {"format": "xywh"}, 1.0),
    (ONE, "[10, 10, 40, 40]", {"threshold": 0.9}, 0.0),
    (ONE, "Perhaps [0, 0, 5, 5]. No: [10, 10, 50, 50]", {}, 1.0),
    (ONE, "[0, 0, 1000, 1000]", {}, 0.0),
    (ONE, "[50, 50, 10, 10]", {}, 0.0),
    (ONE, "[10, 10, 10, 10]", {}, 0.0),
    (ONE, "[[10, 10, 50, 50], [10, 10, 50, 50]]", {}, 0.0),
    (ONE, "[[10, 10, 50, 50], [0, 0, 5, 5], [60, 60, 70, 70]]", {}, 0.0),
    (ONE, "[10, 10, 50]", {}, 0.0),
    (ONE, "[10, 10, 50, true]", {}, 0.0),
    (ONE, "[1e999, 10, 50, 50]", {}, 0.0),
    (ONE, "10, 10, 50, 50", {}, 0.0),
    (ONE, "[" * 30_000, {}, 0.0),
    (ONE, "", {}, 0.0),
    (TWO, "[[100, 100, 120, 121], [0, 0, 10, 10]]", {}, 1.0),
    (TWO, "[[0, 0, 10, 10]]", {}, 0.0),
    (TWO, "[[0, 0, 10, 10], [0, 0, 10, 10]]", {}, 0.0),
    (TWO, "[[0, 0, 10, 10]]", {"partial": True}, 2 / 3),
    (TWO, "[[0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 10, 10]]", {"partial": True}, 2 / 5),
    ("[]", "There is none: []", {}, 1.0),
    ("[]", "[1, 1, 2, 2]", {}, 0.0),
]
OPTIONS = {"answer": "B", "options": '["red", "green"]', "kind": "choose"}


@pytest.mark.parametrize(("answer", "response", "value"), COUNT)
def test_a_count_is_one_number(answer: str, response: str, value: float) -> None:
    assert Vision()(answered(response, answer=answer, kind="count")) == value


@pytest.mark.parametrize(("answer", "response", "value"), READ)
def test_a_reading_may_have_few_errors(answer: str, response: str, value: float) -> None:
    assert Vision(kind="read")(answered(response, answer=answer)) == value


@pytest.mark.parametrize(("response", "value"), [("B", 1.0), ("green", 1.0), ("red", 0.0), ("A or B", 0.0)])
def test_a_choice_is_that_of_k12(response: str, value: float) -> None:
    assert Vision()(answered(response, **OPTIONS)) == value


@pytest.mark.parametrize(("answer", "response", "options", "value"), BOX)
def test_boxes_are_matched_one_to_one(answer: str, response: str, options: dict[str, Any], value: float) -> None:
    assert Vision(kind="box", **options)(answered(response, answer=answer)) == pytest.approx(value)


def test_case_and_partial_readings() -> None:
    assert Vision(kind="read", case=True)(answered("stop", answer="STOP")) == 0.0
    assert Vision(kind="read", partial=True)(answered("STOB", answer="STOP")) == 0.75


def test_a_task_without_a_reference_or_that_asks_nothing_of_an_image_gets_no_verdict() -> None:
    assert Vision(kind="count")(answered("5")) is None
    assert Vision()(answered("5", answer="5")) is None
    assert Vision()(answered("5", answer="5", kind="number")) is None, "a school question, see k12"


@pytest.mark.parametrize(("kind", "answer"), [("count", "many"), ("box", "there"), ("read", " ")])
def test_a_reference_that_cannot_be_read_is_an_error(kind: Any, answer: str) -> None:
    with pytest.raises(ValueError, match="reference"):
        Vision(kind=kind)(answered("5", answer=answer))


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0),
        ((0, 0, 2, 2), (1, 0, 3, 2), 1 / 3),  # 2 in common of 4 + 4 - 2
        ((0, 0, 2, 2), (2, 0, 4, 2), 0.0),
        ((0, 0, 4, 4), (1, 1, 2, 2), 1 / 16),
    ],
)
def test_overlap_is_intersection_over_union(one: Any, other: Any, share: float) -> None:
    assert overlap(one, other) == pytest.approx(share)
    assert overlap(other, one) == pytest.approx(share)


def test_matching_gives_way_where_a_greedy_one_would_not() -> None:
    """The first box overlaps both references, the second only the first: greedily the first takes it away."""
    reference = [(0.0, 0.0, 10.0, 10.0), (4.0, 0.0, 14.0, 10.0)]
    answer = [(2.0, 0.0, 12.0, 10.0), (0.0, 0.0, 10.0, 10.0)]
    assert num_matched(answer, reference, 0.5) == 2


coordinates = st.integers(0, 20)
boxes = st.lists(
    st.tuples(coordinates, coordinates, st.integers(1, 9), st.integers(1, 9)).map(
        lambda box: (float(box[0]), float(box[1]), float(box[0] + box[2]), float(box[1] + box[3]))
    ),
    max_size=6,
)


@given(boxes, boxes)
def test_no_more_is_matched_than_there_is_and_order_does_not_matter(one: Any, other: Any) -> None:
    matched = num_matched(one, other, 0.3)
    assert matched <= min(len(one), len(other))
    assert matched == num_matched(other, one, 0.3) == num_matched(one[::-1], other, 0.3)
    assert num_matched(one, one, 1.0) == len(one)


@given(boxes)
def test_boxes_are_read_back_from_prose(one: Any) -> None:
    assert read_boxes(f"Here [they] are: {json.dumps(one)}. That's {{all}}.", "xyxy") == [tuple(box) for box in one]


def test_too_many_boxes_are_no_answer() -> None:
    assert read_boxes(json.dumps([[0, 0, 1, 1]] * (MAX_BOXES + 1)), "xyxy") is None


@given(st.text(max_size=12), st.text(max_size=12))
def test_edits_are_a_distance(one: str, other: str) -> None:
    assert edits(one, other) == edits(other, one)
    assert (edits(one, other) == 0) == (one == other)
    assert abs(len(one) - len(other)) <= edits(one, other) <= max(len(one), len(other))
