"""The divergence guard's table of verdicts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.guard import GuardState, judge

HALTING = frozenset({"usual/ess", "usual/chi2"})


@pytest.mark.parametrize(
    ("skips", "finite", "alarms", "verdict", "skips_after", "reason"),
    [
        (0, True, (), "go", 0, ""),
        (2, True, (), "go", 0, ""),
        (0, True, ("usual/k1",), "go", 0, ""),
        (0, False, (), "skip", 1, "loss or gradient not finite"),
        (1, False, (), "skip", 2, "loss or gradient not finite"),
        (2, False, (), "rollback", 0, "3 steps in a row were not finite"),
        (0, True, ("usual/ess",), "rollback", 0, "alarm usual/ess"),
        (0, True, ("usual/ess", "usual/chi2", "usual/k1"), "rollback", 0, "alarm usual/chi2, usual/ess"),
        (1, False, ("usual/ess",), "rollback", 0, "alarm usual/ess"),
    ],
)
def test_the_verdict_on_a_step(
    skips: int, finite: bool, alarms: tuple[str, ...], verdict: str, skips_after: int, reason: str
) -> None:
    found = judge(GuardState(skips), finite=finite, alarms=alarms, halting=HALTING, max_skips=3)
    assert found == (GuardState(skips_after), verdict, reason)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_it_rolls_back_exactly_when_max_skips_in_a_row_were_not_finite(steps: list[bool], max_skips: int) -> None:
    state, row = GuardState(), 0
    for finite in steps:
        row = 0 if finite else row + 1
        state, verdict, _ = judge(state, finite=finite, alarms=(), halting=frozenset(), max_skips=max_skips)
        assert verdict == ("go" if finite else "rollback" if row == max_skips else "skip")
        row = 0 if verdict == "rollback" else row
