"""Start of a trainer, from nothing or from the state of a killed trainer.

    policies ─> published versions        checkpoint ─> weights, uses, references
    batches ──> journaled batches since ─> executed again, published if the event is missing

Guarantee: in one process on the same CPU model the weights equal a run without a kill; elsewhere the batches do. Data
forgotten between a step and the next checkpoint is the exception: the trainer leaves it out, and reports and counts it.
"""

import asyncio
import logging
from contextlib import aclosing
from functools import partial

from infra.log.log import Log
from infra.policies.beginning import newest_summary, reading
from infra.policies.fold import PoliciesFold, published
from infra.roles.role import Role
from infra.store.seal import FORGOTTEN
from infra.store.store import Store
from schemas import PolicyEvent, Rollback, topics
from schemas.errors import OffsetOutOfRange
from trainer.batch.assemble import journaled_items
from trainer.batch.batch import TrainItem
from trainer.batch.image_inputs import ImageInputs
from trainer.buffer.buffer import Buffer, make_candidate, read_blocks
from trainer.buffer.intake import Intake, tell_refused
from trainer.config import TrainerConfig
from trainer.journal import checkpoint
from trainer.journal.journal import Journal, Lease, Pending, is_quarantined, pending, read_journal
from trainer.learners.learner import Learner, take_from
from trainer.loop.fit import restore_learner
from trainer.loop.publication import WeightPublisher
from trainer.loop.report import TrainerReport
from trainer.loop.state import Run, Unread
from trainer.loop.step import finish_rollback, publish_now, repeat, settle_verdict, tell_drawn, write_and_publish_due
from trainer.loop.supply import Supply
from trainer.loop.waiting import tell_dropped
from trainer.loop.warmup import finish_warm_up
from trainer.replay.replay import named_offsets

logger = logging.getLogger(__name__)


async def resume(
    role: Role,
    config: TrainerConfig,
    lease: Lease,
    learner: Learner,
    *,
    seed: int,
    report: TrainerReport,
    image_inputs: ImageInputs | None = None,
    max_tokens: int = 0,
) -> Run:
    """A run at the point where the journal ends. Raises FencedOut, OffsetOutOfRange, ConfigError."""
    floor, log, store = role.floor, role.log, role.store
    state, journal = await find_start(log, store, lease, take_from(learner))
    position = state.position if state else await beginning(log)
    found, past = await read_policies(log, floor.policy.name, position.version)
    publisher = WeightPublisher(log, store, lease, floor.policy.name, found, past, learner.adapter)
    uses = state.uses if state else None
    buffer = Buffer(
        {lane: lane_config.max_uses for lane, lane_config in config.lanes.items()}, uses, log.find_seal, max_tokens
    )
    clock = asyncio.get_running_loop().time
    intake = Intake(buffer, buffer_next=position.buffer_next, progress_next=position.progress_next, clock=clock)
    intake.floor = position.settled
    intake.closed.update(position.known)
    buffer.used_up.update(position.used_up)
    if position.warmed_up:
        buffer.end_validation()
    run = Run(
        floor=floor, config=config, log=log, store=store, learner=learner, lease=lease, publisher=publisher,
        supply=Supply(config=config, pacing=floor.pacing, intake=intake, seed=seed), report=report, position=position,
        image_inputs=image_inputs,
    )  # fmt: skip
    todo = pending(journal.entries, position.step)
    if state is not None:
        await restore_learner(run, state)
        await restore_buffer(run, state.references, todo)
        run.saving.saved_step = position.step
    elif config.warmup is not None:
        await run.in_thread(learner.begin_phase, "warmup")
    run.saving.unread = Unread(position.journal_next, position.journal_token)
    run.advance(journal_next=journal.next_offset, journal_token=journal.token)
    if state is not None and not publisher.has(position.version):
        await publish_now(run, position.version)
    if state is not None or todo:
        logger.info("resuming step=%d version=%d journaled=%d", position.step, position.version, len(todo))
    await execute_again(run, todo)
    run.saving.unread = None
    return run


