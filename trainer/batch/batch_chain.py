"""The batch chain: processors that see all a step would train on, between the draw and the journal.

Guarantees: what they decide (advantage, weight, drop and why) is in the journal record, so a resume or a replay repeats
it without running them; nothing else of an experience can be changed here, since only the log's own is trained; a pair
goes whole; a step never trains on what only rides along with the paced lane.
"""

import logging
from collections.abc import Sequence

import msgspec

from infra.chain.chain import Step
from infra.chain.insert import ProcessorConfig, with_processors
from infra.chain.whole import run_whole
from schemas import Batch, BatchItem, Experience
from schemas.experience import pair_side
from trainer.batch.age import PACED as PACED
from trainer.batch.batch import TrainItem
from trainer.processors import without_weight

logger = logging.getLogger(__name__)

Key = tuple[str, int]  # id and revision
LOGGED = ("num_tokens", "spans", "end", "lane", "reward", "bulk")  # what the log says, and a batch cannot
ALONE = "nothing of the paced lane left in the batch"


def build_batch(processors: Sequence[ProcessorConfig]) -> tuple[Step, ...]:
    """The chain that [[processor]] tables of stage batch make; raises ConfigError. It has no built-ins that run unasked."""
    return with_processors((), processors, "batch", 0, set())


async def apply_chain(
    steps: Sequence[Step], batch: Batch, items: Sequence[TrainItem], *, alone: bool = True
) -> tuple[Batch, list[TrainItem]]:
    """The batch as the chain leaves it. alone: other lanes may be trained without the paced one."""
    if not steps:
        return batch, list(items)
    given = [without_weight(one.experience) for one in items]
    outcome = await run_whole(steps, given)
    for gone in outcome.dropped[:1]:
        logger.info("batch chain dropped step=%d first=%s reason=%s", batch.step, gone.experience.id, gone.reason)
    reasons = {_key(gone.experience): gone.reason for gone in outcome.dropped}
    after = {_key(one): one for one in outcome.kept}
    changed = [
        _settled(one, before, after.get(_key(before)), reasons) for one, before in zip(items, given, strict=True)
    ]
    return _journaled(batch, _whole_pairs(changed), alone)


Settled = tuple[TrainItem, str]  # an item after the chain, and why it is dropped


def _settled(one: TrainItem, before: Experience, after: Experience | None, reasons: dict[Key, str]) -> Settled:
    if after is None:
        return one, reasons.get(_key(before), "replaced")
    if any(getattr(before, name) != getattr(after, name) for name in LOGGED if name != "bulk") or (
        before.bulk is not after.bulk
    ):
        return one, "changed beyond advantage and weight"
    item = msgspec.structs.replace(one.item, advantage=after.advantage or 0.0, weight=one.item.weight * after.weight)
    return TrainItem(experience=one.experience, item=item), ""


def _whole_pairs(changed: list[Settled]) -> list[Settled]:
    broken = {one.experience.group for one, reason in changed if reason and pair_side(one.experience)}
    return [
        (one, reason or "half a pair")
        if pair_side(one.experience) and one.experience.group in broken
        else (one, reason)
        for one, reason in changed
    ]


def _journaled(batch: Batch, changed: list[Settled], alone: bool) -> tuple[Batch, list[TrainItem]]:
    had_paced = any(one.item.lane == PACED for one, _ in changed)
    has_paced = any(one.item.lane == PACED for one, reason in changed if not reason)
    if had_paced and not has_paced and not alone:
        changed = [(one, reason or ALONE) for one, reason in changed]
    kept = [one for one, reason in changed if not reason]
    drops = dict(batch.drops)
    dropped: list[BatchItem] = list(batch.dropped)
    because: list[str] = list(batch.dropped_because)
    for one, reason in changed:
        if reason:
            drops[reason] = drops.get(reason, 0) + 1
            dropped.append(one.item)
            because.append(reason)
    before = dict.fromkeys(item.offset for item in (*batch.items, *batch.dropped))
    digests = dict(zip(before, batch.blocks, strict=bool(batch.blocks)))
    named = dict.fromkeys(item.offset for item in (*(one.item for one in kept), *dropped))
    record = msgspec.structs.replace(
        batch,
        blocks=tuple(digests[offset] for offset in named if offset in digests),
        items=tuple(one.item for one in kept),
        drops=drops,
        dropped=tuple(dropped),
        dropped_because=tuple(because),
    )
    return record, kept


def _key(experience: Experience) -> Key:
    return experience.id, experience.revision
