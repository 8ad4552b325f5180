"""The index of the log: one SQLite file in the run's folder, in which `trace` finds records and the console searches answers.

    log ─> one writer (`headrace trace --keep-up`) ─> state/index.sqlite ─> trace, forget, console

Guarantees: the file is a cache of the log and of nothing else, and may be removed at any time; if the log was made again, so is
the index; only journal records that count are in it (`schemas.journal.Effective`); rows of records that retention removed
leave it, and every table has a bound (`bounds`). One process writes at a time, by a lock that the kernel releases for a process
that dies; any number read.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec

from infra.ledger.index_fold import KEYED, SCHEMA, TIME_BITS, Folder, number
from infra.log.blobs import is_claim
from infra.log.bus import Record
from infra.log.log import Log
from schemas import Block, Control, decode, topics
from schemas.errors import BadFrame, HeadraceError
from schemas.ids import partition_key
from schemas.topics import Topic

FILE = "index.sqlite"
LAYOUT = 5
# In this order a record is read after the records that it is about.
PAGED = (
    topics.EXPERTS, topics.EXPERIENCES, topics.VERIFIED, topics.EVALS, topics.BUFFER, topics.PROGRESS, topics.REPORTS,
    topics.BATCHES, topics.POLICIES, topics.DEAD_LETTERS,
)  # fmt: skip
MAX_RECORDS = 2000
PRUNED_AT = 100_000  # records that retention took from a partition: to look for their rows is to look at all
PRUNED_ANSWERS = 20_000  # at once
AGAIN_S = 0.1
EVERY_S = 3.0
# Made behind the first read: millions of rows are sorted once in seconds, while each put in its place costs a page.
ORDER = """
CREATE INDEX IF NOT EXISTS places_by_group ON places (grp);
CREATE INDEX IF NOT EXISTS trained_by_group ON trained (grp);
"""
LOGGED = ("places", "sealed", "steps", "trained", "undone", "policies")
TIMED = ("answers", "scores", "uses", "texts", "words", "letters", "marks")
# The column that numbers the rows of a table, and how many of the newest numbers stay.
NEWEST: Mapping[str, tuple[str, int]] = {
    "letters": ("n", 50_000),
    "marks": ("n", 50_000),
    "orders": ("n", 50_000),
    "policies": ("version", 50_000),
    "curves": ("version", 50_000),
    "evals": ("version", 50_000),
}

Bounds = Mapping[Topic, tuple[Mapping[int, int], Mapping[int, int]]]
"""Topic → where each partition begins, and where it ends."""
OnRead = Callable[[str, int], None]

logger = logging.getLogger(__name__)


class IndexPlace(msgspec.Struct, frozen=True, order=True):
    """Position of one record. topic: without the app. time_ms: when the broker stored it."""

    topic: str
    partition: int
    offset: int
    time_ms: int


class TrainedStep(msgspec.Struct, frozen=True):
    """A journaled step. offset: in `batches`. undone: why it changed nothing in the end, "" if it did."""

    step: int
    offset: int
    time_ms: int
    undone: str = ""


class LogIndex:
    """One open index file. Not safe for concurrent use.

    run, policy: whose journal and whose versions it has. keep_ms: answers that are older than the newest by more are removed.
    prune_at: records that retention takes from a partition before their rows are removed.
    """

    def __init__(
        self, path: Path, *, run: str, policy: str, keep_ms: float = math.inf, prune_at: int = PRUNED_AT
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._run, self._policy, self._keep_ms, self._prune_at = run, policy, keep_ms, prune_at
        self._writing = threading.Lock()  # a thread may go on after its caller was cancelled
        self._lock = path.with_suffix(".lock").open("w", encoding="ascii")
        self._is_writer = False
        self._folder: Folder | None = None
        self._is_trimmed = False
        self._open()

    def close(self) -> None:
        """Close the file, once no thread writes, and let another process write it."""
        with self._writing:
            self.database.close()
        self._lock.close()

    def _open(self) -> None:
        self.database = sqlite3.connect(self.path, timeout=60.0, check_same_thread=False)
        self.database.create_function("number", 1, number, deterministic=True)
        self.database.execute("PRAGMA journal_mode = WAL")
        # NORMAL may lose the last reads with the machine, never the file: the log has them.
        self.database.execute("PRAGMA synchronous = NORMAL")
        self.database.execute("PRAGMA cache_size = -32000")
        self._inode = self.path.stat().st_ino
        is_writer = self._is_writer
        if self.database.execute("PRAGMA user_version").fetchone() != (LAYOUT,) and self._claim():
            self._clear()
            if not is_writer:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
                self._is_writer = False

    def _claim(self) -> bool:
        if not self._is_writer:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_writer = True
        return self._is_writer

    def _clear(self) -> None:
        """Replace all tables by empty ones in one transaction."""
        found = self.database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name NOT LIKE 'words_%'"
        ).fetchall()
        drops = "".join(f"DROP TABLE IF EXISTS {name};\n" for (name,) in found)
        self.database.executescript(f"BEGIN IMMEDIATE;\n{drops}{SCHEMA}PRAGMA user_version = {LAYOUT};\nCOMMIT;")
        self._folder = None

    def note(self, name: str) -> object:
        """One of the facts about the file: `fault`, `whole` (the log was read to its end once); None for none."""
        row = self.database.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def set_note(self, name: str, value: object) -> None:
        """Set one of these facts, where this process writes."""
        if self._is_writer:
            with self.database:
                self.database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    async def refresh(self, log: Log, on_read: OnRead = lambda topic, left: None, wait_s: float = math.inf) -> bool:
        """Read the records since the last time, and stay the file's writer until it is closed. Where another process is the
        writer, wait until it has read as far. Returns whether the index has all that the log has now.

        on_read: called with a topic and how many of its records are left. wait_s: for another process.
        """
        until_s = time.monotonic() + wait_s
        ends: Bounds = {}
        while not self._claim():
            if time.monotonic() >= until_s:
                return False
            ends = ends or await bounds_now(log)
            if not any(records_left(ends, read_offsets(self.database)).values()):
                return True
            await asyncio.sleep(AGAIN_S)
        await self._in_thread(self._check_file)
        bounds = await bounds_now(log)
        await self._in_thread(self._check_log, bounds)
        for topic in PAGED:
            await self._read(log, topic, *bounds[topic], on_read)
        await self._in_thread(self._finish)
        return True

    async def _in_thread(self, work: Callable[..., None], *values: object) -> None:
        def turn() -> None:
            with self._writing:
                work(*values)

        await asyncio.to_thread(turn)

    def _check_file(self) -> None:
        """The file that is written is the one that lies there, and of this layout."""
        if not self.path.exists() or self.path.stat().st_ino != self._inode:
            logger.warning("index_gone path=%s: it is made again from the log", self.path)
            self.database.close()
            self._open()
        (layout,) = self.database.execute("PRAGMA user_version").fetchone()
        if layout != LAYOUT:
            self._clear()

    def _check_log(self, bounds: Bounds) -> None:
        """Clear the index if it is of another log; skip records that the log lost at its beginning, and remove their rows."""
        reads = read_offsets(self.database)
        if any(
            end < reads.get((topic.name, part), 0) for topic, (_, ends) in bounds.items() for part, end in ends.items()
        ):
            self._clear()
        rows = self.database.execute("SELECT topic, part, pruned FROM reads").fetchall()
        pruned = {(topic, part): at for topic, part, at in rows}
        starts = [(topic, part, begin) for topic, (begins, _) in bounds.items() for part, begin in begins.items()]
        due = [at for at in starts if at[2] - pruned.get((at[0].name, at[1]), 0) >= self._prune_at]
        if due:
            self._prune(due)

    async def _read(
        self, log: Log, topic: Topic, begins: Mapping[int, int], ends: Mapping[int, int], on_read: OnRead
    ) -> None:
        reads = read_offsets(self.database)
        following = {part: max(begin, reads.get((topic.name, part), 0)) for part, begin in begins.items()}
        behind = {part: end for part, end in ends.items() if following[part] < end}
        if not behind:
            return
        async with aclosing(log.chunks(topic, following, behind, max_records=MAX_RECORDS)) as chunks:
            async for records in chunks:
                following |= {record.partition: record.offset + 1 for record in records}
                claims = [(await log.decoded(at)).value if is_claim(at.value) else None for at in records]
                await self._in_thread(self._store, topic, records, claims, following)
                on_read(topic.name, sum(end - following[part] for part, end in behind.items()))
        # Compaction may have taken the last records.
        await self._in_thread(self._store, topic, (), (), following | behind)

    def _store(
        self,
        topic: Topic,
        records: Sequence[Record],
        claims: Sequence[Control | Block | None],
        following: Mapping[int, int],
    ) -> None:
        """Everything of one read and how far it got, in one transaction."""
        values = [claim or _held(record) for record, claim in zip(records, claims, strict=True)]
        try:
            with self.database:
                if self._folder is None:
                    self._folder = Folder(self.database, run=self._run, policy=self._policy)
                self._folder.fold(topic, records, values)
                self.database.executemany(
                    "INSERT INTO reads (topic, part, next) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET next = excluded.next",
                    [(topic.name, part, offset) for part, offset in following.items()],
                )
        except BaseException:
            self._folder = None  # its state of the journal was not stored
            raise
        self._is_trimmed = False

    def _prune(self, due: Sequence[tuple[Topic, int, int]]) -> None:
        with self.database as database:
            for topic, part, begin in due:
                at = (topic.name, part, begin)
                if topic in KEYED:
                    database.execute("DELETE FROM places WHERE topic = ? AND part = ? AND offset < ?", at)
                elif topic is topics.BATCHES:
                    database.execute("DELETE FROM steps WHERE offset < ?", (begin,))
                    database.execute("DELETE FROM trained WHERE step NOT IN (SELECT step FROM steps)")
                    database.execute("DELETE FROM undone WHERE last < (SELECT min(step) FROM steps)")
                upsert = "INSERT INTO reads VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET pruned = excluded.pruned"
                database.execute(upsert, (*at, begin))
            database.execute(  # a place may name the session alone, as that of feedback does
                "DELETE FROM sealed WHERE grp NOT IN (SELECT grp FROM trained) AND grp NOT IN (SELECT grp FROM places)"
                " AND number(session) NOT IN (SELECT grp FROM places)"
            )

    def _finish(self) -> None:
        """After a read: create the indexes of ORDER once, and remove rows beyond their bounds."""
        if self.note("whole") is None:
            self.database.executescript(ORDER)
            self.set_note("whole", 1)
        if not self._is_trimmed:
            (newest,) = self.database.execute("SELECT max(n) FROM answers").fetchone()
            before_ms = max(0.0, ((newest or 0) >> TIME_BITS) - self._keep_ms)
            trim(self.database, int(before_ms))
            self._is_trimmed = True

    def places(self, group: str) -> list[IndexPlace]:
        """Records that may be about a group, by topic and offset: its own, and records that only name its session."""
        rows = self.database.execute(
            "SELECT topic, part, offset, time_ms FROM places WHERE grp IN (?, ?)",
            (number(group), number(partition_key(group))),
        )
        return sorted(IndexPlace(*row) for row in rows)

    def steps(self, group: str) -> list[TrainedStep]:
        """Steps whose batch held a member of the group, ascending."""
        return self._steps("step IN (SELECT step FROM trained WHERE grp = ?)", number(group))

    def steps_under(self, key_ids: Iterable[str]) -> list[TrainedStep]:
        """Steps whose batch held anything sealed under one of these keys, ascending."""
        asked = "SELECT step FROM sealed JOIN trained USING (grp) WHERE key IN (SELECT value FROM json_each(?))"
        return self._steps(f"step IN ({asked})", json.dumps([*key_ids]))

    def steps_between(self, first: int, last: int) -> list[TrainedStep]:
        return self._steps("step BETWEEN ? AND ?", first, last)

    def _steps(self, where: str, *values: object) -> list[TrainedStep]:
        reason = "SELECT reason FROM undone WHERE steps.step BETWEEN first AND last LIMIT 1"
        rows = self.database.execute(
            f"SELECT step, offset, time_ms, coalesce(({reason}), '') FROM steps WHERE {where} ORDER BY step", values
        )
        return [TrainedStep(*row) for row in rows]

    def num_groups_under(self, key_ids: Iterable[str]) -> int:
        """Groups sealed under these keys, those made from others included."""
        count = "SELECT count(*) FROM sealed WHERE key = ?"
        return sum(self.database.execute(count, (key_id,)).fetchone()[0] for key_id in key_ids)

    def sessions_under(self, key_ids: Iterable[str]) -> list[str]:
        """Sessions with an answer sealed under one of these keys."""
        named = "SELECT DISTINCT session FROM sealed WHERE key = ? AND session != ''"
        return sorted({session for key_id in key_ids for (session,) in self.database.execute(named, (key_id,))})

    def policy_offsets(self, version: int) -> list[int]:
        """Offsets in `policies` of the events of a version."""
        rows = self.database.execute("SELECT offset FROM policies WHERE version = ? ORDER BY offset", (version,))
        return [offset for (offset,) in rows]

    def first_version_after(self, step: int) -> int | None:
        """The first published version that includes a step's update; None for none."""
        asked = "SELECT min(version) FROM policies WHERE event = 'published' AND step >= ?"
        (version,) = self.database.execute(asked, (step,)).fetchone()
        return None if version is None else int(version)

    def newest_version(self) -> int:
        """The newest published version, -1 for none."""
        asked = "SELECT coalesce(max(version), -1) FROM policies WHERE event = 'published'"
        return int(self.database.execute(asked).fetchone()[0])


