"""The supervised warm-up: steps on demonstrations until a validation set says enough.

It is journaled like any step, publishes nothing on the way, and ends as one new version.
"""

import asyncio
import logging

from schemas import BatchItem, Block
from trainer.batch.assemble import step_seed
from trainer.batch.batch import TrainItem, pack
from trainer.buffer.draw import draw_least_used
from trainer.buffer.pool import Draw
from trainer.config import WarmupConfig
from trainer.health import unhealthy
from trainer.learners.learner import take_weights
from trainer.loop.saving import write_checkpoint
from trainer.loop.state import Run
from trainer.loop.step import execute, journal_draw, publish_now, settle_verdict, with_pictures
from trainer.loop.supply import split_fit
from trainer.loop.waiting import arrival, drop, drop_lost, readable, while_paused

logger = logging.getLogger(__name__)


async def warm_up(run: Run, stop: asyncio.Event) -> None:
    """Run the warm-up to its end, from the step where the journal left it."""
    warmup = run.config.warmup
    if warmup is not None:
        run.report.state = "waiting for demonstrations"
        buffer = run.supply.intake.buffer
        # Those heard count: after a restart some may be used up already.
        while not stop.is_set() and buffer.num_heard(warmup.lane) < warmup.min_experiences:
            await arrival(run.supply.intake)
        run.report.state = "supervised warm-up"
        while not stop.is_set() and not await warm_enough(run, warmup):
            if run.supply.intake.paused:
                await while_paused(run, stop)
                continue
            step = run.position.step + 1
            usable, unusable = split_fit(run.supply.objectives[warmup.lane], buffer.pool(warmup.lane))
            if unusable:
                await drop(run, Draw(dropped=tuple(unusable)))
            draw = draw_least_used(
                usable,
                num_experiences=warmup.batch,
                max_uses=run.config.lanes[warmup.lane].max_uses,
                seed=step_seed(run.supply.seed, step),
            )
            if draw.wait:
                logger.warning("warm-up ended step=%d: no demonstration is left to train", step)
                break
            if await drop_lost(run, draw):
                continue
            draw = await readable(run, draw)
            if draw.wait:
                continue
            batch, items = await journal_draw(run, draw, phase="warmup")
            await settle_verdict(run, batch, await execute(run, batch, items))
    if not stop.is_set():
        await finish_warm_up(run)


async def finish_warm_up(run: Run) -> None:
    """Fresh optimizer, checkpoint, and the version that explorers start from. Raises RuntimeError for unhealthy weights,
    before a checkpoint keeps them.
    """
    version = run.position.version + (run.config.warmup is not None)
    await run.begin_training()
    run.report.state = "learning"
    weights = await run.in_thread(take_weights, run.learner)
    if reason := unhealthy(await run.in_thread(lambda: weights.not_finite), None, None, run.config.guard):
        raise RuntimeError(
            f"the warm-up ended at step {run.position.step} with weights that cannot be published: {reason}; "
            "expected finite ones: lower trainer.warmup.learning_rate and begin another run"
        )
    await write_checkpoint(run, version)
    if version > run.position.version:
        await publish_now(run, version, weights)


async def warm_enough(run: Run, warmup: WarmupConfig) -> bool:
    """True if the warm-up is over after the steps done so far: the same answer for the same weights and log."""
    done = run.position.step + 1
    if done >= warmup.max_steps:
        return True
    if done < max(1, warmup.min_steps) or done % warmup.every:
        return False
    items = validation_items(run.supply.intake.buffer.validation())
    if not items:
        return False
    packed = pack(await with_pictures(run, items), max_tokens=run.config.max_tokens_per_microbatch)
    accuracy = await run.in_thread(run.learner.greedy_accuracy, packed)
    run.report.set("validation_accuracy", accuracy)
    return accuracy >= warmup.stop_at


def validation_items(blocks: list[Block]) -> list[TrainItem]:
    """Demonstrations kept for validation, ready to be packed."""
    return [
        TrainItem(
            experience=experience,
            item=BatchItem(id=experience.id, partition=0, offset=-1, index=index, lane=experience.lane, min_version=-1),
        )
        for block in blocks
        for index, experience in enumerate(block.experiences)
    ]
