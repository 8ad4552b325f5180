"""A critic as tests of learners configure it, and what it learns from."""

import numpy as np
from trainer_samples import make_item, random_items

from schemas import Span
from trainer.batch.batch import TrainItem
from trainer.config import CriticConfig, LaneConfig, TrainerConfig

CRITIC = TrainerConfig(
    lanes={
        "usual": LaneConfig(loss="ppo", weight=0.9, options={"minibatches": 2}),
        "expert": LaneConfig(loss="sft", weight=0.1),
    },
    threads=1,
    critic=CriticConfig(learning_rate=1e-4),
)


def rewarded(seed: int, reward: float | None = None) -> list[TrainItem]:
    """Prompts that decide the reward, and demonstrations, which have no value. reward: of one answer, instead."""
    random = np.random.default_rng(seed)
    items = [
        make_item(
            [1, 10 + i % 2, *random.integers(20, 30, 2 + i % 3)],
            [Span(2, 4 + i % 3, 0)],
            group=f"coin-{i}.0",
            logprobs=np.full(2 + i % 3, -4.8),
            reward=1.0 - i % 2 if reward is None or i != 7 else reward,
        )
        for i in range(14)
    ]
    return [*items, *(item for item in random_items(seed) if item.item.lane == "expert")]
