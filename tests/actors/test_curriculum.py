"""Distributions of the curricula, and that a choice depends on its arguments alone."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.config import CurriculumKind
from actors.master.curriculum import choose, easy_pool, in_pass, learnability, running_sum, smoothed, weight

FLOOR = 0.05


def picks(
    kind: CurriculumKind,
    num: int,
    rates: list[float | None],
    *,
    seed: int = 0,
    ramp: int = 1000,
    priorities: Sequence[float] = (),
    floor: float = FLOOR,
    cap: float = 1.0,
) -> Counter[int | None]:
    return Counter(
        choose(
            kind,
            priorities=running_sum(priorities or [1.0] * len(rates)),
            success=rates.__getitem__,
            seed=seed,
            sequence=sequence,
            ramp_groups=ramp,
            floor=floor,
            cap=cap,
        )
        for sequence in range(num)
    )


def shares(counts: Counter[int | None]) -> list[float]:
    return [counts[index] / counts.total() for index in range(max(index or 0 for index in counts) + 1)]


def test_uniform_takes_every_task_once_a_pass() -> None:
    assert picks("uniform", 6000, [None] * 6) == {index: 1000 for index in range(6)}
    assert set(picks("uniform", 64, [None] * 64, seed=3).values()) == {1}


@given(num=st.integers(1, 300), seed=st.integers(0, 99), turn=st.integers(0, 10**6))
def test_a_pass_has_every_number_once(num: int, seed: int, turn: int) -> None:
    assert {in_pass(num, seed=seed, sequence=turn * num + place) for place in range(num)} == set(range(num))


def test_passes_differ_in_their_order() -> None:
    orders = {tuple(in_pass(97, seed=0, sequence=97 * turn + place) for place in range(97)) for turn in range(20)}
    assert len(orders) > 15


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any), st.integers(0, 99))
def test_a_pass_holds_tasks_by_priority_as_evenly_as_whole_numbers_can(priorities: list[int], seed: int) -> None:
    num = len(priorities)
    counts = picks("uniform", num, [None] * num, seed=seed, priorities=[float(value) for value in priorities])
    for index, priority in enumerate(priorities):
        assert abs(counts[index] - num * priority / sum(priorities)) < 2


def test_success_chooses_in_proportion_to_failure() -> None:
    counts = picks("success", 9000, [0.0, 0.5, 0.75, 1.0])
    total = 1.0 + 0.5 + 0.25 + FLOOR
    for index, expected in enumerate((1.0, 0.5, 0.25, FLOOR)):
        assert abs(counts[index] / 9000 - expected / total) < 0.03


def test_variance_chooses_in_proportion_to_p_times_1_less_p() -> None:
    rates = [0.5, 0.9, 1.0, 0.0, None]
    expected = [1.0, 0.36, FLOOR, FLOOR, 1.0]
    found = shares(picks("variance", 9000, rates))
    assert found == pytest.approx([one / sum(expected) for one in expected], abs=0.03)


def test_under_variance_what_is_always_or_never_solved_still_comes_back() -> None:
    assert learnability(0.0, floor=FLOOR, cap=1.0) == learnability(1.0, floor=FLOOR, cap=1.0) == FLOOR > 0
    assert picks("variance", 100, [0.0, 1.0]).total() == 100


def test_what_is_always_solved_still_comes_back() -> None:
    assert weight(1.0, floor=FLOOR, cap=1.0) == FLOOR > 0
    assert picks("success", 100, [1.0, 1.0]).total() == 100


def test_an_unknown_task_is_drawn_as_often_as_a_failing_one() -> None:
    assert weight(None, floor=FLOOR, cap=1.0) == weight(0.0, floor=FLOOR, cap=1.0) == 1.0


def test_a_cap_keeps_what_is_never_solved_from_taking_everything() -> None:
    """Weights 1, 0.5 and 0.25 become 0.5, 0.5 and 0.25 under a cap of 0.5."""
    assert shares(picks("success", 9000, [0.0, 0.5, 0.75], cap=0.5)) == pytest.approx([0.4, 0.4, 0.2], abs=0.03)


def test_priorities_multiply_whatever_the_curriculum_says() -> None:
    rates: list[float | None] = [0.5, 0.5, None, 1.0]
    priorities = [1.0, 3.0, 0.0, 4.0]
    uniform = shares(picks("uniform", 8000, rates, priorities=priorities))
    assert uniform == pytest.approx([1 / 8, 3 / 8, 0.0, 4 / 8], abs=0.03)
    success = shares(picks("success", 8000, rates, priorities=priorities))  # 0.5, 1.5, 0, 4 · 0.05
    assert success == pytest.approx([0.5 / 2.2, 1.5 / 2.2, 0.0, 0.2 / 2.2], abs=0.03)
    early = picks("easy_to_hard", 50, [None] * 10, priorities=[0.0, *[1.0] * 9], ramp=10**6)
    assert set(early) <= set(range(1, 10)), "where the easiest have priority 0 the others are drawn"


def test_nothing_is_drawn_where_every_priority_is_0() -> None:
    assert picks("uniform", 3, [None, None], priorities=[0.0, 0.0]) == Counter({None: 3})


def test_easy_to_hard_starts_with_the_easiest_tenth_and_ends_with_all() -> None:
    assert easy_pool(100, sequence=0, ramp_groups=1000) == 10
    assert easy_pool(100, sequence=500, ramp_groups=1000) == 56  # ⌈100 · (0.1 + 0.9/2)⌉, rounded up
    assert easy_pool(100, sequence=5000, ramp_groups=1000) == 100
    assert easy_pool(1, sequence=0, ramp_groups=1000) == 1
    assert max(index or 0 for index in picks("easy_to_hard", 20, [None] * 100, ramp=1_000_000)) <= 10


def test_the_same_arguments_choose_the_same_task() -> None:
    kinds: tuple[CurriculumKind, ...] = ("uniform", "easy_to_hard", "success")
    for kind in kinds:
        assert picks(kind, 50, [0.1, None, 0.9, 0.5]) == picks(kind, 50, [0.1, None, 0.9, 0.5])
    assert picks("uniform", 25, [None] * 50, seed=1) != picks("uniform", 25, [None] * 50, seed=2)


def test_success_rate_is_smoothed_and_stays_between_0_and_1() -> None:
    assert smoothed(None, 0.4) == 0.4
    assert 0.4 < smoothed(0.4, 1.0) < 1.0
    assert smoothed(None, 7.0) == 1.0
    assert smoothed(None, -7.0) == 0.0
