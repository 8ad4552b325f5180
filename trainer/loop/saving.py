"""Writing a checkpoint: snapshot, upload, record in the journal, then the removal of data that the horizon no longer needs.

Order: snapshot (in host memory; the next step may begin) → state → Saved record (it counts) → manifest → older checkpoints →
`buffer` and `batches` below all that stay → uses and policies of before the horizon. So a manifest belongs to a record that
counts, and nothing is removed that a checkpoint on disk could ask for.
"""

import asyncio
import logging
from contextlib import suppress

import msgspec

from infra.log.bus import Partition
from infra.log.log import Log
from infra.roles.memory import give_back_freed
from infra.settings.config import duration_s
from schemas import Saved, topics
from schemas.errors import StoreError
from schemas.journal import JournalRecord
from trainer.config import SLOTS
from trainer.journal import checkpoint
from trainer.journal.checkpoint import (
    Checkpoint,
    CheckpointPlace,
    CheckpointTime,
    journal_begin,
    kept,
    trim_below,
    uses_below,
)
from trainer.journal.origin import made_with
from trainer.learners.learner import take_snapshot
from trainer.learners.snapshot import Snapshot
from trainer.loop.prune import stored_bytes
from trainer.loop.report import Stopwatch
from trainer.loop.state import Run
from trainer.state import index_hash

FIRST_WAIT_S, MOST_WAIT_S = 0.1, 30.0  # between two looks at a full disk

logger = logging.getLogger(__name__)


class Unwritten(msgspec.Struct, frozen=True):
    """A checkpoint in memory.

    checkpoint: all of it but the learner's state. snapshot: the learner's state. made_with: as in Saved.
    """

    checkpoint: Checkpoint
    snapshot: Snapshot
    made_with: dict[str, str]


async def write_checkpoint(run: Run, version: int) -> None:
    """Write a checkpoint of now and wait for it. version: of these weights; a resume publishes it if that is not done yet."""
    await run.saving.finished()
    await store(run, await snapshot(run, version))


async def snapshot(run: Run, version: int) -> Unwritten:
    """A checkpoint of now; no later step reaches it. Waits for room on the disk."""
    await wait_for_room(run)
    intake = run.supply.intake
    known, used_up = intake.known(run.position.settled), dict(intake.buffer.used_up)
    run.advance(buffer_next=intake.buffer_next, progress_next=intake.progress_next, known=known, used_up=used_up)
    uses, references = intake.buffer.uses.copy(), tuple(intake.buffer.references())
    position = msgspec.structs.replace(run.position, version=version)
    if run.saving.unread is not None:
        journal_next, journal_token = run.saving.unread.journal_next, run.saving.unread.journal_token
        position = msgspec.structs.replace(position, journal_next=journal_next, journal_token=journal_token)
    with Stopwatch(run.report, "snapshot_seconds"):
        folder = checkpoint.folder(run.name, CheckpointPlace(position.step, run.lease.token))
        taken = await run.in_thread(take_snapshot, run.learner, run.store, folder)
    state = checkpoint.Checkpoint(position=position, learner={}, uses=uses, references=references)
    return Unwritten(state, taken, await run.in_thread(made_with, run.config, run.floor, run.learner))


async def store(run: Run, unwritten: Unwritten) -> None:
    """Write a snapshot, manifest last."""
    state = unwritten.checkpoint
    index = await run.saving.in_thread(unwritten.snapshot.write)
    saved = Saved(
        run=run.name,
        token=run.lease.token,
        step=state.position.step,
        version=state.position.version,
        sha256=index_hash(index),
        phase="train" if state.position.warmed_up else "warmup",
        made_with=unwritten.made_with,
    )
    time_ms = await run.journal(saved)
    await run.saving.in_thread(
        checkpoint.save,
        run.store,
        run.name,
        state,
        index=index,
        token=saved.token,
        made_with=saved.made_with,
        time_ms=time_ms,
    )
    run.saving.saved_step = state.position.step
    await tidy(run)
    await run.saving.in_thread(give_back_freed)  # the written copies lay between blocks that stay
    run.report.add("checkpoints")


async def tidy(run: Run) -> None:
    """Remove checkpoints, buffered blocks and policies that neither resume nor replay needs any more.

    Above the bound of a folder store, checkpoints and versions within the horizon go too, but the newest checkpoints and
    those from which log and journal of the horizon are read.
    """
    replaced = await run.publisher.replaced(int(duration_s(run.floor.keep.replay) * 1000))
    await remove_old(run, slots=SLOTS, replaced=replaced)
    if await run.saving.in_thread(over_bound, run):
        await remove_old(run, slots=1, replaced=None)


async def remove_tensors(run: Run) -> None:
    """Above the bound of a folder store, remove the tensors of versions that are too old to sample from.

    Their manifests stay until the next checkpoint: a resumed trainer compares the weights of executed steps with them.
    """
    if await run.saving.in_thread(over_bound, run):
        oldest = run.position.version - run.floor.pacing.max_staleness
        await run.saving.in_thread(run.publisher.prune, oldest, tensors_only=True)


