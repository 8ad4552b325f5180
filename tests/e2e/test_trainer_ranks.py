"""A trainer of two ranks over a real broker: one is killed, both start again, and every batch is trained once."""

import pytest

from infra.cli.bench.learner.life import LifePlan, run

pytestmark = pytest.mark.full


def test_a_killed_rank_ends_the_group_and_its_checkpoint_and_the_journal_bring_it_back(
    kafka: str, app_name: str
) -> None:
    pytest.importorskip("deepspeed")
    figures = run(LifePlan(hidden=128, layers=2, app=app_name, bootstrap=kafka), say=lambda text: None)
    assert figures["steps"] == 10 and figures["steps_in_order"] == 1.0
    assert figures["each_experience_trained_once"] == 1.0
    assert figures["steps_before_the_kill"] > figures["steps_in_the_checkpoint"] > 0
    assert figures["resumed_with_equal_hash"] == 1.0
    assert figures["versions"] == 6 and figures["served_version"] == 5, "one at the start, then one each two steps"
    assert figures["engine_nats_apart_mean"] < 0.05