async def follow(log: Log, index: LogIndex, stop: asyncio.Event | None = None, *, every_s: float = EVERY_S) -> None:
    """Keep an index up until `stop`, while no other process does. It waits for a log that is away, and notes the `fault`."""
    stop = stop or asyncio.Event()
    while not stop.is_set():
        fault = ""
        try:
            await index.refresh(log, wait_s=0.0)
        except (HeadraceError, sqlite3.Error, OSError) as error:
            fault = f"{type(error).__name__}: {error}"
            logger.warning("index_behind error=%s", error)
        with contextlib.suppress(sqlite3.Error):
            if fault != (index.note("fault") or ""):
                index.set_note("fault", fault)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await stop.wait()


async def bounds_now(log: Log) -> Bounds:
    """First and next offsets of PAGED, asked downstream first: records that a record is about lie below these ends."""
    found = {topic: await log.bounds(topic) for topic in reversed(PAGED)}
    return dict(reversed(found.items()))


def read_offsets(database: sqlite3.Connection) -> dict[tuple[str, int], int]:
    """Offset up to which each partition was read, by topic without the app, and index."""
    return {(topic, part): at for topic, part, at in database.execute("SELECT topic, part, next FROM reads")}


def records_left(bounds: Bounds, reads: Mapping[tuple[str, int], int]) -> dict[str, int]:
    """Number of records of each topic that are still to be read."""
    return {
        topic.name: sum(max(0, end - max(begins[part], reads.get((topic.name, part), 0))) for part, end in ends.items())
        for topic, (begins, ends) in bounds.items()
    }


