"""A set of whole numbers as ranges holds what a set holds, and no more ranges than there are."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.ranges import Ranges

PAIRS = st.lists(st.tuples(st.integers(-3, 30), st.integers(-3, 8)).map(lambda one: (one[0], one[0] + one[1])))


@given(PAIRS)
def test_ranges_hold_what_was_added_and_as_few_as_there_are(pairs: list[tuple[int, int]]) -> None:
    held, plain = Ranges(), set[int]()
    for first, last in pairs:
        held.add(first, last)
        plain |= set(range(first, last + 1))
    assert [number for number in range(-10, 50) if number in held] == sorted(plain)
    assert len(held) == sum(1 for number in plain if number - 1 not in plain)


def test_steps_that_follow_one_another_are_one_range() -> None:
    steps = Ranges()
    for step in range(100_000):
        steps.add(step, step)
    assert len(steps) == 1
