"""Replay of a run from a kept checkpoint and the log, compared with every later checkpoint.

    checkpoint ─> learner        journal ─> survey (which batches count, and their end) ─> again, with items ─┐
                                 buffer ──> the blocks that each batch names ─────────────────────────────────┤
                                                          hash of the learner at each Saved record <── execute ┘

Guarantees: a replay writes nothing. It executes exactly the batches that count, in order. A record that is missing, or differs
from the journal, is an error that names it.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import partial

import msgspec
import numpy as np

from infra.log.log import Log, runs
from infra.policies.tensors import Tensor, to_numpy
from infra.store.seal import FORGOTTEN
from infra.store.store import Store
from schemas import Batch, Block, Rollback, Saved, topics
from schemas.errors import BadFrame, ConfigError, NotInStore, OffsetOutOfRange, Sealed
from schemas.journal import Entry, JournalRecord, effective
from trainer.batch.assemble import journaled_items
from trainer.batch.batch import TrainItem
from trainer.buffer.buffer import Stored, read_blocks
from trainer.journal import checkpoint
from trainer.journal.checkpoint import Checkpoint, Manifest
from trainer.journal.journal import Pending, is_quarantined, pending, read_records
from trainer.loop.fit import restore_learner
from trainer.loop.state import Learning
from trainer.loop.step import repeat
from trainer.state import StoredState, index_hash, whole_hash


class Survey(msgspec.Struct, frozen=True):
    """The journal after a checkpoint, without the items of its batches.

    todo: entries to execute, in order. saved: Saved records by step. offsets: of `buffer`, that the batches name.
    times_ms: log-append time of each step's batch. not_compared: number of checkpoints of steps that were rolled back
    later.
    """

    todo: tuple[Pending | Rollback, ...]
    saved: Mapping[int, tuple[Saved, ...]]
    offsets: frozenset[int]
    times_ms: Mapping[int, int]
    not_compared: int

    @property
    def num_steps(self) -> int:
        return self.steps_in(len(self.todo))

    def steps_in(self, first: int) -> int:
        return sum(1 for entry in self.todo[:first] if isinstance(entry, Pending) and entry.fate in ("trained", "open"))

    @property
    def duration_s(self) -> float:
        """Seconds that the run took for these batches, by log-append times."""
        times = self.times_ms.values()
        return (max(times) - min(times)) / 1000 if times else 0.0


class ReplayStart(msgspec.Struct, frozen=True):
    """Start of a replay.

    manifest: manifest of the checkpoint. state: its contents. survey: survey of the journal after it. passed_over: faults of
    older checkpoints.
    """

    manifest: Manifest
    state: Checkpoint
    survey: Survey
    passed_over: tuple[str, ...] = ()


class Compared(msgspec.Struct, frozen=True):
    """Comparison of a checkpoint of the run with the replay's state.

    step, version: of the checkpoint. got: hash of the replay's state. expected: hashes that the run recorded; several if the
    run executed the step again with another result. made_with: as in Saved. fault: fault of the stored checkpoint, "" for none.
    distance: largest absolute difference between stored and replayed weights, None if no checkpoint is stored.
    """

    step: int
    version: int
    got: str
    expected: tuple[str, ...]
    made_with: Mapping[str, str] = {}
    fault: str = ""
    distance: float | None = None

    @property
    def equal(self) -> bool:
        """True if the run recorded this state and no other."""
        return self.expected == (self.got,)


async def find_start(
    log: Log, store: Store, run: str, *, from_step: int | None = None, to_step: int | None
) -> ReplayStart:
    """Return the oldest kept checkpoint that verifies, or the newest at or before `from_step`. Raises ConfigError."""
    places = checkpoint.places(store, run)
    if not places:
        raise ConfigError(f"run {run!r}: got no checkpoint in {store!r}; expected the store that the run wrote to")
    if from_step is not None:
        places = sorted((place for place in places if place.step <= from_step), reverse=True)
    passed_over: list[str] = []
    for place in places:
        try:
            manifest = checkpoint.load_manifest(store, run, place)
            state = checkpoint.load(store, run, place)
        except (NotInStore, ValueError) as error:
            passed_over.append(f"checkpoint of step {place.step}: {error}")
            continue
        entries, survey = await survey_journal(log, run, manifest, to_step)
        if not is_quarantined(entries, place.step):
            return ReplayStart(manifest, state, survey, tuple(passed_over))
    why = "; ".join(passed_over) or f"got --from {from_step}, which is before the oldest kept checkpoint"
    raise ConfigError(f"run {run!r}: got no usable checkpoint: {why}")


async def survey_journal(log: Log, run: str, start: Manifest, to_step: int | None) -> tuple[list[Entry], Survey]:
    """Survey the journal after a checkpoint. Raises BadFrame that names a missing record."""
    position = start.position
    records: list[JournalRecord] = []
    offsets: dict[tuple[int, int], np.ndarray] = {}
    times: dict[tuple[int, int], int] = {}
    async for message in read_records(log, position.journal_next):
        record = message.value
        if isinstance(record, Batch) and record.run == run:
            key = (record.token, record.step)
            offsets.setdefault(key, np.unique(named_offsets(record)))
            times.setdefault(key, message.timestamp_ms)
            record = msgspec.structs.replace(record, items=(), blocks=(), drops={}, dropped=(), dropped_because=())
        if isinstance(record, JournalRecord):
            records.append(record)
    entries, _ = effective(records, run, position.journal_token)
    todo = [entry for entry in pending(entries, position.step) if to_step is None or entry_step(entry) <= to_step]
    check_steps(todo, position.step)
    last = max((entry_step(entry) for entry in todo), default=position.step)
    gone = {entry.batch.step for entry in todo if isinstance(entry, Pending) and entry.fate == "quarantined"}
    ends = {entry.to_step for entry in todo if isinstance(entry, Rollback)}
    saved: dict[int, tuple[Saved, ...]] = {}
    not_compared = 0
    for entry in entries:
        if isinstance(entry, Saved) and position.step < entry.step <= last:
            if entry.step in gone - ends:
                not_compared += 1
            else:
                saved[entry.step] = (*saved.get(entry.step, ()), entry)
    done = [entry.batch for entry in todo if isinstance(entry, Pending) and entry.fate in ("trained", "open")]
    named = frozenset(int(offset) for batch in done for offset in offsets[batch.token, batch.step])
    times_ms = {batch.step: times[batch.token, batch.step] for batch in done}
    return entries, Survey(tuple(todo), saved, named, times_ms, not_compared)


def named_offsets(batch: Batch) -> list[int]:
    return list(dict.fromkeys(item.offset for item in (*batch.items, *batch.dropped)))


def entry_step(entry: Pending | Rollback) -> int:
    return entry.to_step if isinstance(entry, Rollback) else entry.batch.step


def check_steps(todo: Iterable[Pending | Rollback], after_step: int) -> None:
    """Raise BadFrame that names the first missing step of the journal."""
    at = after_step
    for entry in todo:
        if isinstance(entry, Pending) and entry.batch.step != at + 1:
            raise BadFrame(f"journal: step {at + 1} is missing; after step {at} comes step {entry.batch.step}")
        at = entry_step(entry)


async def blocks_named(log: Log, batch: Batch) -> dict[int, Stored]:
    """A batch's blocks. Raises BadFrame (Sealed for a lost key of a trained item) or OffsetOutOfRange with step and offset."""
    try:
        found = await read_blocks(log, named_offsets(batch))
    except OffsetOutOfRange as error:
        raise OffsetOutOfRange(f"step {batch.step}: {error}") from error
    except BadFrame as error:
        raise BadFrame(f"step {batch.step}: {error}") from error
    for item in batch.items:
        if lost := found[item.offset].block.experiences[0].lost:
            key = "destroyed" if lost == FORGOTTEN else "not in this store"
            raise Sealed(f"step {batch.step}: {lost}: the key of its record at buffer offset {item.offset} is {key}")
    return found


