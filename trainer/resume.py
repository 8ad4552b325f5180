"""From nothing, or from a killed process, to a trainer that can go on.

    policies ─> what was published        checkpoint ─> weights, uses, references
    batches ──> what was journaled since ─> executed again, published where the event is missing

Guarantee: on one CPU process the weights are those of a run that never died; off it, the batches are.
"""

import logging

from infra.bus.log import Log
from infra.config import Floor
from infra.store import Store
from schemas import Batch, PolicyEvent, Skip, topics
from schemas.errors import ConfigError
from trainer import checkpoint
from trainer.assemble import train_items
from trainer.buffer import Buffer, candidate_of
from trainer.config import TrainerConfig
from trainer.intake import Intake
from trainer.journal import Lease, pending_batches, read_journal
from trainer.learner import Learner
from trainer.publication import Publisher, published
from trainer.replay import read_blocks
from trainer.report import Report
from trainer.state import Run
from trainer.step import execute, publish_now, settle_verdict
from trainer.warmup import finish_warm_up

logger = logging.getLogger(__name__)


async def resume(
    floor: Floor,
    config: TrainerConfig,
    *,
    lease: Lease,
    log: Log,
    store: Store,
    learner: Learner,
    seed: int,
    report: Report,
) -> Run:
    """A run at the point where the journal ends. Raises FencedOut, OffsetOutOfRange, ConfigError."""
    events = await read_policies(log)
    found = published([(offset, event) for offset, _, event in events], floor.policy.name)
    times_ms = {event.version: time_ms for _, time_ms, event in events if found.get(event.version) == event}
    publisher = Publisher(log, store, lease, floor.policy.name, found, times_ms)
    state = checkpoint.load_newest(store, lease.run)
    position = state.position if state else checkpoint.Position()
    uses = state.uses if state else {}
    buffer = Buffer({lane: one.max_uses for lane, one in config.lanes.items()}, uses)
    intake = Intake(buffer, buffer_next=position.buffer_next, progress_next=position.progress_next)
    run = Run(
        floor=floor,
        config=config,
        log=log,
        store=store,
        learner=learner,
        lease=lease,
        publisher=publisher,
        intake=intake,
        report=report,
        position=position,
        seed=seed,
    )
    if state is not None:
        try:
            await run.in_thread(learner.restore, state.learner)
        except ValueError as error:
            raise ConfigError(
                f"checkpoint of step {position.step} does not fit the configured model: {error}"
            ) from error
        await restore_buffer(run, state.references)
        if not publisher.has(position.version):
            await publish_now(run, position.version)
    elif config.warmup is not None:
        await run.in_thread(learner.begin_phase, "warmup")
    journal = await read_journal(log, lease, start=position.journal_next, token=position.journal_token)
    run.advance(journal_next=journal.next_offset, journal_token=journal.token)
    pending = pending_batches(journal.entries, position.step)
    if state is not None or pending:
        logger.info("resuming step=%d version=%d journaled=%d", position.step, position.version, len(pending))
    await execute_again(run, pending, {entry.step for entry in journal.entries if isinstance(entry, Skip)})
    return run


async def read_policies(log: Log) -> list[tuple[int, int, PolicyEvent]]:
    """Every policy event with its offset and time."""
    return [
        (message.offset, message.timestamp_ms, message.value)
        async for message in log.read_all(topics.POLICIES)
        if isinstance(message.value, PolicyEvent)
    ]


async def restore_buffer(run: Run, references: tuple[int, ...]) -> None:
    """Put undrawn blocks back; those that retention took are gone with a count."""
    for offset, (frame, block) in sorted((await read_blocks(run.log, references)).items()):
        run.intake.buffer.add(offset, frame, block)


async def execute_again(run: Run, batches: list[Batch], skipped: set[int]) -> None:
    """Execute journaled batches: same items, same seeds, same publications. skipped: steps the journal says were."""
    run.report.state = "executing the journal again" if batches else run.report.state
    for batch in batches:
        if batch.phase == "train" and not run.position.warmed_up:
            await finish_warm_up(run)
        found = await read_blocks(run.log, {item.offset for item in batch.items})
        items = train_items(batch, {offset: block for offset, (_, block) in found.items()})
        counted: set[int] = set()
        for item in batch.items:
            if item.offset not in counted:
                counted.add(item.offset)
                run.intake.buffer.count_use(candidate_of(item.offset, found[item.offset][1], item.use))
        await settle_verdict(run, batch, await execute(run, batch, items), again=batch.step in skipped)
