"""`headrace bench state` at a small size: two ranks save, all are killed, any number reads it again."""

import pytest

pytestmark = pytest.mark.full


def test_a_state_saved_by_two_killed_ranks_is_read_by_one_two_and_three_with_an_equal_hash() -> None:
    pytest.importorskip("deepspeed")
    from infra.cli.bench.learner.state import StatePlan, run

    figures = run(StatePlan(hidden=256, layers=2, silence_s=8.0, timeout_s=4.0), say=lambda text: None)
    assert all(figures[f"ranks_{num_ranks}_equal_hash"] == 1.0 for num_ranks in (1, 2, 3))
    assert figures["ranks_2_silence_survived_s"] == 8.0
    assert figures["parameters_m"] > 1.5 and figures["state_gib"] > 0.015
    peaks = [value for name, value in figures.items() if "_peak_" in name]
    assert len(peaks) == 5 and max(peaks) < 1.0