class JournalTape:
    """Reads the journal forward again, for the items of the batches that count."""

    def __init__(self, log: Log, run: str, start: int) -> None:
        self._records = read_records(log, start)
        self._run = run

    async def find(self, wanted: Batch) -> Batch:
        """Return the complete record of a surveyed batch."""
        async for message in self._records:
            record = message.value
            if isinstance(record, Batch) and (record.run, record.token, record.step) == (
                self._run,
                wanted.token,
                wanted.step,
            ):
                return record
        raise BadFrame(f"journal: step {wanted.step} was surveyed, but its record is missing now")

    async def close(self) -> None:
        await self._records.aclose()


async def replay(
    run: Learning,
    name: str,
    log: Log,
    store: Store,
    start: ReplayStart,
    *,
    on_step: Callable[[int], None] = lambda step: None,
) -> AsyncGenerator[Compared, None]:
    """Execute the surveyed entries and yield a comparison at each recorded checkpoint. run: a new learner."""
    await restore_learner(run, start.state)
    run.position = start.manifest.position
    journal = JournalTape(log, name, run.position.journal_next)

    async def prepare(entry: Pending) -> list[TrainItem]:
        if entry.fate not in ("trained", "open"):
            return []
        batch = await journal.find(entry.batch)
        return journaled_items(batch, await blocks_named(log, batch))

    compare = partial(compare_with, run, name, store)
    try:
        yield await compare(start.manifest.place.step, (saved_record(name, start.manifest),))
        async for entry, _ in repeat(run, start.survey.todo, prepare=prepare, begin_training=run.begin_training):
            step = entry_step(entry)
            on_step(step)
            if run.position.step == step and (saved := start.survey.saved.get(step)):
                yield await compare(step, saved)
    finally:
        await journal.close()


