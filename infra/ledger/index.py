"""Where the records about a group lie: an index of the log in one SQLite file, brought up to date before each question.

Guarantees: the file is a cache of the log and of nothing else; a log that begins anew makes it begin anew; only journal
records that count are in it (see `trainer.journal.journal.effective`). The first question of a long log reads all of it, the
next ones what has come since; `infra.ledger.following` keeps it up beside a run, so that none has much to read. Several
processes may share a file: one reads the log, the others wait for it. What retention took from the log leaves the index.
Who reads the log for another index hands the records on (`LogIndex.offer`), so that they are read once for both.
"""

import asyncio
import fcntl
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from infra.ledger.rows import KEYED, given_up_in, is_opened, keys_of, number, places_of
from infra.log.bus import Record
from infra.log.follower import Follower
from infra.log.log import Log
from schemas import Batch, Fence, PolicyEvent, Rollback, Skip, topics
from schemas.ids import group_of, partition_key
from schemas.topics import Topic

Places = Mapping[int, int]
"""Partition → offset."""

LAYOUT = 7
INDEXED = (*KEYED, topics.BATCHES, topics.POLICIES)
MAX_RECORDS = 5000
PRUNED_AT = 100_000  # records that retention took from a partition: looking for their rows means looking at all
LOCK_AGAIN_S = 0.1
SCHEMA = """
CREATE TABLE IF NOT EXISTS reads (topic TEXT, part INTEGER, next INTEGER, PRIMARY KEY (topic, part)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS kept (topic TEXT, part INTEGER, first INTEGER, PRIMARY KEY (topic, part)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS places (grp INTEGER, topic TEXT, part INTEGER, offset INTEGER, time_ms INTEGER);
CREATE TABLE IF NOT EXISTS sealed (key TEXT, grp INTEGER, session TEXT, PRIMARY KEY (key, grp)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, token INTEGER, offset INTEGER, time_ms INTEGER);
CREATE TABLE IF NOT EXISTS trained (grp INTEGER, step INTEGER);
CREATE TABLE IF NOT EXISTS undone (first INTEGER, last INTEGER, reason TEXT);
CREATE TABLE IF NOT EXISTS fence (token INTEGER);
CREATE TABLE IF NOT EXISTS policies (offset INTEGER PRIMARY KEY, version INTEGER, step INTEGER, time_ms INTEGER, event TEXT);
"""
# Made behind the first read: millions of rows are sorted once in seconds, while each put in its place costs a page.
ORDER = """
CREATE INDEX IF NOT EXISTS places_by_group ON places (grp);
CREATE INDEX IF NOT EXISTS trained_by_group ON trained (grp);
"""


class IndexPlace(msgspec.Struct, frozen=True, order=True):
    """Where one record lies and when the broker stored it. topic: without the app.

    partition: index. offset: in the partition. time_ms: when the broker stored it.

    Example: IndexPlace(topic="verified", partition=3, offset=981, time_ms=1763715600000)
    """

    topic: str
    partition: int
    offset: int
    time_ms: int


class TrainedStep(msgspec.Struct, frozen=True):
    """A journaled step. undone: why it changed nothing in the end, "" if it did.

    step: of the optimizer. offset: of its record in `batches`. time_ms: when the broker stored that.

    Example: TrainedStep(step=40, offset=57, time_ms=1763715600000)
    """

    step: int
    offset: int
    time_ms: int
    undone: str = ""


