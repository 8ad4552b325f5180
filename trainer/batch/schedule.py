"""The learning rate of a step: a function of how many steps were made, so that resume and replay find it again."""

from typing import Literal

from trainer.config import TrainerConfig


def learning_rate_at(config: TrainerConfig, phase: Literal["warmup", "train"], steps_done: int) -> float:
    """The rate of the step that follows `steps_done` steps since the warm-up: held, then falling on a line, then held.

    Steps of the warm-up have a rate of their own.
    """
    if phase == "warmup" and config.warmup is not None:
        return config.warmup.learning_rate
    schedule = config.schedule
    fallen = min(max(steps_done - schedule.hold_steps, 0) / schedule.decay_steps, 1.0)
    return config.learning_rate * ((1.0 - fallen) + fallen * schedule.final)
