"""Runs in which the simulator once complained, by what was wrong, and the rules that it judged by."""

from random import Random
from typing import Literal

import msgspec
import pytest

from schemas import EvalResult, PolicyEvent
from tests.simulator.faults import draw_mixture
from tests.simulator.run import run_seed
from tests.simulator.settlement_serving import verdict_fault

# Seed, and what of its mixture of faults is another than the one it draws.
RUNS: dict[str, tuple[int, dict[str, object]]] = {
    "an expert delivered again after the first checkpoint": (3, {"crash": 0.03, "crashes": 4}),
    "a suite that was asked with half of its tasks": (
        8, {"slow": 0.3, "lost": 0.1, "crash": 0.03, "crashes": 8, "focus": "process"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_what_once_broke_a_promise_breaks_none(name: str) -> None:
    seed, changes = RUNS[name]
    mixture = msgspec.structs.replace(draw_mixture(Random(f"mixture/{seed}")), **changes)
    outcome = run_seed(seed, mixture=mixture)
    assert not outcome.violations, outcome.words()


def result(correct: int, num_tasks: int) -> EvalResult:
    return EvalResult(
        policy="main", version=1, suite="dev", num_tasks=num_tasks, num_correct=correct, tasks=str(num_tasks)
    )


@pytest.mark.parametrize(
    ("event", "own", "before", "fault"),
    [
        ("promoted", (0, 2), (2, 2), "it answers the same tasks worse"),
        ("promoted", (1, 2), (2, 2), ""),
        ("promoted", (0, 2), (1, 1), ""),
        ("held", (0, 2), (1, 1), ""),
        ("held", (0, 2), (2, 2), ""),
        ("held", (1, 2), (2, 2), "it answers no worse"),
        ("held", (1, 1), (1, 2), "it answers no worse"),
        ("promoted", (0, 2), None, ""),
    ],
)
def test_a_drop_of_all_tasks_is_held_against_a_version_where_they_are_the_same(
    event: Literal["promoted", "held"], own: tuple[int, int], before: tuple[int, int] | None, fault: str
) -> None:
    told = PolicyEvent(event=event, policy="main", version=2)
    assert verdict_fault(told, result(*own), [] if before is None else [result(*before)]) == fault