async def remove_old(run: Run, *, slots: int, replaced: int | None) -> None:
    """slots: spans of the horizon that keep a checkpoint each. replaced: newest version that was replaced before the horizon,
    -1 for none; None where replay needs no version.
    """
    keep_ms = int(duration_s(run.floor.keep.replay) * 1000)
    manifests = await run.saving.in_thread(checkpoint.manifests, run.store, run.name)
    marks = [CheckpointTime(manifest.place, manifest.time_ms) for manifest in manifests]
    stay = kept(marks, newest=run.config.keep_checkpoints, keep_ms=keep_ms, slots=slots)
    doomed = [manifest.place for manifest in manifests if manifest.place not in stay]
    await run.saving.in_thread(checkpoint.remove, run.store, run.name, doomed)
    newest = CheckpointPlace(run.saving.saved_step, run.lease.token)
    if torn := await run.saving.in_thread(checkpoint.remove_unfinished, run.store, run.name, newest):
        logger.info("unfinished checkpoints removed folders=%d", torn)
    below = trim_below(manifests, stay)
    if below > run.saving.trimmed:
        await run.log.bus.delete_records(Partition(run.log.name(topics.BUFFER), 0), below)
        logger.info("buffer trimmed below=%d", below)
        run.saving.trimmed = below
    begin, token = journal_begin(manifests, stay, keep_ms)
    if begin > run.saving.journal_begin and await trim_journal(run.log, run.name, begin, token):
        run.saving.journal_begin = begin
    if gone := run.supply.intake.buffer.forget_uses(uses_below(manifests, stay, keep_ms)):
        logger.info("uses forgotten groups=%d", gone)
    run.report.set("uses_remembered", len(run.supply.intake.buffer.uses))
    # Executing journaled steps again compares their weights with the published versions.
    oldest = min(manifest.position.version for manifest in manifests[-run.config.keep_checkpoints :])
    await run.saving.in_thread(run.publisher.prune, oldest if replaced is None else min(replaced, oldest))


def over_bound(run: Run) -> bool:
    """True if versions and checkpoints, with the next of each, take more of a folder store than its bounds allow. Blocking."""
    usage = run.store.disk_usage()
    if usage is None or not run.floor.keep.store_gb:
        return False
    taken = stored_bytes(run.store, (f"policies/{run.floor.policy.name}/", f"checkpoints/{run.name}/"))
    run.report.set("run_stored_bytes", taken)
    return taken + next_bytes(run) > run.floor.keep.store_gb * 1e9 or not has_room(run)


def next_bytes(run: Run) -> int:
    """Bytes of the next checkpoint and version, about: as the newest ones. Blocking."""
    newest = CheckpointPlace(run.saving.saved_step, run.lease.token)
    return stored_bytes(run.store, (f"{checkpoint.folder(run.name, newest)}/",)) + run.publisher.full_bytes


def has_room(run: Run) -> bool:
    """True if the next checkpoint and version leave `keep.free_share` of a folder store's disk free. Blocking."""
    usage = run.store.disk_usage()
    return usage is None or usage[0] - next_bytes(run) >= run.floor.keep.free_share * usage[1]


async def wait_for_room(run: Run) -> None:
    """Remove data as `tidy` does, and wait until the disk has room for the next checkpoint and version."""
    if await run.saving.in_thread(has_room, run):
        return
    wait_s = FIRST_WAIT_S
    while True:
        if run.saving.saved_step >= -1:
            await tidy(run)
            await remove_tensors(run)
        if await run.saving.in_thread(has_room, run):
            return
        usage = run.store.disk_usage() or (0, 0)
        logger.error(
            "publication waits: %.1f of %.1f GB are free, keep.free_share=%g must stay free: make room on the disk of %r",
            usage[0] / 1e9, usage[1] / 1e9, run.floor.keep.free_share, run.store,
        )  # fmt: skip
        run.report.add("publication_waits")
        with suppress(TimeoutError):
            await asyncio.wait_for(run.saving.stop.wait(), wait_s)
            raise StoreError("stopped while the disk had no room for the next checkpoint or version")
        wait_s = min(2 * wait_s, MOST_WAIT_S)


async def trim_journal(log: Log, name: str, begin: int, token: int) -> bool:
    """Remove the journal below `begin`, if the record there belongs to this run's journal and has at least this token, so that
    a reader learns the lease in force from it. Return False for any other record, or none; the next checkpoint tries again.
    """
    found = await log.at(topics.BATCHES, 0, [begin])
    value = (await log.decoded(found[begin])).value if found else None
    if not isinstance(value, JournalRecord) or value.run != name or value.token < token:
        return False
    await log.bus.delete_records(Partition(log.name(topics.BATCHES), 0), begin)
    logger.info("journal trimmed below=%d", begin)
    return True
