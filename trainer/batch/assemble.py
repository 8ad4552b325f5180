"""From drawn groups to one step's batch: the journal record, and the experiences in its order.

Pure: the same draw gives the same batch; the record alone, with the log, gives the same items again.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from schemas import Batch, BatchItem, Block
from schemas.errors import BadFrame
from trainer.batch.batch import TrainItem
from trainer.buffer.blocks import Stored
from trainer.buffer.draw import Candidate


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch says of itself besides its items."""

    run: str
    token: int
    step: int
    version: int
    phase: Literal["warmup", "train"]
    seed: int
    config_hash: str


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
    items = [item for one, block in drawn for item in batch_items(one, block)]
    drops: dict[str, int] = {}
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
        seed=stamp.seed,
        config_hash=stamp.config_hash,
        blocks=tuple(one.digest for one, _ in drawn),
    )
    blocks = {one.offset: block for one, block in drawn}
    return batch, train_items(batch, blocks)


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
        items.append(TrainItem(experience=block.experiences[item.index], item=item))
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
