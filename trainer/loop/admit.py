"""Admission by divergence: a lane without a version limit takes what the policy could still have said, however old.

Guarantee: a group of a lane with a `bound` is trained only if mean |log w| over its sampled tokens, under the policy as it
is at the draw, lies within it; one that does not is dropped with a reason, reported and counted, never trained.
"""

import msgspec
import numpy as np

from schemas import Block
from trainer.batch.assemble import batch_items
from trainer.batch.batch import TrainItem, pack
from trainer.batch.batch_chain import PACED
from trainer.batch.image_inputs import BAD_IMAGE
from trainer.buffer.draw import Candidate, Draw
from trainer.loop.state import Run
from trainer.loop.step import with_pictures
from trainer.loop.waiting import drop

DIVERGED = "diverged"


async def readable(run: Run, draw: Draw) -> Draw:
    """The draw, where all of its images can be shown; else `wait`: groups that cannot be are dropped, and it is drawn
    again."""
    if run.image_inputs is None:
        return draw
    gone = await run.in_thread(run.image_inputs.unreadable, draw.taken, run.supply.intake.buffer.look_at(draw.taken))
    if not gone:
        return draw
    await drop(run, Draw(dropped=tuple((one, BAD_IMAGE) for one in gone)))
    return Draw(wait=True)


async def admitted(run: Run, draw: Draw) -> Draw:
    """The draw without what cannot be shown or has diverged; `wait` where nothing, or nothing of the paced lane, is left.

    A newer revision may take an answer's place in the buffer while this waits: then the newer one is drawn another time.
    """
    draw = still_held(run, await readable(run, still_held(run, draw)))
    bounds = {lane: config.max_mean_abs_log_ratio for lane, config in run.config.lanes.items()}
    asked = [one for one in draw.taken if bounds[one.lane] > 0 and one.lane != PACED]
    if not asked:
        return draw
    distance = await distances(run, asked)
    draw = still_held(run, draw)
    far = [one for one in draw.taken if one.offset in distance and distance[one.offset] > bounds[one.lane]]
    if not far:
        return draw
    gone = tuple((one, DIVERGED) for one in far)
    taken = tuple(one for one in draw.taken if one not in far)
    await drop(run, Draw(dropped=gone))
    return still_held(run, Draw(taken=taken, dropped=(*draw.dropped, *gone)))


def still_held(run: Run, draw: Draw) -> Draw:
    """The draw without what a newer revision has replaced since; `wait` where nothing is left to train on."""
    taken = tuple(one for one in draw.taken if run.supply.intake.buffer.holds(one))
    return msgspec.structs.replace(draw, taken=taken, wait=draw.wait or not taken)


async def distances(run: Run, candidates: list[Candidate]) -> dict[int, float]:
    """Offset to mean |log w| over the group's tokens that have a ratio; 0 where none has."""
    blocks = run.supply.intake.buffer.look_at(candidates)
    items = [
        TrainItem(experience=block.experiences[item.index], item=item)
        for one, block in zip(candidates, blocks, strict=True)
        for item in batch_items(one, block)
    ]
    packed = pack(
        await with_pictures(run, items),
        max_tokens=run.config.max_tokens_per_microbatch,
        version=run.position.version,
        exact=False,
        replay=run.config.routing == "replay",
    )
    sums = await run.in_thread(run.learner.log_distances, packed)
    owner = np.repeat(np.arange(len(blocks)), [len(block.experiences) for block in blocks])
    totals = np.bincount(owner, weights=sums, minlength=len(blocks))
    return {
        one.offset: float(total) / max(1, num_ratio_tokens(block))
        for one, block, total in zip(candidates, blocks, totals, strict=True)
    }


def num_ratio_tokens(block: Block) -> int:
    """Sampled tokens of a group whose recorded logprob is the policy's own."""
    return sum(span.stop - span.start for one in block.experiences for span in one.spans if span.ratio)
