"""One optimizer step, from a draw to a published policy; and the same step again from the journal.

Order, always: journal (confirmed) → Drawn → optimizer → checkpoint when due → publication when due.
"""

import logging
from collections.abc import Sequence
from typing import Literal

import msgspec

from infra.config import duration_s
from schemas import Batch, Block, Drawn, Rollback, Skip, topics
from trainer import checkpoint
from trainer.assemble import Stamp, assemble, step_seed
from trainer.batch import TrainItem, pack
from trainer.diagnostics import alarms
from trainer.draw import Candidate, Draw
from trainer.guard import GuardState, judge
from trainer.journal import append
from trainer.learner import StepStats
from trainer.publication import probe_sequences
from trainer.report import Stopwatch
from trainer.state import Run, config_hash

logger = logging.getLogger(__name__)


async def train_step(run: Run, draw: Draw) -> None:
    """Journal a draw and train on it."""
    batch, items = await journal_draw(run, draw, phase="train")
    sequences = [one.sequence for one in draw.taken if one.sequence >= 0]
    run.intake.settle(sequences)
    stats = await execute(run, batch, items)
    await settle_verdict(run, batch, stats)


async def journal_draw(run: Run, draw: Draw, *, phase: Literal["warmup", "train"]) -> tuple[Batch, list[TrainItem]]:
    """Count the uses, write the journal record, then tell the master."""
    step = run.position.step + 1
    stamp = Stamp(
        run=run.name,
        token=run.lease.token,
        step=step,
        version=run.position.version,
        phase=phase,
        seed=step_seed(run.seed, step),
        config_hash=config_hash(run.config, run.floor),
    )
    drawn: list[tuple[Candidate, Block]] = list(zip(draw.taken, run.intake.buffer.take(draw.taken), strict=True))
    batch, items = assemble(stamp, drawn, draw.dropped)
    journal_next = await append(run.log, batch)
    run.advance(journal_next=journal_next)
    groups = tuple(one.group for one in draw.taken if one.lane == "usual")
    if groups:
        told = Drawn(token=run.lease.token, step=step, version=run.position.version, groups=groups)
        await run.log.publish(topics.PROGRESS, told)
    return batch, items


async def execute(run: Run, batch: Batch, items: Sequence[TrainItem]) -> StepStats:
    """The optimizer step of a journaled batch; the position moves past it."""
    warmup = run.config.warmup
    learning_rate = warmup.learning_rate if batch.phase == "warmup" and warmup else run.config.learning_rate
    since_version = (batch.step - run.position.first_train_step) % run.floor.pacing.steps_per_version
    packed = pack(
        items,
        max_tokens=run.config.max_tokens_per_microbatch,
        version=batch.version,
        exact=since_version == 0,
    )
    with Stopwatch(run.report, "learner_seconds") as watch:
        stats = await run.in_thread(run.learner.step, packed, learning_rate=learning_rate, seed=batch.seed)
    run.advance(step=batch.step)
    run.report.step(list(items), stats, batch.version, watch.elapsed_s)
    sampled = [one.experience.tokens.tolist() for one in items[:4]]
    run.probe_sequences = probe_sequences(sampled) or run.probe_sequences
    return stats


async def settle_verdict(run: Run, batch: Batch, stats: StepStats, *, again: bool = False) -> None:
    """Let the guard decide, then write and publish what is due. again: the journal already says what was skipped."""
    raised = alarms(stats.values)
    for alarm in raised:
        run.report.add("alarms", alarm=alarm.name)
    run.guard, verdict, reason = judge(
        run.guard,
        finite=stats.finite,
        alarms=tuple(alarm.name for alarm in raised),
        halting=frozenset(run.config.halt_on),
        max_skips=run.config.max_skips,
    )
    if verdict == "rollback":
        await roll_back(run, batch, reason)
        return
    if verdict == "skip":
        logger.warning("step skipped step=%d reason=%s", batch.step, reason)
        run.report.add("steps_skipped")
        if not again:
            skip = Skip(run=run.name, token=run.lease.token, step=batch.step, reason=reason)
            run.advance(journal_next=await append(run.log, skip))
    if batch.phase == "train":
        await write_and_publish_due(run)


async def write_and_publish_due(run: Run) -> None:
    """Checkpoint before publication where both fall due, so that a version is never ahead of what a restart can reach."""
    if not run.publication_due():
        return
    version = run.position.version + 1
    if run.checkpoint_due():
        await write_checkpoint(run, version)
    await publish_now(run, version)


async def publish_now(run: Run, version: int) -> None:
    """Publish the learner's weights as `version` (or the next free number)."""
    with Stopwatch(run.report, "publish_seconds"):
        tensors = await run.in_thread(run.learner.tensors)
        probe = await run.in_thread(run.learner.probe, run.probe_sequences) if run.probe_sequences else None
        stats: dict[str, float] = {
            name: run.report.gauges[name] for name in ("loss", "reward_mean") if name in run.report.gauges
        }
        got = await run.publisher.publish(
            version, tensors, probe, parent=run.position.version if version else -1, step=run.position.step, stats=stats
        )
    run.advance(version=got)
    run.report.add("policy_versions")


async def write_checkpoint(run: Run, version: int) -> None:
    """Write a checkpoint of now; prune old ones, and old policies. version: of these weights; a resume publishes it if
    nobody did.
    """
    intake = run.intake
    run.advance(buffer_next=intake.buffer_next, progress_next=intake.progress_next)
    with Stopwatch(run.report, "checkpoint_seconds"):
        state = checkpoint.Checkpoint(
            position=msgspec.structs.replace(run.position, version=version),
            learner=await run.in_thread(run.learner.save),
            uses=dict(intake.buffer.uses),
            references=tuple(intake.buffer.references()),
        )
        await run.in_thread(checkpoint.save, run.store, run.name, state)
        await run.in_thread(checkpoint.prune, run.store, run.name, run.config.keep_checkpoints)
        await run.in_thread(run.publisher.prune, int(duration_s(run.floor.keep.replay) * 1000))
    run.report.add("checkpoints")


async def roll_back(run: Run, batch: Batch, reason: str) -> None:
    """Restore the newest checkpoint's weights as a new, higher version; the batches since it are quarantined."""
    state = await run.in_thread(checkpoint.load_newest, run.store, run.name)
    if state is None:
        raise RuntimeError(f"step {batch.step}: {reason}, and there is no checkpoint to go back to")
    logger.error("rolling back from step=%d to step=%d reason=%s", batch.step, state.position.step, reason)
    run.report.add("rollbacks")
    run.report.state = f"rolled back to step {state.position.step}: {reason}"
    await run.in_thread(run.learner.restore, state.learner)
    version = run.position.version + 1
    record = Rollback(
        run=run.name,
        token=run.lease.token,
        from_step=state.position.step + 1,
        to_step=batch.step,
        restored_version=state.position.version,
        version=version,
        reason=reason,
    )
    run.advance(journal_next=await append(run.log, record))
    run.guard = GuardState()
    await write_checkpoint(run, version)
    await publish_now(run, version)
