"""What an answer of the off-log additions is worth."""

import pytest

from infra.bench.adding import digits_right, exact

END = 2
RIGHT = (8, 9, 10, END)


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (RIGHT, 1.0),
        ((8, 9, 11, END), 2 / 3),
        ((7, 7, 7, END), 0.0),
        ((8, 9, 10, 10), 0.0),
        ((8, 9, END), 0.0),
        ((), 0.0),
    ],
)
def test_digits_count_only_in_an_answer_that_has_three_and_ends(answer: tuple[int, ...], share: float) -> None:
    assert digits_right(answer, RIGHT) == pytest.approx(share)
    assert exact(answer, RIGHT) == float(share == 1.0)
