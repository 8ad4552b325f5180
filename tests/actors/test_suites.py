"""Results of evals compared: equally good versions are seldom held, and drops that add up are found."""

from random import Random

import pytest
from msgspec.structs import replace

from actors.config import GateSuite
from actors.master.gate.suites import difference, drop, pairable, total_drop
from schemas import EvalResult

BAR = GateSuite(max_drop=0.02)


def result(right: list[int], samples: int = 1, version: int = 3, tasks: str = "9f") -> EvalResult:
    return EvalResult(
        policy="main", version=version, suite="dev", num_tasks=len(right), num_correct=sum(right), num_samples=samples,
        right=tuple(right), tasks=tasks,
    )  # fmt: skip


def sampled(random: Random, chances: list[float], samples: int = 1) -> EvalResult:
    return result([sum(random.random() < one for _ in range(samples)) for one in chances], samples)


@pytest.mark.parametrize(("tasks", "samples"), [(20, 1), (20, 4), (250, 1), (500, 1), (500, 4)])
def test_equally_good_versions_are_seldom_held(tasks: int, samples: int) -> None:
    """600 pairs at alpha = 0.01: 6 are expected at most."""
    random, held = Random(0), 0
    for _ in range(600):
        chances = [random.betavariate(1.6, 0.4) for _ in range(tasks)]
        held += drop(BAR, sampled(random, chances, samples), sampled(random, chances, samples)) > 0
    assert held <= 12


def test_a_version_that_lost_tasks_and_won_none_is_held_by_few_and_one_that_changed_many_is_not() -> None:
    was = result([1] * 400 + [0] * 100)
    assert drop(BAR, result([1] * 385 + [0] * 115), was) == pytest.approx(0.03), "15 lost, none won"
    assert drop(BAR, result([1] * 325 + [0] * 75 + [1] * 60 + [0] * 40), was) == 0.0, "75 lost, 60 won"
    assert drop(BAR, result([1] * 391 + [0] * 109), was) == 0.0, "within max_drop"


def test_results_of_other_tasks_are_compared_as_shares() -> None:
    was, now = result([1] * 400 + [0] * 100), result([1] * 385 + [0] * 115, tasks="a0")
    assert not pairable(now, was) and not pairable(replace(was, right=()), was)
    assert difference(now, was)[1] == pytest.approx(2 * 0.785 * 0.215 / 500) and drop(BAR, now, was) == 0.0


@pytest.mark.parametrize(("tasks", "served"), [(500, 0.725), (2000, 0.75)])
def test_versions_that_each_lose_a_little_are_stopped_before_much_is_lost(tasks: int, served: float) -> None:
    """60 candidates, each 0.3 points worse than the one before, from 0.8 on, each answered at a temperature."""
    for seed in range(5):
        random, stable, history = Random(seed), 0, list[EvalResult]()
        for version in range(60):
            history.append(sampled(random, [0.8 - 0.003 * version] * tasks))
            if not drop(BAR, history[-1], history[stable]) and not total_drop(BAR, history):
                stable = version
        assert 0.8 - 0.003 * stable >= served


def test_the_run_is_seldom_held_where_all_versions_are_as_good() -> None:
    random, held = Random(0), 0
    for _ in range(20):
        history = [sampled(random, [0.8] * 250) for _ in range(40)]
        held += any(total_drop(BAR, history[:end]) for end in range(1, 41))
    assert held <= 1
