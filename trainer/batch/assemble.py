"""From drawn groups to one step's batch: the journal record, and the experiences in its order.

Pure: the same draw gives the same batch; the record alone, with the log, gives the same items again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from schemas import Batch, BatchItem, Block
from schemas.errors import BadFrame
from trainer.batch.age import PACED, STALE, num_old, without_old
from trainer.batch.batch import TrainItem
from trainer.buffer.blocks import Stored
from trainer.buffer.draw import Candidate


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch says of itself besides its items. See `Batch` for all fields.

    run: whose journal it is. token: of the lease. step: from 0. version: policy version before the step. phase: of the run.
    seed: of everything random in the step. config_hash: of the settings that shape the step. masked_below: as in `Batch`, even
    where no token is masked.
    """

    run: str
    token: int
    step: int
    version: int
    phase: Literal["warmup", "train"]
    seed: int
    config_hash: str
    masked_below: int = -1


def step_seed(seed: int, step: int) -> int:
    """The seed of everything random in one step: a resume or a replay draws the same numbers."""
    return (seed * 1_000_003 + step) % 2**63


def batch_items(one: Candidate, block: Block) -> list[BatchItem]:
    """One group as the journal lists it."""
    return [
        BatchItem(
            id=experience.id,
            partition=0,
            offset=one.offset,
            index=index,
            lane=one.lane,
            revision=one.revision,
            use=one.uses,
            min_version=experience.min_version,
            advantage=experience.advantage or 0.0,
            weight=one.weight,
        )
        for index, experience in enumerate(block.experiences)
    ]


def assemble(
    stamp: Stamp, drawn: Sequence[tuple[Candidate, Block]], dropped: Sequence[tuple[Candidate, str]] = ()
) -> tuple[Batch, list[TrainItem]]:
    """The journal record of a step, and what the learner packs."""
    below, masked = stamp.masked_below, 0
    items: list[BatchItem] = []
    old: list[BatchItem] = []
    for one, block in drawn:
        for item in batch_items(one, block):
            experience = block.experiences[item.index]
            num = num_old(experience, below) if item.lane == PACED else 0
            if num and num == experience.num_sampled:
                old.append(item)
                continue
            masked += num
            young = min((span.version for span in experience.spans if span.version >= below), default=item.min_version)
            items.append(msgspec.structs.replace(item, min_version=young) if num else item)
    drops: dict[str, int] = {STALE: len(old)} if old else {}
    for one, reason in dropped:
        drops[reason] = drops.get(reason, 0) + one.num_experiences
    batch = Batch(
        run=stamp.run,
        token=stamp.token,
        step=stamp.step,
        version=stamp.version,
        items=tuple(items),
        phase=stamp.phase,
        drops=drops,
        dropped=tuple(old),
        seed=stamp.seed,
        config_hash=stamp.config_hash,
        blocks=digests_of((*items, *old), {one.offset: one.digest for one, _ in drawn}),
        dropped_because=(STALE,) * len(old),
        masked_below=below if masked else -1,
        masked=masked,
    )
    blocks = {one.offset: block for one, block in drawn}
    return batch, train_items(batch, blocks)


def digests_of(items: Iterable[BatchItem], digests: Mapping[int, bytes]) -> tuple[bytes, ...]:
    """Of the items' blocks, in the order in which they are first named. digests: by offset, as far as known."""
    return tuple(digests[offset] for offset in dict.fromkeys(item.offset for item in items) if offset in digests)


def items_of(batch: Batch, found: Mapping[int, Stored]) -> list[TrainItem]:
    """What a journaled batch trained on, in order. Raises BadFrame naming the step and offset of what is not as it was."""
    check_blocks(batch, {offset: one.digest for offset, one in found.items()})
    return train_items(batch, {offset: one.block for offset, one in found.items()})


def train_items(batch: Batch, blocks: Mapping[int, Block]) -> list[TrainItem]:
    """The journaled items with their experiences, in order; BadFrame if the log holds something else there."""
    items = []
    for item in batch.items:
        block = blocks.get(item.offset)
        if block is None or item.index >= len(block.experiences) or block.experiences[item.index].id != item.id:
            raise BadFrame(
                f"step {batch.step}: the journal names {item.id} at buffer offset {item.offset}, index {item.index}; "
                "the log holds something else there"
            )
        experience = block.experiences[item.index]
        if item.lane == PACED and num_old(experience, batch.masked_below) and not experience.lost:
            experience = without_old(experience, batch.masked_below)
        items.append(TrainItem(experience=experience, item=item))
    return items


def check_blocks(batch: Batch, digests: Mapping[int, bytes]) -> None:
    """Raise BadFrame naming the first block that is not the record the batch was journaled with. digests: by offset."""
    offsets = dict.fromkeys(item.offset for item in (*batch.items, *batch.dropped))
    for offset, expected in zip(offsets, batch.blocks, strict=False):
        if expected and digests[offset] != expected:
            raise BadFrame(
                f"step {batch.step}: buffer offset {offset} holds another record than the one that was journaled "
                f"(got {digests[offset].hex()}, expected {expected.hex()}): it was altered since"
            )