async def lost_steps(log: Log, name: str, start: ReplayStart) -> dict[int, str]:
    """Return the steps that trained on sealed records without a key, ascending, with the reason: "forgotten" if a key was
    destroyed, else "no key".
    """
    lost: dict[int, str] = {}
    for first, stop in runs(start.survey.offsets):
        async for message in log.scan(topics.BUFFER, {0: first}, {0: stop}):
            if isinstance(message.value, Block) and (why := message.value.experiences[0].lost):
                lost[message.offset] = why
    if not lost:
        return {}
    wanted = {(entry.batch.token, entry.batch.step) for entry in start.survey.todo if isinstance(entry, Pending)}
    found: dict[int, str] = {}
    async for message in read_records(log, start.manifest.position.journal_next):
        record = message.value
        if isinstance(record, Batch) and record.run == name and (record.token, record.step) in wanted:
            whys = {lost[item.offset] for item in record.items if item.offset in lost}
            if whys:
                found[record.step] = FORGOTTEN if FORGOTTEN in whys else min(whys)
    return dict(sorted(found.items()))


async def compare_with(run: Learning, name: str, store: Store, step: int, saved: tuple[Saved, ...]) -> Compared:
    """Compare the replay's state with the run's records and with the stored checkpoint."""
    if saved[-1].phase == "train" and not run.position.warmed_up:
        await run.begin_training()
    state = await run.in_thread(run.learner.save)
    got = await run.in_thread(whole_hash, state)
    expected = tuple(dict.fromkeys(record.sha256 for record in saved))
    places = [place for place in checkpoint.places(store, name) if place.step == step]
    fault, distance = "", None
    for place in places:
        try:
            there = await run.in_thread(checkpoint.load, store, name, place, StoredState.verified)
        except (NotInStore, ValueError) as error:
            fault = f"checkpoint of step {step}: {error}"
            continue
        distance = largest_difference(there.learner, state)
        if isinstance(there.learner, StoredState) and index_hash(there.learner.index) not in expected:
            fault = f"checkpoint of step {step}: its state has another hash than the journal's"
    return Compared(step, saved[-1].version, got, expected, saved[-1].made_with, fault, distance)


def saved_record(name: str, manifest: Manifest) -> Saved:
    return Saved(
        run=name,
        token=manifest.token,
        step=manifest.position.step,
        version=manifest.position.version,
        sha256=manifest.learner_sha256,
        phase="train" if manifest.position.warmed_up else "warmup",
        made_with=manifest.made_with,
    )


def largest_difference(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference between the weights of two states; infinite if their tensors differ."""
    largest = 0.0
    for name in state.keys() | other.keys():
        here, there = state.get(name), other.get(name)
        if name.startswith(("adam/", "phase")):
            continue
        if here is None or there is None or here.shape != there.shape:
            return float("inf")
        if here.num_bytes:
            largest = max(largest, float(np.abs(to_numpy(here).astype(np.float64) - to_numpy(there)).max()))
    return largest
