"""math: equal as mathematics, one answer only, and no answer stops the worker."""

from collections.abc import Iterator

import pytest

from schemas import Experience, Message, Span, ids, make_experience
from streams.scores.math import Math, final_answer


@pytest.fixture(scope="module")
def math() -> Iterator[Math]:
    score = Math()
    yield score
    score.close()


def answer(text: str, expected: str | None) -> Experience:
    return make_experience(
        tokens=[1, 2],
        logprobs=[-0.1],
        messages=[Message(role="assistant", content=text)],
        id=ids.experience_id("t.0", 0, 0),
        group="t.0",
        episode=0,
        group_size=1,
        spans=(Span(1, 2, 3),),
        answer=expected,
    )


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
    assert math(answer(response, gold)) == 1.0


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_wrong_answers_that_fool_naive_checkers_are_wrong(math: Math, gold: str, response: str) -> None:
    assert math(answer(response, gold)) == 0.0


def test_without_a_reference_there_is_no_verdict(math: Math) -> None:
    assert math(answer("280", None)) is None


def test_a_reference_that_is_no_mathematics_is_an_error_and_the_next_goes_on(math: Math) -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        math.equal("", "280")
    assert math.equal("280", "280.0")


@pytest.mark.slow
def test_an_answer_that_cannot_be_computed_times_out_and_the_next_goes_on() -> None:
    score = Math(timeout_s=1.0)
    try:
        with pytest.raises(TimeoutError, match="comparing"):
            score(answer("\\boxed{9^{9^{9^{9^{9}}}}}", "3"))
        assert score(answer("\\boxed{2+1}", "3")) == 1.0
    finally:
        score.close()
