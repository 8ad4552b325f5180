"""Turns drawn groups into the input of a step: age bound, journal record, batch chain, packing.

Pure: the same draw gives the same batch; the record and the log give the same items again.

Guarantees: a token sampled by a version below the bound is context, not a target; later tokens are trained. The journal record
has the batch chain's decisions (advantage, weight, drop and reason), so a resume or a replay does not run the chain again. The
chain can change nothing else of an experience. A pair is dropped as a whole. Experiences of optional lanes never make a step
alone.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from infra.chain.chain import Context, Step, run_chain
from infra.chain.insert import ProcessorConfig, with_processors
from infra.settings.config import Pacing
from schemas import Batch, BatchItem, Block, Experience
from schemas.errors import BadFrame
from schemas.experience import pair_side
from schemas.fields import Lane
from schemas.wire.teacher import teacher_logprobs, with_teacher_logprobs
from trainer.batch.batch import PackedBatch, TrainItem, pack
from trainer.buffer.buffer import Stored
from trainer.buffer.pool import Candidate
from trainer.config import TrainerConfig
from trainer.processors import without_weight

logger = logging.getLogger(__name__)

PACED: Lane = "usual"
STALE = "stale"


def masked_below(version: int, max_staleness: int) -> int:
    """Tokens of versions below it are too old for a step at `version`; -1 while none can be."""
    return max(-1, version - max_staleness)


def num_old(experience: Experience, below: int) -> int:
    """Sampled tokens of versions under `below`."""
    return sum(span.stop - span.start for span in experience.spans if span.version < below)


def without_old(experience: Experience, below: int) -> Experience:
    """The experience in which tokens sampled by versions under `below` are context: given, and not sampled."""
    kept = tuple(span for span in experience.spans if span.version >= below)
    is_kept_N = np.concatenate([np.full(span.stop - span.start, span.version >= below) for span in experience.spans])
    teacher = teacher_logprobs(experience)
    made = experience.with_bulk(spans=kept, logprobs=experience.logprobs[is_kept_N])
    return made if teacher is None else with_teacher_logprobs(made, teacher[is_kept_N])


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a batch besides its items; see `Batch`.

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
    """Return the seed of a step's random draws, the same for a resume or a replay."""
    return (seed * 1_000_003 + step) % 2**63


def batch_items(candidate: Candidate, block: Block) -> list[BatchItem]:
    """One group as the journal lists it."""
    return [
        BatchItem(
            id=experience.id,
            partition=0,
            offset=candidate.offset,
            index=index,
            lane=candidate.lane,
            revision=candidate.revision,
            use=candidate.uses,
            min_version=experience.min_version,
            advantage=experience.advantage or 0.0,
            weight=candidate.weight,
        )
        for index, experience in enumerate(block.experiences)
    ]


def assemble(
    stamp: Stamp, drawn: Sequence[tuple[Candidate, Block]], dropped: Sequence[tuple[Candidate, str]] = ()
) -> tuple[Batch, list[TrainItem]]:
    """Return the journal record of a step, and the items to pack."""
    below, masked = stamp.masked_below, 0
    items: list[BatchItem] = []
    old: list[BatchItem] = []
    for candidate, block in drawn:
        for item in batch_items(candidate, block):
            experience = block.experiences[item.index]
            num = num_old(experience, below) if item.lane == PACED else 0
            if num and num == experience.num_sampled:
                old.append(item)
                continue
            masked += num
            young = min((span.version for span in experience.spans if span.version >= below), default=item.min_version)
            items.append(msgspec.structs.replace(item, min_version=young) if num else item)
    drops: dict[str, int] = {STALE: len(old)} if old else {}
    for candidate, reason in dropped:
        drops[reason] = drops.get(reason, 0) + candidate.num_experiences
    digests = {candidate.offset: candidate.digest for candidate, _ in drawn}
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
        blocks=tuple(digests[offset] for offset in dict.fromkeys(item.offset for item in (*items, *old))),
        dropped_because=(STALE,) * len(old),
        masked_below=below if masked else -1,
        masked=masked,
    )
    blocks = {candidate.offset: block for candidate, block in drawn}
    return batch, train_items(batch, blocks)


def journaled_items(batch: Batch, found: Mapping[int, Stored]) -> list[TrainItem]:
    """The items of a journaled batch, in order. Raises BadFrame naming the step and offset of a block that was altered."""
    check_blocks(batch, {offset: item.digest for offset, item in found.items()})
    return train_items(batch, {offset: item.block for offset, item in found.items()})


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
                f"step {batch.step}: buffer offset {offset} holds another record than the journal names "
                f"(got {digests[offset].hex()}, expected {expected.hex()}): it was altered since"
            )


