"""Accuracy that each loss loses on old samples: the demo's additions, every batch a fixed number of versions old.

All runs of a seed start from the same weights, after the same supervised warm-up. Held-out accuracy is greedy, the mean of the
last five evaluations.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from actors.engines.torch import TorchEngine
from infra.cli.demo.char_model import Size, build_char_model
from tests.bench._additions import Deck, demonstrations, packed, policy_of, problems, sample
from tests.bench.report import Row
from trainer.batch.batch import TrainItem
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.torch import TorchLearner

TARGETS = {"dppo": 3.0, "decoupled": 3.0}  # points lost at lag 8
EVERY, SETTLED = 10, 5  # steps between looks, looks of the mean
RATE = 1e-4


def run(
    losses: str = "dppo,decoupled,grpo,reinforce",
    lags: str = "0,8",
    seeds: int = 3,
    steps: int = 120,
    groups: int = 32,
    size: int = 8,
    warm_steps: int = 300,
) -> Iterator[Row]:
    """losses, lags: By commas; lags begin with 0. steps: After the warm-up. groups, size: Of one step."""
    torch.set_num_threads(1)
    at = [int(lag) for lag in lags.split(",")]
    finals: dict[tuple[str, int], list[float]] = {}
    with TemporaryDirectory() as name:
        for seed in range(seeds):
            folder = build_char_model(Path(name) / str(seed), seed, size=Size(hidden=128, layers=2))
            practice, held_out = problems(folder, seed)
            state = warmed(folder, practice[:2000], seed, warm_steps)
            for loss in losses.split(","):
                for lag in at:
                    learner = opened(folder, loss)
                    learner.restore(state)
                    looks = asyncio.run(reinforced(learner, folder, practice, held_out, lag, seed, steps, groups, size))
                    finals.setdefault((loss, lag), []).append(100 * statistics.fmean(looks[-SETTLED:]))
    means = {key: statistics.fmean(shares) for key, shares in finals.items()}
    for (loss, lag), mean in means.items():
        yield Row(f"{loss}, held-out accuracy at lag {lag}", mean, "%")
        if lag and (loss, 0) in means:
            high = TARGETS.get(loss) if lag == 8 else None
            yield Row(f"{loss}, points lost at lag {lag}", means[loss, 0] - mean, "points", high=high)


def opened(folder: Path, loss: str) -> TorchLearner:
    lanes: Any = {"usual": LaneConfig(loss=loss), "expert": LaneConfig(loss="sft")}
    config = TrainerConfig(lanes=lanes, threads=1, learning_rate=RATE, betas=(0.9, 0.98))
    return TorchLearner(str(folder), config, device="cpu")


def warmed(folder: Path, shown: list[Any], seed: int, steps: int) -> Any:
    """The state after a supervised warm-up."""
    learner, deck = opened(folder, "dppo"), Deck(shown, seed)
    learner.begin_phase("warmup")
    for step in range(steps):
        learner.step(demonstrations(deck.deal(128)), learning_rate=2e-3, seed=step)
    learner.begin_phase("train")
    return learner.save()


async def reinforced(
    learner: TorchLearner,
    folder: Path,
    practice: Any,
    held_out: Any,
    lag: int,
    seed: int,
    steps: int,
    groups: int,
    size: int,
) -> list[float]:
    """Held-out shares over the steps, on batches `lag` versions old."""
    engine, deck = TorchEngine(model=str(folder), seed=seed, threads=1), Deck(practice, seed)
    waiting: deque[list[TrainItem]] = deque()
    looks = [learner.greedy_accuracy(demonstrations(held_out))]
    await engine.start()
    try:
        await engine.load(policy_of(learner, 0))
        for step in range(steps):
            while len(waiting) <= lag:
                waiting.append(await sample(engine, deck.deal(groups), size, step))
            if items := waiting.popleft():  # none where no group differed in its rewards
                await asyncio.to_thread(learner.step, packed(items, version=step), learning_rate=RATE, seed=step)
            await engine.load(policy_of(learner, step + 1))
            if (step + 1) % EVERY == 0:
                looks.append(learner.greedy_accuracy(demonstrations(held_out)))
    finally:
        await engine.close()
    return looks