def read_only(path: Path) -> sqlite3.Connection:
    """A connection to an index that only reads. Raises sqlite3.Error where there is none."""
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.execute("PRAGMA cache_size = -8000")
    return database


def trim(database: sqlite3.Connection, before_ms: int) -> None:
    """Remove rows beyond their bounds. before_ms: time of the oldest record that the log keeps."""
    with database:
        old = f"IN (SELECT n FROM answers WHERE n < {before_ms << TIME_BITS} ORDER BY n LIMIT {PRUNED_ANSWERS})"
        database.execute(
            f"INSERT INTO words (words, rowid, asked, answered) SELECT 'delete', n, asked, answered FROM texts WHERE n {old}"
        )
        database.execute(f"DELETE FROM scores WHERE n {old} AND name IN (SELECT DISTINCT name FROM scores)")
        for table in ("texts", "uses", "answers"):
            database.execute(f"DELETE FROM {table} WHERE n {old}")
        for table in ("letters", "marks"):
            database.execute(f"DELETE FROM {table} WHERE time_ms < ?", (before_ms,))
        for table, (column, most) in NEWEST.items():
            newest = f"(SELECT max({column}) FROM {table}) - {most}"
            if table == "letters":  # their numbers have gaps
                newest = f"(SELECT n FROM letters ORDER BY n DESC LIMIT 1 OFFSET {most})"
            database.execute(f"DELETE FROM {table} WHERE {column} <= {newest}")