class LogIndex:
    """One open index file. Not safe for concurrent use."""

    def __init__(self, path: Path, *, run: str, policy: str, prune_at: int = PRUNED_AT) -> None:
        """prune_at: records that retention took from a partition before their rows go."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._run = run
        self._policy = policy
        self._prune_at = prune_at
        self._lock = path.with_suffix(".lock").open("w", encoding="ascii")
        self._database = sqlite3.connect(path, timeout=60.0)
        # NORMAL may lose the last reads with the machine, never the file: the log has them.
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        (layout,) = self._database.execute("PRAGMA user_version").fetchone()
        if layout != LAYOUT:
            self._drop()
            self._database.executescript(SCHEMA)
            self._database.execute(f"PRAGMA user_version = {LAYOUT}")

    def close(self) -> None:
        """Close the file."""
        self._database.close()
        self._lock.close()

    async def refresh(
        self,
        log: Log,
        on_read: Callable[[str, int], None] = lambda topic, left: None,
        follower: Follower | None = None,
        wait_s: float = math.inf,
    ) -> None:
        """Read what has come since the last time. on_read: called with a topic and how many of its records are left.

        follower: over INDEXED, of a caller that comes back every few seconds. wait_s: for another process that reads the log
        into the file meanwhile; after it this call reads nothing.
        """
        async with self._alone(wait_s) as is_alone:
            if not is_alone:
                return
            ends = {
                (topic.name, at.index): end
                for topic in INDEXED
                for at, end in (await log.bus.end_offsets(log.name(topic))).items()
            }
            if self.is_of_another_log(ends):
                self._drop()
                self._database.executescript(SCHEMA)
            for topic in INDEXED:
                await self._read(log, topic, on_read, follower)
            self._database.executescript(ORDER)

    def reads(self) -> dict[tuple[str, int], int]:
        """How far each partition was read, by topic without the app, and index."""
        rows = self._database.execute("SELECT topic, part, next FROM reads").fetchall()
        return {(topic, part): following for topic, part, following in rows}

    def is_of_another_log(self, ends: Mapping[tuple[str, int], int]) -> bool:
        """Whether a partition was read further than it goes. ends: by topic without the app, and index."""
        return any(ends.get(at, 0) < following for at, following in self.reads().items())

    async def resume(self, begins: Mapping[Topic, Mapping[int, int]]) -> dict[tuple[str, int], int]:
        """Where `offer` goes on: `reads`, with what retention took passed over. begins: of each partition, by topic."""
        async with self._alone(0.0) as is_alone:
            known = self.reads()
            if is_alone:
                for topic, firsts in begins.items():
                    self._prune(topic, firsts)
                    passed = {part: at for part, at in firsts.items() if known.get((topic.name, part), 0) < at}
                    self._store(topic, [], [], passed)
                    known |= {(topic.name, part): at for part, at in passed.items()}
        return known

    async def offer(
        self, topic: Topic, records: Sequence[Record], values: Sequence[object], before: Places, behind: Places
    ) -> None:
        """Take what is new here of records that were read for another index; nothing while another process reads the log
        into this one. values: what they hold. before, behind: the caller's reading of each partition was there before these
        records, and goes on there. A partition that is not read up to the first is left out: nothing is skipped.
        """
        async with self._alone(0.0) as is_alone:
            if not is_alone:
                return
            known = self.reads()
            places = {part: known.get((topic.name, part), 0) for part in behind}
            taken = {part: behind[part] for part, at in places.items() if before[part] <= at < behind[part]}
            fresh = [
                (one, value)
                for one, value in zip(records, values, strict=True)
                if one.partition in taken and one.offset >= places[one.partition]
            ]
            if taken:
                self._store(topic, [one for one, _ in fresh], [value for _, value in fresh], taken)

    @property
    def is_ordered(self) -> bool:
        """Whether a log was read to its end once: before, to look for a group would be to look at every row."""
        return (
            self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'places_by_group'").fetchone() is not None
        )

    def places(self, group: str) -> list[IndexPlace]:
        """Records that may be about a group, by topic and offset: its own, and those that only name its session."""
        rows = self._database.execute(
            "SELECT topic, part, offset, time_ms FROM places WHERE grp IN (?, ?)",
            (number(group), number(partition_key(group))),
        )
        return sorted(IndexPlace(*row) for row in rows)

    def steps(self, group: str) -> list[TrainedStep]:
        """Steps whose batch held a member of the group, ascending."""
        rows = self._database.execute(
            "SELECT DISTINCT steps.step, offset, time_ms FROM trained JOIN steps ON trained.step = steps.step"
            " WHERE grp = ? ORDER BY steps.step",
            (number(group),),
        )
        return [self._trained(row) for row in rows.fetchall()]

    def steps_under(self, key_ids: Iterable[str]) -> list[TrainedStep]:
        """Steps whose batch held anything sealed under one of these keys, ascending."""
        found: dict[int, TrainedStep] = {}
        for key_id in key_ids:
            rows = self._database.execute(
                "SELECT DISTINCT steps.step, offset, time_ms FROM sealed JOIN trained ON trained.grp = sealed.grp"
                " JOIN steps ON trained.step = steps.step WHERE key = ?",
                (key_id,),
            )
            found |= {row[0]: self._trained(row) for row in rows.fetchall()}
        return [found[step] for step in sorted(found)]

    def num_groups_under(self, key_ids: Iterable[str]) -> int:
        """Groups sealed under these keys, those made from others included."""
        counts = [
            self._database.execute("SELECT count(*) FROM sealed WHERE key = ?", (key_id,)).fetchone()[0]
            for key_id in key_ids
        ]
        return sum(counts)

    def sessions_under(self, key_ids: Iterable[str]) -> list[str]:
        """Sessions with an answer sealed under one of these keys."""
        found: set[str] = set()
        for key_id in key_ids:
            rows = self._database.execute("SELECT DISTINCT session FROM sealed WHERE key = ?", (key_id,)).fetchall()
            found |= {session for (session,) in rows if session}
        return sorted(found)

    def steps_between(self, first: int, last: int) -> list[TrainedStep]:
        """Journaled steps first to last, inclusive."""
        rows = self._database.execute(
            "SELECT step, offset, time_ms FROM steps WHERE step BETWEEN ? AND ? ORDER BY step", (first, last)
        )
        return [self._trained(row) for row in rows.fetchall()]

    def policy_offsets(self, version: int) -> list[int]:
        """Offsets in `policies` of what was said about a version."""
        rows = self._database.execute("SELECT offset FROM policies WHERE version = ? ORDER BY offset", (version,))
        return [offset for (offset,) in rows]

    def first_version_after(self, step: int) -> int | None:
        """The first published version that holds what a step learned."""
        (version,) = self._database.execute(
            "SELECT min(version) FROM policies WHERE event = 'published' AND step >= ?", (step,)
        ).fetchone()
        return None if version is None else int(version)

    def newest_version(self) -> int:
        """Of all published, -1 for none."""
        row = self._database.execute("SELECT max(version) FROM policies WHERE event = 'published'").fetchone()
        return -1 if row[0] is None else int(row[0])

    def _trained(self, row: tuple[int, int, int]) -> TrainedStep:
        step, offset, time_ms = row
        found = self._database.execute(
            "SELECT reason FROM undone WHERE ? BETWEEN first AND last LIMIT 1", (step,)
        ).fetchone()
        return TrainedStep(step=step, offset=offset, time_ms=time_ms, undone=found[0] if found else "")

    @asynccontextmanager
    async def _alone(self, wait_s: float) -> AsyncIterator[bool]:
        """No other process reads the log into this file meanwhile; the kernel lets go for one that dies. False: one does."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    yield False
                    return
                await asyncio.sleep(LOCK_AGAIN_S)
        try:
            yield True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    async def _read(
        self, log: Log, topic: Topic, on_read: Callable[[str, int], None], follower: Follower | None
    ) -> None:
        read = log.chunks if follower is None else follower.chunks
        begins, ends = await log.bounds(topic)
        known = {
            partition: following
            for partition, following in self._database.execute(
                "SELECT part, next FROM reads WHERE topic = ?", (topic.name,)
            )
        }
        self._prune(topic, begins)
        following = {index: max(begin, known.get(index, 0)) for index, begin in begins.items()}
        behind = {index: end for index, end in ends.items() if following[index] < end}
        if not behind:
            return
        async with aclosing(read(topic, following, behind, max_records=MAX_RECORDS)) as chunks:
            async for records in chunks:
                following |= {record.partition: record.offset + 1 for record in records}
                values = [log.decode(one).value if is_opened(topic, one) else None for one in records]
                self._store(topic, records, values, following)
                on_read(topic.name, sum(end - following[index] for index, end in behind.items()))
        self._store(topic, [], [], following | behind)  # compaction may have taken the last records

    def _store(
        self, topic: Topic, records: Sequence[Record], values: Sequence[object], following: Mapping[int, int]
    ) -> None:
        """Everything of one read and how far it got, in one transaction. values: what the records hold."""
        with self._database:
            if topic in KEYED:
                self._database.executemany("INSERT INTO places VALUES (?, ?, ?, ?, ?)", places_of(topic, records))
                self._database.executemany(
                    "INSERT INTO places VALUES (?, ?, ?, ?, ?)", given_up_in(topic, records, values)
                )
                self._database.executemany("INSERT OR IGNORE INTO sealed VALUES (?, ?, ?)", keys_of(records))
            else:
                for record, value in zip(records, values, strict=True):
                    self._control(record, value)
            self._database.executemany(
                "INSERT OR REPLACE INTO reads VALUES (?, ?, ?)",
                [(topic.name, partition, offset) for partition, offset in following.items()],
            )

    def _prune(self, topic: Topic, begins: Mapping[int, int]) -> None:
        """Forget where records lay that retention has taken, many at once."""
        kept = self._database.execute("SELECT part, first FROM kept WHERE topic = ?", (topic.name,))
        known: dict[int, int] = dict(kept.fetchall())
        for partition, begin in begins.items():
            if begin - known.get(partition, 0) >= self._prune_at:
                with self._database:
                    self._forget(topic, partition, begin)
                    self._database.execute(
                        "INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", (topic.name, partition, begin)
                    )

    def _forget(self, topic: Topic, partition: int, begin: int) -> None:
        if topic in KEYED:
            self._database.execute(
                "DELETE FROM places WHERE topic = ? AND part = ? AND offset < ?", (topic.name, partition, begin)
            )
        elif topic is topics.BATCHES:
            gone = "SELECT step FROM steps WHERE offset < ?"
            self._database.execute(f"DELETE FROM trained WHERE step IN ({gone})", (begin,))
            self._database.execute("DELETE FROM steps WHERE offset < ?", (begin,))

    def _control(self, record: Record, value: object) -> None:
        match value:
            case PolicyEvent(policy=self._policy):
                self._database.execute(
                    "INSERT OR IGNORE INTO policies VALUES (?, ?, ?, ?, ?)",
                    (record.offset, value.version, value.step, record.timestamp_ms, value.event),
                )
            case Fence(run=self._run):
                self._database.execute("INSERT INTO fence VALUES (?)", (value.token,))
            case Batch(run=self._run) if not self._is_fenced(value.token):
                row = (value.step, value.token, record.offset, record.timestamp_ms)
                if self._database.execute("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?)", row).rowcount:
                    groups = {number(group_of(item.id)) for item in value.items}
                    self._database.executemany(
                        "INSERT INTO trained VALUES (?, ?)", [(group, value.step) for group in groups]
                    )
            case Skip(run=self._run) if not self._is_fenced(value.token):
                self._undone(value.step, value.step, f"step skipped: {value.reason}")
            case Rollback(run=self._run) if not self._is_fenced(value.token):
                self._undone(value.from_step, value.to_step, f"rolled back: {value.reason}")

    def _undone(self, first: int, last: int, reason: str) -> None:
        self._database.execute("INSERT INTO undone VALUES (?, ?, ?)", (first, last, reason))

    def _is_fenced(self, token: int) -> bool:
        (highest,) = self._database.execute("SELECT max(token) FROM fence").fetchone()
        if highest is None:  # the beginning was trimmed: see `schemas.journal.Effective`
            self._database.execute("INSERT INTO fence VALUES (?)", (token,))
        return highest is not None and token < highest

    def _drop(self) -> None:
        tables: list[tuple[Any]] = self._database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        ).fetchall()
        for (table,) in tables:
            self._database.execute(f"DROP TABLE {table}")
