"""k12 and vision: right answers, and wrong ones that fool naive checkers."""

import json
from typing import Any

import pytest

from streams.scores.k12 import k12
from streams.scores.quantity import read_quantity
from streams.scores.vision import MAX_BOXES, Vision, num_matched, overlap, read_boxes
from streams.scores.words import normal
from tests.streams.scores.answers import answered

PLANETS = json.dumps(["Venus", "Mars", "Jupiter", "Saturn"])
CHOICE = {"answer": "B", "options": PLANETS}
RIGHT_CHOICE = [
    "B",
    "**B**",
    "B) Mars",
    "Mars",
    "The answer is (B) Mars.",
    "answer is: **B**",
    "A is too hot, C is a giant. So the correct answer is B.",
    "\\boxed{B}",
    "\\boxed{\\text{B}}",
    "The answer is Mars.",
    "I first thought the answer is A. Wait, the answer is B.",
    "Option A is wrong.\n\nB",
    "The answer is B and not A.",
    "Option B is the correct one.",
]
WRONG_CHOICE = [
    "A",
    "A B C D",
    "The answer is A or B.",
    "The answer is not B.",
    "It is not Mars",
    "The answer is B. No, the answer is C.",
    "\\boxed{B, C}",
    "Venus, Mars, Jupiter, Saturn",
    "Maybe Mars, but Jupiter is larger, so Jupiter it is.",
    "",
    "B is wrong.\nThe answer is D",
    "B\nC",
    "All of A, B, C and D are planets.",
    "Neither A nor B",
    "The answer is A.\n\nB",
    "Option B is wrong.",
]


@pytest.mark.parametrize("response", RIGHT_CHOICE)
def test_one_choice_is_read_however_it_is_written(response: str) -> None:
    assert k12(answered(response, **CHOICE)) == 1.0


@pytest.mark.parametrize("response", WRONG_CHOICE)
def test_no_choice_two_choices_and_denied_ones_are_wrong(response: str) -> None:
    assert k12(answered(response, **CHOICE)) == 0.0


def test_the_reference_may_be_the_text_and_the_options_may_have_letters_of_their_own() -> None:
    options = json.dumps({"P": "oxygen", "Q": "nitrogen"})
    assert k12(answered("The answer is Q", answer="nitrogen", options=options)) == 1.0
    assert k12(answered("The answer is P", answer="nitrogen", options=options)) == 0.0


MITOCHONDRION = {"answer": "mitochondrion", "variants": '["mitochondria"]'}
FILL: list[tuple[dict[str, Any], str, float]] = [
    (MITOCHONDRION, "mitochondrion", 1.0),
    (MITOCHONDRION, "The mitochondria.", 1.0),
    (MITOCHONDRION, "The powerhouse of the cell makes ATP.\nThe answer is: the **Mitochondrion**", 1.0),
    (MITOCHONDRION, "It is the mitochondrion.", 1.0),
    (MITOCHONDRION, "mitochondrion or ribosome", 0.0),
    (MITOCHONDRION, "mitochondrion, ribosome, nucleus", 0.0),
    (MITOCHONDRION, "not the mitochondrion", 0.0),
    (MITOCHONDRION, "The answer is not mitochondrion", 0.0),
    (MITOCHONDRION, "The answer is mitochondrion. No: the answer is ribosome.", 0.0),
    (MITOCHONDRION, "Everybody would say mitochondrion, but I am sure it is the nucleus", 0.0),
    (MITOCHONDRION, "mitochondrion\nnucleus", 0.0),
    (MITOCHONDRION, "", 0.0),
    ({"answer": "São Paulo"}, "Sa\u0303o Paulo", 1.0),
    ({"answer": "São Paulo"}, "SÃO PAULO", 1.0),
    ({"answer": "Battle of Hastings"}, "The Battle of Hastings", 1.0),
    ({"answer": "Battle of Hastings"}, "the battle", 0.0),
    ({"answer": "twenty-one", "kind": "fill"}, "21", 1.0),
    ({"answer": "21", "kind": "fill"}, "Twenty one", 1.0),
    ({"answer": "21", "kind": "fill"}, "twenty", 0.0),
    ({"answer": "1,000", "kind": "fill"}, "one thousand", 1.0),
    ({"answer": "ß", "kind": "fill"}, "SS", 1.0),
]
NUMBER: list[tuple[str, str, float]] = [
    ("9.8 m/s^2", "9.81 m/s²", 1.0),
    ("9.8 m/s^2", "The answer is 9.8 meters per second squared", 1.0),
    ("9.8 m/s^2", "9.8 m/s", 0.0),
    ("9.8 m/s^2", "980 cm/s^2", 1.0),
    ("1.5 km", "1500 m", 1.0),
    ("1.5 km", "1,500 m", 1.0),
    ("1.5 km", "1.5 kg", 0.0),
    ("1.5 km", "1.5 km or 2 km", 0.0),
    ("1.5 km", "not 1.5 km", 0.0),
    ("90 km/h", "25 m/s", 1.0),
    ("90 km/h", "ninety kilometers per hour", 1.0),
    ("90 km/h", "90 mph", 0.0),
    ("1 g/cm^3", "1000 kg/m^3", 1.0),
    ("1 g/cm^3", "1 kg/m^3", 0.0),
    ("20 N", "20 kg m/s^2", 1.0),
    ("20 N", "20 J", 0.0),
    ("5 MJ", "5 mJ", 0.0),
    ("100 °C", "212 °F", 1.0),
    ("100 °C", "373.15 K", 1.0),
    ("0.5 mol/L", "0.5 M", 1.0),
    ("25 %", "0.25", 0.0),
    ("25%", "25 percent", 1.0),
    ("$12.50", "12.50 dollars", 1.0),
    ("$12.50", "€12.50", 0.0),
    ("$12.50", "1250 cents", 1.0),
    ("3.0e8 m/s", "3 x 10^8 m/s", 1.0),
    ("3.0e8 m/s", "3 × 10^5 km/s", 1.0),
    ("42", "42.0", 1.0),
    ("42", "forty-two", 1.0),
    ("42", "x = 42", 1.0),
    ("42", "42.3", 0.0),
    ("42", "-42", 0.0),
    ("42", "41, 42, 43", 0.0),
    ("42", "42 apples", 0.0),
    ("42", "the answer is 42, no, the answer is 43", 0.0),
    ("1200", "1,20", 0.0),
    ("0.75", "3/4", 1.0),
    ("1.5", "1 1/2", 1.0),
    ("1.5", "1/0", 0.0),
    ("0", "0", 1.0),
    ("0 m", "0.001 m", 0.0),
    ("42", "9" * 5000, 0.0),
]


