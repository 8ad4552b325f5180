"""Writing a checkpoint: told in the journal, stored, then what the horizon no longer needs is removed.

Order: Saved record (it counts) → state → manifest → older checkpoints → `buffer` below all that stay → uses and policies of
before the horizon. So a manifest belongs to a record that counts, and nothing is removed that a checkpoint on disk could
ask for.
"""

import logging

import msgspec

from infra.log.bus import Partition
from infra.settings.config import duration_s
from schemas import Saved, topics
from trainer.journal import checkpoint
from trainer.journal.horizon import CheckpointTime, kept, trim_below, uses_below
from trainer.journal.origin import made_with
from trainer.loop.report import Stopwatch
from trainer.loop.state import Run

logger = logging.getLogger(__name__)


async def write_checkpoint(run: Run, version: int) -> None:
    """Write a checkpoint of now. version: of these weights; a resume publishes it if nobody did."""
    intake = run.intake
    run.advance(buffer_next=intake.buffer_next, progress_next=intake.progress_next)
    uses, references = intake.buffer.uses.copy(), tuple(intake.buffer.references())
    with Stopwatch(run.report, "checkpoint_seconds"):
        learner = await run.in_thread(run.learner.save)
        saved = Saved(
            run=run.name,
            token=run.lease.token,
            step=run.position.step,
            version=version,
            sha256=await run.in_thread(checkpoint.state_sha256, learner),
            phase="train" if run.position.warmed_up else "warmup",
            made_with=await run.in_thread(made_with, run.config, run.floor, run.learner),
        )
        time_ms = await run.journal(saved)
        position = msgspec.structs.replace(run.position, version=version)
        if run.unread is not None:
            journal_next, journal_token = run.unread.journal_next, run.unread.journal_token
            position = msgspec.structs.replace(position, journal_next=journal_next, journal_token=journal_token)
        state = checkpoint.Checkpoint(position=position, learner=learner, uses=uses, references=references)
        await run.in_thread(
            checkpoint.save,
            run.store,
            run.name,
            state,
            token=saved.token,
            learner_sha256=saved.sha256,
            made_with=saved.made_with,
            time_ms=time_ms,
        )
        run.saved_step = position.step
        await tidy(run)
    run.report.add("checkpoints")


async def tidy(run: Run) -> None:
    """Remove checkpoints, buffered blocks and policies that neither resume nor replay needs any more."""
    keep_ms = int(duration_s(run.floor.keep.replay) * 1000)
    manifests = await run.in_thread(checkpoint.manifests, run.store, run.name)
    marks = [CheckpointTime(one.place, one.time_ms) for one in manifests]
    stay = kept(marks, newest=run.config.keep_checkpoints, keep_ms=keep_ms)
    doomed = [one.place for one in manifests if one.place not in stay]
    await run.in_thread(checkpoint.remove, run.store, run.name, doomed)
    below = trim_below(manifests, stay)
    if below > run.trimmed:
        await run.log.bus.delete_records(Partition(run.log.name(topics.BUFFER), 0), below)
        logger.info("buffer trimmed below=%d", below)
        run.trimmed = below
    if gone := run.intake.buffer.forget_uses(uses_below(manifests, stay)):
        logger.info("uses forgotten groups=%d", gone)
    run.report.set("uses_remembered", len(run.intake.buffer.uses))
    # Executing journaled steps again compares what they give with what was published.
    oldest = min(one.position.version for one in manifests[-run.config.keep_checkpoints :])
    await run.in_thread(run.publisher.prune, keep_ms, oldest)
