"""Waiting for a draw: the loop sleeps until the buffer changes, or until a straggler's time is up.

Guarantee: groups dropped at the draw are reported to the master at once, so that it does not wait for them.
"""

import asyncio
import logging
import math
from contextlib import suppress

from schemas import Drawn, topics
from trainer.buffer.draw import Draw
from trainer.buffer.intake import Intake
from trainer.loop.report import Stopwatch
from trainer.loop.saving import write_checkpoint
from trainer.loop.state import Run
from trainer.loop.supply import decide

logger = logging.getLogger(__name__)


async def next_draw(run: Run, stop: asyncio.Event) -> Draw | None:
    """What the next step trains on; None when asked to stop, or to forget a user first."""
    with Stopwatch(run.report, "idle_seconds"):
        while not stop.is_set() and not must_forget(run):
            if run.supply.intake.paused:
                await while_paused(run, stop)
                continue
            draw = decide(run.supply, run.position, now_s=run.supply.intake.clock())
            if draw.dropped:
                await drop(run, draw)
            if not draw.wait:
                if not await drop_lost(run, draw):
                    run.report.set("held_back", draw.held_back)
                    run.report.add("experiences_held_back", draw.held_back)
                    return draw
                continue
            await arrival(run.supply.intake)
    return None


async def while_paused(run: Run, stop: asyncio.Event) -> None:
    """Wait until an operator lets learning go on, or until asked to stop; what arrives meanwhile is kept."""
    state, run.report.state = run.report.state, "paused"
    logger.info("paused step=%d", run.position.step)
    while run.supply.intake.paused and not stop.is_set() and not must_forget(run):
        await arrival(run.supply.intake)
    run.report.state = state


async def arrival(intake: Intake, limit_s: float = 0.25) -> None:
    """Wait until something has arrived since the last call, or `limit_s`."""
    with suppress(TimeoutError):
        await asyncio.wait_for(intake.changed.wait(), limit_s)
    intake.changed.clear()


def must_forget(run: Run) -> bool:
    """Whether the data of a forgotten user is to be dropped now; during the warm-up it waits for its end."""
    return run.position.warmed_up and run.supply.intake.must_forget


async def let_go(run: Run) -> None:
    """Drop all that waits here and can no longer be opened, and make a checkpoint that knows nothing of it."""
    run.supply.intake.forget_at_s = math.inf
    buffer = run.supply.intake.buffer
    held = [one for lane in run.config.lanes for one in buffer.candidates(lane)]
    lost = await asyncio.to_thread(buffer.lost, held)
    logger.info("forgetting groups=%d", len(lost))
    if lost:
        await drop(run, Draw(dropped=tuple(lost)))
    await run.saving.finished()
    if run.saving.saved_step < run.position.step:
        await write_checkpoint(run, run.position.version)


async def drop_lost(run: Run, draw: Draw) -> bool:
    """Drop what was forgotten since it arrived; True where it was in the draw, which then has to be made anew."""
    lost = await asyncio.to_thread(run.supply.intake.buffer.lost, draw.taken)
    if lost:
        await drop(run, Draw(dropped=tuple(lost)))
    return bool(lost)


async def drop(run: Run, draw: Draw) -> None:
    """Forget the dropped groups, count them by reason, and tell the master."""
    for one, reason in draw.dropped:
        run.supply.intake.buffer.discard(one.offset, one.lane)
        run.report.add("dropped", one.num_experiences, reason=reason)
    await tell_dropped(run, {one.group: reason for one, reason in draw.dropped})


async def tell_dropped(run: Run, dropped: dict[str, str]) -> None:
    """Tell the master and the audit which groups will never be trained, and why."""
    drawn = Drawn(
        token=run.lease.token,
        step=run.position.step + 1,
        version=run.position.version,
        groups=(),
        dropped=dropped,
    )
    await run.log.publish(topics.PROGRESS, drawn)
