"""k12: physics, geography, biology, chemistry, arithmetic: right answers, and wrong ones that fool naive checkers."""

import json
from typing import Any

import pytest
from answers import answered

from streams.scores.k12 import k12
from streams.scores.quantity import read_quantity
from streams.scores.words import normal, number_of

PLANETS = json.dumps(["Venus", "Mars", "Jupiter", "Saturn"])
CHOICE = {"answer": "B", "options": PLANETS}
RIGHT_CHOICE = [
    "B",
    "(B)",
    "b",
    "**B**",
    "B.",
    "B) Mars",
    "Mars",
    "The answer is B.",
    "The answer is (B) Mars.",
    "Answer: B",
    "answer is: **B**",
    "A is too hot, C is a giant. So the correct answer is B.",
    "I choose option B.",
    "\\boxed{B}",
    "\\boxed{\\text{B}}",
    "The answer is Mars.",
    "Venus is closer.\nThe correct option is B",
    "I first thought the answer is A. Wait, the answer is B.",
    "Option A is wrong.\n\nB",
    "The answer is B, because Mars is red.",
    "The answer is B and not A.",
    "Option B is the correct one.",
]
WRONG_CHOICE = [
    "A",
    "C) Jupiter",
    "A B C D",
    "A, B, C, D",
    "A, B",
    "The answer is A or B.",
    "The answer is B or C.",
    "The answer is B and C.",
    "The answer is not B.",
    "It is not Mars",
    "Mars or Venus",
    "The answer is B. No, the answer is C.",
    "\\boxed{A}",
    "\\boxed{B, C}",
    "Venus, Mars, Jupiter, Saturn",
    "Maybe Mars, but Jupiter is larger, so Jupiter it is.",
    "E",
    "",
    "I do not know.",
    "A) Mars",
    "B is wrong.\nThe answer is D",
    "Big planets are interesting",
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
    (MITOCHONDRION, "Answer:\nmitochondrion", 1.0),
    (MITOCHONDRION, "It is the mitochondrion.", 1.0),
    (MITOCHONDRION, "ribosome", 0.0),
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
    ({"answer": "São Paulo"}, "Sao Tome", 0.0),
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
    ("9.8 m/s^2", "9.8", 0.0),
    ("9.8 m/s^2", "980 cm/s^2", 1.0),
    ("1.5 km", "1500 m", 1.0),
    ("1.5 km", "about 1500 meters.", 1.0),
    ("1.5 km", "1,500 m", 1.0),
    ("1.5 km", "1.5 m", 0.0),
    ("1.5 km", "1.5 kg", 0.0),
    ("1.5 km", "1.5 km or 2 km", 0.0),
    ("1.5 km", "1.5 km\n2 km", 0.0),
    ("1.5 km", "not 1.5 km", 0.0),
    ("1.5 km", "1.5 kilometres", 1.0),
    ("90 km/h", "25 m/s", 1.0),
    ("90 km/h", "ninety kilometers per hour", 1.0),
    ("90 km/h", "90 mph", 0.0),
    ("1 g/cm^3", "1000 kg/m^3", 1.0),
    ("1 g/cm^3", "1 kg/m^3", 0.0),
    ("20 N", "20 kg m/s^2", 1.0),
    ("20 N", "20 kg·m/s²", 1.0),
    ("20 N", "20 J", 0.0),
    ("5 MJ", "5 mJ", 0.0),
    ("100 °C", "212 °F", 1.0),
    ("100 °C", "373.15 K", 1.0),
    ("100 °C", "100", 0.0),
    ("0.5 mol/L", "0.5 M", 1.0),
    ("0.5 mol/L", "500 mmol/L", 1.0),
    ("25 %", "0.25", 0.0),
    ("25%", "25 percent", 1.0),
    ("$12.50", "12.50 dollars", 1.0),
    ("$12.50", "€12.50", 0.0),
    ("$12.50", "1250 cents", 1.0),
    ("3.0e8 m/s", "3 x 10^8 m/s", 1.0),
    ("3.0e8 m/s", "3 × 10^5 km/s", 1.0),
    ("3.0e8 m/s", "3 m/s", 0.0),
    ("42", "42", 1.0),
    ("42", "42.0", 1.0),
    ("42", "forty-two", 1.0),
    ("42", "x = 42", 1.0),
    ("42", "42.3", 0.0),
    ("42", "420", 0.0),
    ("42", "-42", 0.0),
    ("42", "41, 42, 43", 0.0),
    ("42", "42 apples", 0.0),
    ("42", "between 40 and 44", 0.0),
    ("42", "the answer is 42, no, the answer is 43", 0.0),
    ("1200", "1,200", 1.0),
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


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("zero", 0), ("nineteen", 19), ("twenty one", 21), ("two hundred and five", 205), ("one thousand two hundred", 1200),
        ("three million forty thousand and one", 3_040_001), ("two three", None), ("twenty ten", None), ("hundred", None),
        ("one million million", None), ("apples", None), ("", None), ("zero one", None), ("one hundred hundred", None),
    ],
)  # fmt: skip
def test_number_words(words: str, number: int | None) -> None:
    assert number_of(words) == number


def test_what_is_ignored_in_words() -> None:
    assert normal("  The  ‘Sea-Horse’. ") == normal("a sea horse")
    assert normal("well–known") != normal("well known fact")


def test_two_quantities_are_none() -> None:
    assert read_quantity("3 m 4 s") is None
    assert read_quantity("1.2.3") is None
