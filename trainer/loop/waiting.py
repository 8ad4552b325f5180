"""Waiting for a draw and admitting it: the loop sleeps until the buffer changes, or until a straggler's time is up.

Guarantees: groups dropped at the draw are reported to the master at once, so that it does not wait for them. A group of a lane
with `max_mean_abs_log_ratio` is trained only if mean |log w| over its sampled tokens, under the policy at the draw, lies within
it; a group outside is dropped with a reason, reported and counted, never trained.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np

from schemas import Block, Drawn, topics
from trainer.batch.assemble import PACED, batch_items
from trainer.batch.batch import TrainItem, pack
from trainer.batch.image_inputs import BAD_IMAGE
from trainer.buffer.intake import Intake
from trainer.buffer.pool import Candidate, Draw
from trainer.loop.report import Stopwatch
from trainer.loop.saving import write_checkpoint
from trainer.loop.state import Run
from trainer.loop.step import with_pictures
from trainer.loop.supply import decide

logger = logging.getLogger(__name__)


async def next_draw(run: Run, stop: asyncio.Event) -> Draw | None:
    """The draw of the next step; None when asked to stop, or to forget a user first."""
    with Stopwatch(run.report, "idle_seconds"):
        while not stop.is_set() and not must_forget(run):
            run.report.trains = run.saving.is_running
            if run.supply.intake.paused:
                await while_paused(run, stop)
                continue
            draw = decide(run.supply, run.position, now_s=run.supply.intake.clock())
            if draw.dropped:
                await drop(run, draw)
            if not draw.wait:
                if not await drop_lost(run, draw):
                    run.report.trains = True
                    run.report.set("held_back", draw.held_back)
                    run.report.add("experiences_held_back", draw.held_back)
                    return draw
                continue
            await arrival(run.supply.intake)
    return None


async def while_paused(run: Run, stop: asyncio.Event) -> None:
    """Wait until an operator lets learning go on, or until asked to stop; records that arrive meanwhile are kept."""
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
    """True if the data of a forgotten user is to be dropped now; during the warm-up it waits for its end."""
    return run.position.warmed_up and run.supply.intake.must_forget


async def drop_forgotten(run: Run) -> None:
    """Drop waiting groups that can no longer be decrypted, and write a checkpoint without them."""
    run.supply.intake.forget_at_s = math.inf
    buffer = run.supply.intake.buffer
    held = [candidate for lane in run.config.lanes for candidate in buffer.candidates(lane)]
    lost = await asyncio.to_thread(buffer.lost, held)
    logger.info("forgetting groups=%d", len(lost))
    if lost:
        await drop(run, Draw(dropped=tuple(lost)))
    await run.saving.finished()
    if run.saving.saved_step < run.position.step:
        await write_checkpoint(run, run.position.version)


async def drop_lost(run: Run, draw: Draw) -> bool:
    """Drop experiences that were forgotten since they arrived. True if the draw held one; the caller then draws again."""
    lost = await asyncio.to_thread(run.supply.intake.buffer.lost, draw.taken)
    if lost:
        await drop(run, Draw(dropped=tuple(lost)))
    return bool(lost)


async def drop(run: Run, draw: Draw) -> None:
    """Forget the dropped groups, count them by reason, and tell the master; a group that was replaced since stays."""
    dropped = [each for each in draw.dropped if run.supply.intake.buffer.holds(each[0])]
    for candidate, reason in dropped:
        run.supply.intake.buffer.discard(candidate.offset, candidate.lane)
        run.report.add("dropped", candidate.num_experiences, reason=reason)
    await tell_dropped(run, {candidate.group: reason for candidate, reason in dropped})


async def tell_dropped(run: Run, dropped: dict[str, str]) -> None:
    """Tell the master and the audit which groups will never be trained, and why."""
    drawn = Drawn(
        token=run.lease.token, step=run.position.step + 1, version=run.position.version, groups=(), dropped=dropped
    )
    await run.log.publish(topics.PROGRESS, drawn)


DIVERGED = "diverged"


async def readable(run: Run, draw: Draw) -> Draw:
    """The draw without replaced groups if all of its images are readable; else drop the groups with unreadable images and
    return `wait`: the caller draws again."""
    draw = still_held(run, draw)
    if run.image_inputs is None:
        return draw
    gone = await run.in_thread(run.image_inputs.unreadable, draw.taken, run.supply.intake.buffer.look_at(draw.taken))
    if not gone:
        return still_held(run, draw)
    await drop(run, Draw(dropped=tuple((candidate, BAD_IMAGE) for candidate in gone)))
    return Draw(wait=True)


async def admitted(run: Run, draw: Draw) -> Draw:
    """The draw without unreadable or diverged groups; `wait` where too few are left for a step.

    A newer revision may take an answer's place in the buffer while this waits: then the newer revision is drawn another time.
    """
    draw = await readable(run, draw)
    bounds = {lane: config.max_mean_abs_log_ratio for lane, config in run.config.lanes.items()}
    asked = [candidate for candidate in draw.taken if bounds[candidate.lane] > 0 and candidate.lane != PACED]
    if not asked:
        return draw
    distance = await distances(run, asked)
    draw = still_held(run, draw)
    far = [
        candidate
        for candidate in draw.taken
        if candidate.offset in distance and distance[candidate.offset] > bounds[candidate.lane]
    ]
    if not far:
        return draw
    gone = tuple((candidate, DIVERGED) for candidate in far)
    await drop(run, Draw(dropped=gone))
    return still_held(run, msgspec.structs.replace(draw, dropped=(*draw.dropped, *gone)))


def still_held(run: Run, draw: Draw) -> Draw:
    """The draw without groups that were dropped or replaced since; `wait` where too few are left for a step."""
    taken = tuple(candidate for candidate in draw.taken if run.supply.intake.buffer.holds(candidate))
    wait = draw.wait or not taken or (len(taken) < len(draw.taken) and lacks_lane(run, draw.taken, taken))
    return msgspec.structs.replace(draw, taken=taken, wait=wait)


def lacks_lane(run: Run, drawn: Sequence[Candidate], left: Sequence[Candidate]) -> bool:
    """True if a step needs more than is left of the paced lane, or, without groups of it, of another lane."""
    lanes = {candidate.lane for candidate in drawn}
    for lane in {PACED} if PACED in lanes else lanes:
        least = 1 if lane == PACED or run.supply.intake.draining else run.config.min_sequences(lane)
        if sum(candidate.num_experiences for candidate in left if candidate.lane == lane) < least:
            return True
    return False


async def distances(run: Run, candidates: list[Candidate]) -> dict[int, float]:
    """Offset to mean |log w| over the group's tokens that have a ratio; 0 where none has."""
    blocks = run.supply.intake.buffer.look_at(candidates)
    items = [
        TrainItem(experience=block.experiences[item.index], item=item)
        for candidate, block in zip(candidates, blocks, strict=True)
        for item in batch_items(candidate, block)
    ]
    packed = pack(
        await with_pictures(run, items),
        max_tokens=run.config.max_tokens_per_microbatch,
        version=run.position.version,
        exact=False,
    )
    sums = await run.in_thread(run.learner.log_distances, packed)
    owner = np.repeat(np.arange(len(blocks)), [len(block.experiences) for block in blocks])
    totals = np.bincount(owner, weights=sums, minlength=len(blocks))
    return {
        candidate.offset: float(total) / max(1, num_ratio_tokens(block))
        for candidate, block, total in zip(candidates, blocks, totals, strict=True)
    }


def num_ratio_tokens(block: Block) -> int:
    """Sampled tokens of a group whose recorded logprob is the policy's own."""
    return sum(span.stop - span.start for experience in block.experiences for span in experience.spans if span.ratio)