async def find_start(
    log: Log, store: Store, lease: Lease, take: checkpoint.Take = dict
) -> tuple[checkpoint.Checkpoint | None, Journal]:
    """The newest checkpoint that verifies and was not rolled back later, and the journal after it. take: see
    `checkpoint.load`.
    """
    before: checkpoint.CheckpointPlace | None = None
    load = checkpoint.load_newest
    while (state := await asyncio.to_thread(load, store, lease.run, before=before, take=take)) is not None:
        position = state.position
        journal = await read_journal(log, lease, start=position.journal_next, token=position.journal_token)
        if not is_quarantined(journal.entries, position.step):
            return state, journal
        logger.warning("checkpoint passed over run=%s step=%d: rolled back later", lease.run, position.step)
        before = checkpoint.CheckpointPlace(position.step, 0)
    journal = await read_journal(log, lease, start=(await beginning(log)).journal_next)
    first = min((entry.step for entry in journal.entries if not isinstance(entry, Rollback)), default=0)
    if first > 0:
        raise OffsetOutOfRange(
            f"run {lease.run!r}: no checkpoint is left, and its journal is kept from step {first} on"
        )
    return None, journal


async def beginning(log: Log) -> checkpoint.Position:
    """Where a run without a checkpoint begins: other runs on the same log have had older records removed."""
    kept = {topic: (await log.bounds(topic))[0][0] for topic in (topics.BUFFER, topics.BATCHES)}
    return checkpoint.Position(buffer_next=kept[topics.BUFFER], journal_next=kept[topics.BATCHES])


async def read_policies(log: Log, policy: str, version: int) -> tuple[dict[int, PolicyEvent], PoliciesFold]:
    """The published versions of a policy, all from `version` on; and the fold of `policies`."""
    summary = await newest_summary(log, fits=lambda policies: policies.of(policy).known_from <= version)
    fold = PoliciesFold(summary)
    async with aclosing(reading(log, fold)) as messages:
        events = [
            (message.offset, message.value) async for message in messages if isinstance(message.value, PolicyEvent)
        ]
    return published(events, policy, None if summary is None else summary.of(policy)), fold


async def restore_buffer(run: Run, references: tuple[int, ...], todo: list[Pending | Rollback]) -> None:
    """Put undrawn blocks back, and report refused ones that no step in `todo` trains. Raises OffsetOutOfRange with the
    offset of a missing block.
    """
    used = {offset for entry in todo if isinstance(entry, Pending) for offset in named_offsets(entry.batch)}
    for offset, stored in sorted((await read_blocks(run.log, references)).items()):
        reason = run.supply.intake.keep(offset, stored.frame, stored.block, stored.digest)
        if offset not in used:
            await tell_refused(run.report.metrics, partial(tell_dropped, run), offset, stored.block.group, reason)
    run.supply.intake.buffer.await_no_more()  # drawn or refused turns of a join are not here


async def execute_again(run: Run, todo: list[Pending | Rollback]) -> None:
    """Bring the run to the journal's end: same items, same seeds, same verdicts, same publications."""
    run.report.state = "executing the journal again" if todo else run.report.state
    steps = repeat(run, todo, prepare=partial(count_and_read, run), begin_training=partial(finish_warm_up, run))
    async for entry, stats in steps:
        if isinstance(entry, Rollback):
            await finish_rollback(run, entry)
        elif stats is not None and entry.fate == "open":
            await settle_verdict(run, entry.batch, stats)
        elif entry.fate != "quarantined" and entry.batch.phase == "train":
            await write_and_publish_due(run)


async def count_and_read(run: Run, entry: Pending) -> list[TrainItem]:
    """The items of a journaled batch; its groups count as used in every fate of its step; the master gets its report."""
    used = (*entry.batch.items, *entry.batch.dropped)
    found = await read_blocks(run.log, {item.offset for item in used})
    await tell_drawn(run, entry.batch)
    sequences = [other.block.experiences[0].sequence for other in found.values()]
    run.settle([number for number in sequences if number >= 0])
    run.supply.intake.floor = run.position.settled
    for offset, use in {item.offset: item.use for item in used}.items():
        run.supply.intake.buffer.count_use(make_candidate(offset, found[offset].block, use))
    items = journaled_items(entry.batch, found)
    kept = [item for item in items if not item.experience.lost]
    if len(kept) < len(items):
        # The versions from this step on differ from the published versions now, so that they get new numbers.
        logger.warning("resuming without forgotten items step=%d items=%d", entry.batch.step, len(items) - len(kept))
        run.report.add("dropped", len(items) - len(kept), reason=FORGOTTEN)
    return kept