def bounds(replay: str) -> dict[str, str]:
    """Each table with its bound, in words. replay: how long the log keeps.

    >>> bounds("30d")["letters"]
    '30d (keep.replay), at most the newest 50,000'
    """
    kept = dict.fromkeys(LOGGED, "as long as the topics") | {table: f"{replay} (keep.replay)" for table in TIMED}
    for table, (column, most) in NEWEST.items():
        what = f"the newest {most:,}" + ("" if column == "n" else f" {column}s")
        kept[table] = f"{kept[table]}, at most {what}" if table in TIMED else what
    return kept | {"meta": "a row for each fact", "reads": "a row for each partition"}


def sizes(database: sqlite3.Connection) -> dict[str, int]:
    """Number of rows of each table. Texts are not counted, which would read them all: each unsealed answer has one."""
    tables = bounds("").keys() - {"texts", "words"}
    found = {table: int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) for table in sorted(tables)}
    (num_sealed,) = database.execute("SELECT count(*) FROM answers WHERE sealed > 0").fetchone()
    return found | dict.fromkeys(("texts", "words"), found["answers"] - num_sealed)


def _held(record: Record) -> Control | Block | None:
    """The decoded record, sealed sections shut; None where it does not decode. Raises UnknownMajor."""
    if is_claim(record.value):
        return None
    try:
        return decode(record.value)
    except BadFrame:
        return None