@pytest.mark.parametrize(("meta", "response", "value"), FILL)
def test_fill_in_takes_variants_and_nothing_around_them(meta: dict[str, Any], response: str, value: float) -> None:
    assert k12(answered(response, **meta)) == value


@pytest.mark.parametrize(("answer", "response", "value"), NUMBER)
def test_numbers_are_compared_with_their_units(answer: str, response: str, value: float) -> None:
    assert k12(answered(response, answer=answer)) == value


def test_without_a_reference_there_is_no_verdict() -> None:
    assert k12(answered("B", options=PLANETS)) is None


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"answer": "E", "options": PLANETS}, "is 0 of the options"),
        ({"answer": "A", "options": "{"}, "no JSON"),
        ({"answer": "A", "options": "[1, 2]"}, "JSON list of texts"),
        ({"answer": "many", "kind": "number"}, "cannot be read as a number"),
        ({"answer": "x", "variants": "y"}, "JSON list of texts"),
    ],
)
def test_a_task_that_cannot_be_judged_is_an_error_that_says_why(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        k12(answered("1", **meta))


def test_what_is_ignored_in_words() -> None:
    assert normal("  The  ‘Sea-Horse’. ") == normal("a sea horse")
    assert normal("well–known") != normal("well known fact")


def test_two_quantities_are_none() -> None:
    assert read_quantity("3 m 4 s") is None
    assert read_quantity("1.2.3") is None


COUNT = [
    ("5", "5", 1.0),
    ("5", "There are 5 circles.", 1.0),
    ("5", "There are five circles.", 1.0),
    ("5", "I see 3 squares.\nSo the answer is 5.", 1.0),
    ("21", "twenty-one", 1.0),
    ("0", "There are no circles.", 1.0),
    ("5", "5.5", 0.0),
    ("5", "-5", 0.0),
    ("5", "4, 5 or 6", 0.0),
    ("5", "not 5", 0.0),
    ("5", "There are 5 circles and 3 squares.", 0.0),
    ("5", "1 2 3 4 5", 0.0),
    ("5", "one two three four five", 0.0),
    ("5", "The answer is 5. No, the answer is 6.", 0.0),
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


@pytest.mark.parametrize(("answer", "response", "value"), COUNT)
def test_a_count_is_one_number(answer: str, response: str, value: float) -> None:
    assert Vision()(answered(response, answer=answer, kind="count")) == value


@pytest.mark.parametrize(("answer", "response", "value"), READ)
def test_a_reading_may_have_few_errors(answer: str, response: str, value: float) -> None:
    assert Vision(kind="read")(answered(response, answer=answer)) == value


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
    ("item", "other", "share"),
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1.0),
        ((0, 0, 2, 2), (1, 0, 3, 2), 1 / 3),  # 2 in common of 4 + 4 - 2
        ((0, 0, 2, 2), (2, 0, 4, 2), 0.0),
        ((0, 0, 4, 4), (1, 1, 2, 2), 1 / 16),
    ],
)
def test_overlap_is_intersection_over_union(item: Any, other: Any, share: float) -> None:
    assert overlap(item, other) == pytest.approx(share)
    assert overlap(other, item) == pytest.approx(share)


def test_matching_gives_way_where_a_greedy_one_would_not() -> None:
    """The first box overlaps both references, the second only the first: greedily the first takes it away."""
    reference = [(0.0, 0.0, 10.0, 10.0), (4.0, 0.0, 14.0, 10.0)]
    answer = [(2.0, 0.0, 12.0, 10.0), (0.0, 0.0, 10.0, 10.0)]
    assert num_matched(answer, reference, 0.5) == 2


def test_too_many_boxes_are_no_answer() -> None:
    assert read_boxes(json.dumps([[0, 0, 1, 1]] * (MAX_BOXES + 1)), "xyxy") is None
