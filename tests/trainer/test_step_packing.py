"""Packing runs beside the event loop."""

import asyncio

import numpy as np
from memory_run import CONFIG, FLOOR
from trainer_samples import make_item

from infra.observe.metrics import Metrics
from schemas import Batch, Span
from trainer.batch.batch import PackedBatch
from trainer.journal.checkpoint import Position
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.report import TrainerReport
from trainer.loop.state import Learning
from trainer.loop.step import execute


class Clocked(ScriptedLearner):
    """A learner that notes how often the loop ran before its step began."""

    ticks = 0
    before_step = 0

    def step(self, batch: PackedBatch, **settings: object) -> StepStats:
        self.before_step = self.ticks
        return super().step(batch, **settings)  # type: ignore[arg-type]


def test_the_event_loop_runs_while_a_batch_is_packed():
    asyncio.run(pack_and_step())


async def pack_and_step() -> None:
    random = np.random.default_rng(0)
    items = [
        make_item(random.integers(1, 1000, 4096).tolist(), [Span(8, 4096, 0)], group=f"t-{group}.0", episode=episode)
        for group in range(8)
        for episode in range(8)
    ]
    learner = Clocked()
    run = Learning(
        floor=FLOOR, config=CONFIG, learner=learner, report=TrainerReport(Metrics("packing")), position=Position()
    )

    async def tick() -> None:
        while True:
            await asyncio.sleep(0)
            learner.ticks += 1

    ticking = asyncio.create_task(tick())
    batch = Batch(
        run="t",
        token=1,
        step=1,
        version=0,
        items=tuple(one.item for one in items),
        phase="train",
        seed=1,
        config_hash="",
    )
    await execute(run, batch, items)
    ticking.cancel()
    assert learner.before_step > 20, "the loop stood still until everything was packed"
