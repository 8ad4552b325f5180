"""Folds a partition of `verified` on this worker: restores the state, confirms outputs, then saves.

    records -> fold -> publish blocks, then closure (confirmed) -> state + next offset in one transaction -> acknowledge

Guarantees: the file never runs ahead of published outputs. If the file is missing, older than the group's offset or of another
log, the worker reads the log through the same fold. A closure that any worker has sent to `progress` is
not sent again: two workers may fold a partition during a rebalance.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from infra.chain.chain import Step, new_memories, run_chain
from infra.chain.processor import Memory
from infra.log.bus import Partition, Record, partition_for
from infra.log.log import Log, record_key
from infra.observe.metrics import Metrics
from infra.store.seal import FORGOTTEN, open_text
from infra.store.snapshots import SnapshotManifest
from schemas import Block, Closure, Tick, encode
from schemas.errors import BadFrame, NotInLog, Sealed
from schemas.topics import BUFFER, DEAD_LETTERS, PROGRESS, VERIFIED
from streams.collect.decision import Chain, Decision, Folded
from streams.collect.feedback import usual_memories
from streams.collect.fold import fold
from streams.collect.limits import limit_memories
from streams.collect.pending import PendingFile
from streams.collect.rules import Arrival, Rules, go_by, group_named
from streams.collect.snapshots import SnapshotManager, SnapshotPolicy
from streams.collect.state import State
from streams.collect.turns import crediting, is_followed, session_named
from streams.stages.stage import Output, confirmed, count_failed, count_faults, letter, publish_all, read

logger = logging.getLogger(__name__)

STAGE = "collect"
REBUILD_RECORDS = 500
MARK_EVERY = 10_000  # about so many records of `progress` are read again by a worker that begins
OLDER, FOREIGN = "older than the log", "of another log"
ClosureKey = tuple[str, int, int]


class CollectSettings(msgspec.Struct, frozen=True):
    """Settings that the collectors of all partitions share.

    folder: of the state files. rules: waits and limits. steps: its chain. snapshots: when the state goes to the store.
    """

    folder: Path
    rules: Rules
    steps: tuple[Step, ...]
    snapshots: SnapshotPolicy = SnapshotPolicy()


def block_frame(record: Record) -> bytes:
    return record.value if record.value[:2] == b"HR" else b""


class LogEnds(NamedTuple):
    """Two ends of the log: a closure below the first is of records below the second, which was read later.

    progress: offset in `progress`. verified: offset in this partition of `verified`.
    """

    progress: int
    verified: int


class TakenAway(Exception):
    """The partition is being given to another worker, so its rebuild stops."""


class Collector:
    """State and outputs of one partition. Not safe for concurrent use."""

    def __init__(self, log: Log, metrics: Metrics, partition: int, settings: CollectSettings) -> None:
        self.partition = partition
        self._log = log
        self._metrics = metrics
        self._settings = settings
        self._rules = msgspec.structs.replace(settings.rules, open_text=self._open_text)
        self._chain: Chain = partial(run_chain, settings.steps)
        self._pending = PendingFile(settings.folder / f"collect-{partition}.sqlite", log.find_seal)
        self._snapshots = SnapshotManager(log, metrics, partition, self._pending, settings.snapshots)
        self._state = State()
        self._published: set[ClosureKey] = set()
        self._mark: LogEnds | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def next_offset(self) -> int:
        """Everything below is folded, published and saved."""
        return self._state.next_offset

    def close(self) -> None:
        self._snapshots.close()
        self._pending.close()

    async def recover(self, committed: int, taken_away: Callable[[], bool]) -> None:
        """Bring the state to at least `committed`; raises TakenAway between chunks once `taken_away()`."""
        topic = self._log.name(VERIFIED)
        at = Partition(topic, self.partition)
        begin = (await self._log.bus.beginning_offsets(topic))[at]
        end = await self._end()
        self._load()
        state = self._state
        if state.next_offset and await self._misfit(state.next_offset, state.last_ms, begin, end):
            logger.warning("collect_state_foreign partition=%d next_offset=%d", self.partition, state.next_offset)
            self._clear()
        newest = await self._take_up(begin, end)
        self._state.next_offset = max(self._state.next_offset, begin)
        self._published, known_to = await self._closures_since(self._pending.progress_offset)
        self._mark = LogEnds(known_to, await self._end())
        if self._state.next_offset < committed:
            logger.info("collect_rebuild partition=%d from=%d to=%d", self.partition, self.next_offset, committed)
            await self._replay(committed, taken_away)
        self._snapshots.begin(self.next_offset, newest)
        logger.info(
            "collect_ready partition=%d offset=%d open=%d", self.partition, self.next_offset, self.state.num_open()
        )

    async def take(self, records: Sequence[Record]) -> None:
        fresh = [record for record in records if record.offset >= self.next_offset]
        if not fresh:
            return
        if fresh[0].offset > self.next_offset:
            logger.warning("collect_gap partition=%d from=%d to=%d", self.partition, self.next_offset, fresh[0].offset)
            await self._replay(fresh[0].offset, lambda: False)
        await self._fold_all(fresh, counted=True)

    async def tick(self, now_ms: int) -> bool:
        """Append a tick if the state waits for a moment that has come; True if it did."""
        due_ms = self._state.next_due_ms()
        if not due_ms or due_ms > now_ms:
            return False
        await publish_all(self._log, [Output(VERIFIED, Tick(partition=self.partition, due_ms=due_ms))])
        return True

    def begin_at(self, offset: int) -> None:
        """Start empty at `offset`, for a fold that publishes nothing; a fold that publishes calls `recover`."""
        self._load()
        self._state.next_offset = offset

    async def fold(self, records: Sequence[Record]) -> tuple[list[Folded], list[Output]]:
        """Fold records; return one Folded each, and dead letters for unreadable records. Publishes nothing."""
        arrivals = []
        letters: list[Output] = []
        for record in records:
            message = await read(self._log, record)
            if message.error is not None:
                letters.append(letter(message, STAGE, "bad frame", str(message.error)))
                self._metrics.counter("dropped", reason="bad frame").inc()
            arrivals.append(
                Arrival(
                    partition=record.partition, offset=record.offset, timestamp_ms=record.timestamp_ms,
                    value=message.value, frame=block_frame(record),
                )
            )  # fmt: skip
        named = [(arrival.value, group_named(arrival.value)) for arrival in arrivals]
        self._pending.look_up(self._state, {name for _, name in named if name})
        names = crediting(self._settings.rules.sources)
        sessions = {session for pair in named if (session := session_named(*pair, names))}
        self._pending.look_up_sessions(self._state, sessions)
        folded = [await fold(self._state, arrival, self._rules, self._chain, self._blocks_at) for arrival in arrivals]
        return folded, letters

    async def save(self) -> None:
        await self._pending.save(self._state, self._settings.rules.keep_ms)

    async def snapshot(self) -> None:
        await self._snapshots.write()

    def _open_text(self, text: str, answer: str) -> str | None:
        if self._log.keys is None:
            return text
        try:
            return open_text(text, self._log.keys, answer)
        except BadFrame as error:
            reason = FORGOTTEN if isinstance(error, Sealed) else "bad feedback text"
            self._metrics.counter("dropped", reason=reason).inc()
            logger.info("feedback_text_shut answer=%s error=%s", answer, error)
            return None

    def _memories(self) -> dict[str, Memory]:
        return new_memories(self._settings.steps) | limit_memories() | usual_memories(self._settings.rules.sources)

    async def _fold_all(self, records: Sequence[Record], *, counted: bool) -> None:
        folded, letters = await self.fold(records)
        decisions = [decision for result in folded for decision in result.decisions if self._is_new(decision)]
        letters += [Output(DEAD_LETTERS, dead) for result in folded for dead in result.letters]
        await self._emit(decisions, letters)
        if self._mark is not None and self.next_offset >= self._mark.verified:
            self._pending.progress_offset = max(self._pending.progress_offset, self._mark.progress)
            self._published, self._mark = set(), None
        await self.save()
        self._snapshots.saved(self.next_offset)
        if counted:
            self._count(folded, decisions)

    async def _emit(self, decisions: Sequence[Decision], letters: Sequence[Output]) -> None:
        blocks = [block for decision in decisions for block in decision.blocks]
        followed = [Output(BUFFER, block) for block in blocks if is_followed(block)]
        await publish_all(self._log, [*followed, *letters])  # first: the last of a join says that it is whole
        await publish_all(self._log, [Output(BUFFER, block) for block in blocks if not is_followed(block)])
        closures = [decision.closure for decision in decisions]
        if closures:
            closing = (confirmed(partial(self._log.publish, PROGRESS, closure), "progress") for closure in closures)
            reached = max(position.offset for position in await asyncio.gather(*closing)) + 1
            if self._mark is None and reached - self._pending.progress_offset >= MARK_EVERY:
                self._mark = LogEnds(reached, await self._end())

    def _is_new(self, decision: Decision) -> bool:
        closure = decision.closure
        return (closure.group, closure.attempt, closure.revision) not in self._published

    async def _replay(self, until: int, taken_away: Callable[[], bool]) -> None:
        here = self.partition
        scanned = self._log.chunks(VERIFIED, {here: self.next_offset}, {here: until}, max_records=REBUILD_RECORDS)
        async with aclosing(scanned) as chunks:
            async for records in chunks:
                if taken_away():
                    raise TakenAway
                await self._fold_all(records, counted=False)

    def _load(self) -> None:
        self._state = self._pending.load(self._memories())
        self._state.frames.fetch = self._fetch
        if moved := go_by(self._state, self._rules):
            logger.info("collect_windows_changed partition=%d groups=%d", self.partition, moved)

    def _clear(self) -> None:
        self._pending.clear()
        self._load()

    async def _take_up(self, begin: int, end: int) -> SnapshotManifest | None:
        """Go on from the newest snapshot that is further than the state file; return the newest that can be used."""
        for snapshot in await self._snapshots.candidates():
            if snapshot.position <= self._state.next_offset:
                return snapshot
            if misfit := await self._misfit(snapshot.position, snapshot.about["meta"]["last_ms"], begin, end):
                self._snapshots.refuse(misfit, f"snapshot {snapshot.key}: the log holds {begin} to {end}")
                if misfit == FOREIGN:
                    await self._snapshots.remove(snapshot)
            elif await self._snapshots.adopt(snapshot):
                self._load()
                oldest = min(self._state.frames.absent, default=begin)
                if oldest >= begin:
                    logger.info("collect_snapshot_taken partition=%d offset=%d", self.partition, self.next_offset)
                    return snapshot
                self._snapshots.refuse(
                    OLDER, f"snapshot {snapshot.key}: wants offset {oldest}, the log begins at {begin}"
                )
                self._clear()
        return None

    async def _misfit(self, next_offset: int, last_ms: int, begin: int, end: int) -> str:
        """Return why a state does not continue this log, "" if it does: its last record must be where and when the state
        says.
        """
        if next_offset < begin:
            return OLDER
        if next_offset > end:
            return FOREIGN
        if next_offset == begin:
            return ""
        last = next_offset - 1
        found = (await self._log.at(VERIFIED, self.partition, [last])).get(last)
        return "" if found is not None and found.timestamp_ms == last_ms else FOREIGN

    async def _fetch(self, offsets: Sequence[int], ahead: Sequence[int]) -> dict[int, bytes]:
        """Blocks at `offsets`, and the complete blocks at `ahead`. Clears the file and raises NotInLog if one is gone."""
        records = await self._log.at(VERIFIED, self.partition, [*offsets, *ahead])
        if gone := sorted(set(offsets) - records.keys()):
            self._pending.clear()
            where = f"{VERIFIED.name}/{self.partition} offset {gone[0]}"
            raise NotInLog(f"{where}: the log lost this block of an open group; a restart folds the partition again")
        found = {offset: frame for offset, record in records.items() if (frame := block_frame(record))}
        for offset in set(offsets) - found.keys():
            value = (await read(self._log, records[offset])).value
            assert isinstance(value, Block), f"offset {offset} holds no block"
            found[offset] = encode(value)
        return found

    async def _end(self) -> int:
        topic = self._log.name(VERIFIED)
        return (await self._log.bus.end_offsets(topic))[Partition(topic, self.partition)]

    async def _closures_since(self, offset: int) -> tuple[set[ClosureKey], int]:
        topic = self._log.name(PROGRESS)
        at = Partition(topic, 0)
        end = (await self._log.bus.end_offsets(topic))[at]
        start = max(offset, (await self._log.bus.beginning_offsets(topic))[at])
        place = partial(partition_for, num_partitions=len(await self._log.bus.partitions(self._log.name(VERIFIED))))
        found: set[ClosureKey] = set()
        async with aclosing(self._log.scan(PROGRESS, {0: start}, {0: end}, max_records=REBUILD_RECORDS)) as messages:
            async for message in messages:
                closure = message.value
                if isinstance(closure, Closure) and place(record_key(VERIFIED, closure)) == self.partition:
                    found.add((closure.group, closure.attempt, closure.revision))
        return found, end

    async def _blocks_at(self, offsets: Sequence[int]) -> dict[int, Block]:
        """Blocks of `verified` at these offsets; blocks that retention has removed are missing."""
        blocks: dict[int, Block] = {}
        for offset, record in (await self._log.at(VERIFIED, self.partition, offsets)).items():
            message = await read(self._log, record)
            if isinstance(message.value, Block):
                blocks[offset] = message.value
        return blocks

    def _count(self, folded: Sequence[Folded], decisions: Sequence[Decision]) -> None:
        dropped: Counter[str] = Counter()
        for result in folded:
            dropped.update(result.dropped)
        for reason, number in dropped.items():
            self._metrics.counter("dropped", reason=reason).inc(number)
        for outcome, number in Counter(decision.closure.outcome for decision in decisions).items():
            self._metrics.counter("closures", outcome=outcome).inc(number)
        gone = [(drop.reason, drop.processor) for decision in decisions for drop in decision.dropped]
        count_failed(self._metrics, STAGE, count_faults(gone))
        if early := sum(result.closed_early for result in folded):
            self._metrics.counter("sessions_closed_early").inc(early)
        num_out = sum(decision.closure.experiences for decision in decisions)
        self._metrics.counter("experiences_out", stage=STAGE).inc(num_out)
