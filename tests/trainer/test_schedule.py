"""The learning rate over the steps of a run."""

import pytest

from trainer.batch.assemble import learning_rate_at
from trainer.config import Schedule, TrainerConfig, WarmupConfig

FALLING = TrainerConfig(
    learning_rate=2.0,
    schedule=Schedule(hold_steps=10, decay_steps=20, final=0.1),
    warmup=WarmupConfig(learning_rate=5.0),
)


@pytest.mark.parametrize(
    ("steps_done", "rate"),
    # 20 is half way down: 2 * (0.5 + 0.5 * 0.1)
    [(0, 2.0), (10, 2.0), (20, 1.1), (30, 0.2), (1000, 0.2)],
)
def test_the_rate_is_held_then_falls_on_a_line_then_is_held(steps_done: int, rate: float) -> None:
    assert learning_rate_at(FALLING, "train", steps_done) == pytest.approx(rate)


def test_without_a_schedule_the_rate_is_exactly_the_configured_one() -> None:
    config = TrainerConfig(learning_rate=3e-7)
    assert {learning_rate_at(config, "train", done) for done in (0, 1, 99, 10**6)} == {3e-7}


def test_warm_up_steps_have_their_own_rate() -> None:
    assert learning_rate_at(FALLING, "warmup", -12) == 5.0
