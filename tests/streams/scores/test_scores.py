"""exact, format and math: right answers, and wrong ones that fool naive checkers."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from schemas.errors import ConfigError
from streams.scores.exact import exact
from streams.scores.format import Format
from streams.scores.math import Math, final_answer
from tests.streams.scores.answers import answered


def matched(text: str, pattern: str) -> float:
    with closing(Format(pattern=pattern)) as score:
        return score(answered(text))


@pytest.mark.parametrize(
    ("text", "expected", "options", "value"),
    [
        ("280", "280", {}, 1.0),
        (" 280\n", "280", {}, 1.0),
        (" 280\n", "280", {"strip": False}, 0.0),
        ("2800", "280", {}, 0.0),
        ("1280", "280", {}, 0.0),
        ("280 281", "280", {}, 0.0),
        ("", "280", {}, 0.0),
        ("", "", {}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"case": False}, 1.0),
        ("STRASSE", "straße", {"case": False}, 1.0),
        ("caf\u0065\u0301", "caf\u00e9", {}, 1.0),
        ("280", None, {}, None),
    ],
)
def test_exact(text: str, expected: str | None, options: dict[str, Any], value: float | None) -> None:
    assert exact(answered(text, answer=expected), **options) == value


THINK = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>7+5=12\ncarry</think>\n<answer>280</answer>", 1.0),
        ("  <think></think><answer></answer>  ", 1.0),
        ("first <think>a</think><answer>280</answer>", 0.0),
        ("<think>a</think><answer>280</answer> or 281", 0.0),
        ("<think>a</think><answer>280</answer><answer>281</answer>", 0.0),
        ("<think>a<think>b</think><answer>280</answer>", 0.0),
        ("<answer>280</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>280", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_the_whole_response_in_shape(text: str, value: float) -> None:
    assert matched(text, THINK) == value


def test_a_pattern_that_backtracks_without_end_is_given_up_and_the_next_answer_is_matched() -> None:
    with closing(Format(pattern="(a+)+b", timeout_s=0.2)) as score:
        with pytest.raises(TimeoutError):
            score(answered("a" * 64))
        assert score(answered("aab")) == 1.0


def test_a_pattern_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="which is no regular expression"):
        Format(pattern="(a")


@pytest.fixture(scope="module")
def math() -> Iterator[Math]:
    score = Math()
    yield score
    score.close()


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("280", "280"),
        ("The answer is 280.", "280"),
        ("Final answer: $280$", "280"),
        ("So we get 280", "280"),
        ("**280**", "280"),
        ("no \\boxed{1}, rather \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("6, not 5", None),
        ("5 apples, maybe 6", None),
        ("I don't know", None),
        ("first 280\n290", "290"),
        ("the answer is 5, no, the answer is 6", "6"),
        ("it is 1,000", "1,000"),
        ("that leaves x^2 + xyz", None),
        ("we have 27 + 280", None),
        ("between 5 and 6", None),
        ("", None),
    ],
)
def test_only_the_last_answer_is_looked_at(response: str, expected: str | None) -> None:
    assert final_answer(response) == expected


def test_boxed_only_ignores_everything_else() -> None:
    assert final_answer("280", boxed=True) is None
    assert final_answer("\\boxed{280", boxed=True) is None
    assert final_answer("the answer is \\boxed{ 280 }", boxed=True) == "280"


RIGHT = [
    ("280", "\\boxed{280}"),
    ("\\frac{1}{2}", "0.5"),
    ("\\frac{1}{2}", "The answer is 1/2."),
    ("1000", "1,000"),
    ("280", "280 cm"),
    ("x^2+2x+1", "\\boxed{(x+1)^2}"),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}"),
    ("(1,2)", "\\boxed{(1, 2)}"),
    ("3", "x=3"),
    ("280", "\\boxed{140+140=280}"),
    ("2", "\\boxed{1+1}"),
]
WRONG = [
    ("280", "2800"),
    ("280", "-280"),
    ("280", ""),
    ("280", "280 or 290"),
    ("280", "\\boxed{280, 281}"),
    ("280", "\\boxed{280 \\text{ or } 281}"),
    ("280", "\\boxed{280}, no: \\boxed{281}"),
    ("280", "\\boxed{281=280}"),
    ("280", "\\boxed{1=280}"),
    ("280", "\\boxed{279 < 281}"),
    ("280", "\\boxed{x}"),
    ("280", "\\boxed{27\\ 280}"),
    ("5", "6, not 5"),
    ("5", "the answer is 5 or 6"),
    ("1/3", "0.333"),
    ("(1,2)", "\\boxed{(2,1)}"),
    ("9", "\\boxed{9} ... wait, \\boxed{8}"),
    ("280", "9" * 3000),
]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_equal_answers_are_right_however_they_are_written(math: Math, gold: str, response: str) -> None:
    assert math(answered(response, answer=gold)) == 1.0


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_wrong_answers_that_fool_naive_checkers_are_wrong(math: Math, gold: str, response: str) -> None:
    assert math(answered(response, answer=gold)) == 0.0


def test_a_reference_that_is_no_mathematics_is_an_error_and_the_next_goes_on(math: Math) -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        math.equal("", "280")
    assert math.equal("280", "280.0")


@pytest.mark.slow
def test_an_answer_that_cannot_be_computed_times_out_and_the_next_goes_on() -> None:
    with closing(Math(timeout_s=1.0)) as score:
        with pytest.raises(TimeoutError, match="comparing"):
            score(answered("\\boxed{9^{9^{9^{9^{9}}}}}", answer="3"))
        assert score(answered("\\boxed{2+1}", answer="3")) == 1.0
