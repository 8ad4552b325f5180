"""What the learner is given for a journaled batch: a function of the batch, its experiences and the settings alone."""

from collections.abc import Sequence
from typing import Literal

from infra.settings.config import Pacing
from schemas import Batch
from trainer.batch.batch import PackedBatch, TrainItem, pack
from trainer.config import TrainerConfig


def step_inputs(
    config: TrainerConfig, pacing: Pacing, batch: Batch, items: Sequence[TrainItem], steps_done: int
) -> tuple[PackedBatch, float]:
    """The packed items and the learning rate. steps_done: since the warm-up, below 0 within it."""
    packed = pack(
        items,
        max_tokens=config.max_tokens_per_microbatch,
        version=batch.version,
        exact=steps_done % pacing.steps_per_version == 0,
        bootstrap=config.critic is not None and config.critic.truncated == "bootstrap",
        replay=config.routing == "replay",
    )
    return packed, learning_rate_at(config, batch.phase, steps_done)


def learning_rate_at(config: TrainerConfig, phase: Literal["warmup", "train"], steps_done: int) -> float:
    """The rate of the step that follows `steps_done` steps since the warm-up: held, then falling on a line, then held.

    Steps of the warm-up have a rate of their own.
    """
    if phase == "warmup" and config.warmup is not None:
        return config.warmup.learning_rate
    schedule = config.schedule
    fallen = min(max(steps_done - schedule.hold_steps, 0) / schedule.decay_steps, 1.0)
    return config.learning_rate * ((1.0 - fallen) + fallen * schedule.final)