def step_inputs(
    config: TrainerConfig, pacing: Pacing, batch: Batch, items: Sequence[TrainItem], steps_done: int
) -> tuple[PackedBatch, float]:
    """The packed items and the learning rate. steps_done: since the warm-up, below 0 within it."""
    packed = pack(
        items,
        max_tokens=config.max_tokens_per_microbatch,
        version=batch.version,
        exact=steps_done % pacing.steps_per_version == 0,
        bootstrap=config.critic is not None and config.critic.truncated == "bootstrap",
    )
    return packed, learning_rate_at(config, batch.phase, steps_done)


def learning_rate_at(config: TrainerConfig, phase: Literal["warmup", "train"], steps_done: int) -> float:
    """The rate of the step that follows `steps_done` steps since the warm-up: held, then falling on a line, then held.

    Steps of the warm-up have a rate of their own.
    """
    if phase == "warmup" and config.warmup is not None:
        return config.warmup.learning_rate
    schedule = config.schedule
    fallen = min(max(steps_done - schedule.hold_steps, 0) / schedule.decay_steps, 1.0)
    return config.learning_rate * ((1.0 - fallen) + fallen * schedule.final)


Key = tuple[str, int]  # id and revision
LOGGED = ("num_tokens", "spans", "end", "lane", "reward", "bulk")  # fields that the batch chain must not change
ALONE = "nothing of the paced lane left in the batch"


def build_batch(processors: Sequence[ProcessorConfig]) -> tuple[Step, ...]:
    """The chain that [[processor]] tables of stage batch make; raises ConfigError. It has no built-ins that run unasked."""
    return with_processors((), processors, "batch", 0, set())


async def apply_chain(
    steps: Sequence[Step], batch: Batch, items: Sequence[TrainItem], *, alone: bool = True
) -> tuple[Batch, list[TrainItem]]:
    """Return the batch after the batch chain. alone: True if other lanes may be trained without the paced lane."""
    if not steps:
        return batch, list(items)
    given = [without_weight(item.experience) for item in items]
    outcome = await run_chain(steps, given, Context())
    for gone in outcome.dropped[:1]:
        logger.info("batch chain dropped step=%d first=%s reason=%s", batch.step, gone.experience.id, gone.reason)
    reasons = {_key(gone.experience): gone.reason for gone in outcome.dropped}
    after = {_key(experience): experience for experience in outcome.kept}
    changed = [
        _settled(item, before, after.get(_key(before)), reasons) for item, before in zip(items, given, strict=True)
    ]
    return _journaled(batch, _whole_pairs(changed), alone)


Settled = tuple[TrainItem, str]  # an item after the chain, and why it is dropped


def _settled(item: TrainItem, before: Experience, after: Experience | None, reasons: dict[Key, str]) -> Settled:
    if after is None:
        return item, reasons.get(_key(before), "replaced")
    if any(getattr(before, name) != getattr(after, name) for name in LOGGED if name != "bulk") or (
        before.bulk is not after.bulk
    ):
        return item, "changed beyond advantage and weight"
    changed = msgspec.structs.replace(
        item.item, advantage=after.advantage or 0.0, weight=item.item.weight * after.weight
    )
    return TrainItem(experience=item.experience, item=changed), ""


def _whole_pairs(changed: list[Settled]) -> list[Settled]:
    broken = {item.experience.group for item, reason in changed if reason and pair_side(item.experience)}
    return [
        (item, reason or "half a pair")
        if pair_side(item.experience) and item.experience.group in broken
        else (item, reason)
        for item, reason in changed
    ]


def _journaled(batch: Batch, changed: list[Settled], alone: bool) -> tuple[Batch, list[TrainItem]]:
    had_paced = any(item.item.lane == PACED for item, _ in changed)
    has_paced = any(item.item.lane == PACED for item, reason in changed if not reason)
    if had_paced and not has_paced and not alone:
        changed = [(item, reason or ALONE) for item, reason in changed]
    kept = [item for item, reason in changed if not reason]
    drops = dict(batch.drops)
    dropped: list[BatchItem] = list(batch.dropped)
    because: list[str] = list(batch.dropped_because)
    for item, reason in changed:
        if reason:
            drops[reason] = drops.get(reason, 0) + 1
            dropped.append(item.item)
            because.append(reason)
    before = dict.fromkeys(item.offset for item in (*batch.items, *batch.dropped))
    digests = dict(zip(before, batch.blocks, strict=bool(batch.blocks)))
    named = dict.fromkeys(item.offset for item in (*(item.item for item in kept), *dropped))
    record = msgspec.structs.replace(
        batch,
        blocks=tuple(digests[offset] for offset in named if offset in digests),
        items=tuple(item.item for item in kept),
        drops=drops,
        dropped=tuple(dropped),
        dropped_because=tuple(because),
    )
    return record, kept


def _key(experience: Experience) -> Key:
    return experience.id, experience.revision
