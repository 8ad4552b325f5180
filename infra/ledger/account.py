"""The account of a run: the fate of every published experience; `audit` reads it from the log, `drain` waits until it is whole.

Precedence: trained, else dropped with a reason, else pending. A batch whose step was skipped or rolled back trained nothing:
experiences that no other batch trained are then dropped for that reason.

    drain: Directive(drain) in policies ─> master: draining … drained ─> account until nothing is on its way

Guarantees: memory does not grow with the log, since SQLite spills its tables to a file without a name (see TMPDIR). Topics
are read downstream first, so that experiences that moved on meanwhile show as pending, never as lost. Where the journal was
trimmed, experiences older than its first kept record are left out: the trimmed part had their fate. Demonstrations that wait
in the buffer stay there during a drain, and production traffic continues.
"""

import asyncio
import itertools
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, closing
from typing import Any

import msgspec

from infra.log.log import Log, LogMessage
from schemas import (
    Batch,
    Block,
    Closure,
    DeadLetter,
    Directive,
    Drawn,
    DropMarker,
    Progress,
    Rollback,
    Skip,
    decode,
    topics,
)
from schemas.errors import BadFrame, ConfigError, UnknownMajor
from schemas.fields import GROUP_OVER
from schemas.journal import Effective, JournalRecord, Ranges
from schemas.topics import POLICIES, REPORTS, Topic

VALIDATION = "kept for validation"
MAX_IDS = 100_000
CACHE_KIB = 65_536

# Ranks of an experience's own reasons: the highest counts.
HELD_OUT, LETTER, STUB, LEFT_OUT = range(4)
SCHEMA = f"""
PRAGMA cache_size = -{CACHE_KIB}; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
CREATE TABLE published (id TEXT PRIMARY KEY, grp TEXT, attempt INT) WITHOUT ROWID;
CREATE TABLE reasons (id TEXT, rank INT, reason TEXT, PRIMARY KEY (id, rank)) WITHOUT ROWID;
CREATE TABLE closures (grp TEXT, attempt INT, outcome TEXT, reason TEXT, drops BLOB, PRIMARY KEY (grp, attempt)) WITHOUT ROWID;
CREATE TABLE group_drops (grp TEXT PRIMARY KEY, reason TEXT) WITHOUT ROWID;
CREATE TABLE buffered (id TEXT PRIMARY KEY, lane TEXT) WITHOUT ROWID;
CREATE TABLE trained (id TEXT, step INT, lane TEXT, revision INT, use INT, buffer_offset INT);
CREATE TABLE masked (step INT, count INT);
CREATE TABLE undone (step INT PRIMARY KEY, reason TEXT);
CREATE VIEW effective AS SELECT * FROM trained WHERE step NOT IN (SELECT step FROM undone);
BEGIN;
"""
# Ids begin with group and attempt, so the members of a group are neighbours in the order of their ids.
FATES = """
SELECT p.grp, p.attempt, p.id, EXISTS (SELECT 1 FROM effective e WHERE e.id = p.id),
  (SELECT u.reason FROM trained t JOIN undone u USING (step) WHERE t.id = p.id ORDER BY t.rowid DESC LIMIT 1),
  (SELECT r.reason FROM reasons r WHERE r.id = p.id ORDER BY r.rank DESC LIMIT 1),
  (SELECT b.lane FROM buffered b WHERE b.id = p.id), c.outcome, c.reason, c.drops, d.reason
FROM published p LEFT JOIN closures c USING (grp, attempt) LEFT JOIN group_drops d USING (grp) ORDER BY p.id
"""
USES = """
SELECT lane, uses, count(*) FROM (SELECT lane, count(*) AS uses FROM effective GROUP BY lane, id) GROUP BY lane, uses
"""
TWICE = "SELECT DISTINCT id FROM (SELECT id FROM trained GROUP BY id, revision, use HAVING count(*) > 1) ORDER BY id LIMIT ?"
UNKNOWN = """
SELECT DISTINCT id FROM effective WHERE buffer_offset >= ? AND id NOT IN (SELECT id FROM published)
  AND id NOT IN (SELECT id FROM buffered) ORDER BY id LIMIT ?
"""


class Account(msgspec.Struct, frozen=True):
    """Fates of all published experiences: trained at least once, dropped by reason, or pending.

    uses: lane → times trained → experiences. trained_twice: ids whose (revision, use) the journal lists more than once, empty
    unless a promise is broken. unknown: trained ids that were neither published nor are in the buffer, where processors put
    synthetic experiences. waiting: lane → pending ones in the buffer that are drawn without order (demonstrations),
    which a drain does not use up. repeated: second deliveries. masked: sampled tokens of trained experiences that were
    too old to be targets. cancelled: reason → stopped episodes, of which nothing was published. Lists of ids end after MAX_IDS.
    """

    published: int
    trained: int
    dropped: dict[str, int]
    pending: int
    uses: dict[str, dict[int, int]]
    trained_twice: tuple[str, ...]
    unknown: tuple[str, ...]
    pending_ids: tuple[str, ...]
    waiting: dict[str, int] = {}
    repeated: int = 0
    cancelled: dict[str, int] = {}
    masked: int = 0

    @property
    def on_the_way(self) -> int:
        """Pending, and not merely waiting to be drawn: 0 after a drain."""
        return self.pending - sum(self.waiting.values())

    @property
    def is_clean(self) -> bool:
        """Nothing was trained twice and nothing came from nowhere."""
        return not self.trained_twice and not self.unknown


class Ledger:
    """Folds the topics of one app, each in its own order; the order between topics does not matter.

    buffer_begins: oldest kept offset of `buffer`; experiences that were trained from offsets below it have an unknown origin.
    """

    def __init__(self, run: str, buffer_begins: int = 0) -> None:
        self.database = sqlite3.connect("", isolation_level=None)  # a temporary file of SQLite's own
        self.database.executescript(SCHEMA)
        self._buffer_begins = buffer_begins
        self._journal = Effective(run)
        self._skipped, self._rolled_back = Ranges(), Ranges()
        self._deliveries = 0

    def fold(self, topic: str, message: LogMessage) -> None:
        """Take in a record of a topic, named as in `schemas.topics`. Raises ConfigError where the disk is full."""
        try:
            for table, *row in self._rows_of(topic, message.value):
                places = ", ".join("?" * len(row))
                self.database.execute(f"INSERT OR REPLACE INTO {table} VALUES ({places})", row)
        except sqlite3.OperationalError as error:
            raise ConfigError(f"TMPDIR: the disk of temporary files: {error}; name a folder with more room") from error

    def account(self) -> Account:
        """The account of all records folded in so far."""
        self.database.execute("CREATE INDEX IF NOT EXISTS trained_by_id ON trained (id)")
        steps = self.database.execute("SELECT step FROM trained UNION SELECT step FROM masked").fetchall()
        undone = [(step, "step skipped") for (step,) in steps if step in self._skipped]
        undone += [(step, "rolled back") for (step,) in steps if step in self._rolled_back]
        self.database.executemany("INSERT OR REPLACE INTO undone VALUES (?, ?)", undone)
        dropped, waiting, pending_ids = Counter[str](), Counter[str](), list[str]()
        published = trained = pending = 0
        for name, is_trained, reason, lane in self._fates():
            published += 1
            trained += is_trained
            if not is_trained and reason:
                dropped[reason] += 1
            elif not is_trained:
                pending += 1
                if lane not in ("", "usual"):  # a step that is to come takes all of the usual lane
                    waiting[lane] += 1
                if len(pending_ids) < MAX_IDS:
                    pending_ids.append(name)
        uses: dict[str, dict[int, int]] = {}
        for lane, times, count in self.database.execute(USES):
            uses.setdefault(lane, {})[times] = count
        cancelled = self.database.execute(
            "SELECT reason, count(*) FROM reasons WHERE rank = ? GROUP BY reason", (STUB,)
        )
        masked = "SELECT coalesce(sum(count), 0) FROM masked WHERE step NOT IN (SELECT step FROM undone)"
        return Account(
            published=published,
            trained=trained,
            dropped=most_first(dropped),
            pending=pending,
            uses=uses,
            trained_twice=tuple(name for (name,) in self.database.execute(TWICE, (MAX_IDS,))),
            unknown=tuple(name for (name,) in self.database.execute(UNKNOWN, (self._buffer_begins, MAX_IDS))),
            pending_ids=tuple(pending_ids),
            waiting=dict(sorted(waiting.items())),
            repeated=self._deliveries - published,
            cancelled=most_first({reason: count for reason, count in cancelled if reason == GROUP_OVER}),
            masked=self.database.execute(masked).fetchone()[0],
        )

    def close(self) -> None:
        self.database.close()

    def _rows_of(self, topic: str, value: object) -> Iterator[tuple[Any, ...]]:
        match topic:
            case "experiences" | "experts" if isinstance(value, Block):
                for member in value.experiences:
                    if not member.suite:  # evals are not trained and have an account of their own
                        self._deliveries += 1
                        yield "published", member.id, member.group, member.attempt
                        if member.held_out:
                            yield "reasons", member.id, HELD_OUT, VALIDATION
            case "verified" if isinstance(value, DropMarker):
                yield "reasons", value.id, STUB, value.reason
            case "buffer" if isinstance(value, Block):
                for member in value.experiences:
                    yield "buffered", member.id, member.lane
            case "progress" if isinstance(value, Closure):
                drops = msgspec.json.encode(value.drops) if value.drops else None
                yield "closures", value.group, value.attempt, value.outcome, value.reason, drops
            case "progress" if isinstance(value, Drawn):
                for group, reason in value.dropped.items():
                    yield "group_drops", group, reason
            case "batches" if isinstance(value, JournalRecord):
                yield from self._journaled(value)
            case "dead-letters" if isinstance(value, DeadLetter):
                for name in _ids_in(value):
                    yield "reasons", name, LETTER, value.reason

    def _journaled(self, record: JournalRecord) -> Iterator[tuple[Any, ...]]:
        if not self._journal.counts(record):
            return
        if isinstance(record, Skip):
            self._skipped.add(record.step, record.step)
        elif isinstance(record, Rollback):
            self._rolled_back.add(record.from_step, record.to_step)
        elif isinstance(record, Batch):
            for item in record.items:
                yield "trained", item.id, record.step, item.lane, item.revision, item.use, item.offset
            for item, reason in zip(record.dropped, record.dropped_because, strict=False):
                yield "reasons", item.id, LEFT_OUT, reason
            if record.masked:
                yield "masked", record.step, record.masked

    def _fates(self) -> Iterator[tuple[str, bool, str, str]]:
        """Each published experience: id, whether it was trained, else why it was dropped, its lane in the buffer."""
        for _, rows in itertools.groupby(self.database.execute(FATES), key=lambda row: row[:2]):
            members = list(rows)
            drops = Counter(msgspec.json.decode(members[0][9], type=dict[str, int]) if members[0][9] else {})
            # A member with a reason of its own has its marker already, and the closure counts it, too.
            drops -= Counter(own for *_, own, _, _, _, _, _ in members if own)
            # The closure says only how many were dropped for which reason: each next member has one of them.
            counts = most_first({reason: count for reason, count in drops.items() if reason != GROUP_OVER})
            left_out = itertools.chain(Counter(counts).elements(), itertools.repeat("dropped in collect"))
            for _, _, name, is_trained, undone, own, lane, outcome, closed_because, _, dropped_by_trainer in members:
                reason = undone or own
                if outcome == "buffered" and lane is None and not reason and not is_trained:
                    reason = next(left_out)
                elif outcome in ("buffered", None):
                    reason = reason or dropped_by_trainer
                else:
                    reason = reason or closed_because or outcome
                yield name, bool(is_trained), reason or "", lane or ""


def _ids_in(letter: DeadLetter) -> tuple[str, ...]:
    """Ids of the experiences in a dead letter, none where it cannot be decoded."""
    try:
        inner = decode(letter.value)
    except (BadFrame, UnknownMajor):
        return ()
    return tuple(member.id for member in inner.experiences) if isinstance(inner, Block) else ()


def most_first(counts: Mapping[str, int]) -> dict[str, int]:
    """Reasons in order of their counts.

    >>> most_first({"b": 1, "a": 1, "c": 2})
    {'c': 2, 'a': 1, 'b': 1}
    """
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


AGAIN_S = 1.0
MAX_AGAIN_S = 15.0


async def drain(log: Log, run: str, owner: str, timeout_s: float, tell: Callable[[str], None]) -> tuple[Account, bool]:
    """Drain; return the account, and True if nothing was outstanding or on its way in time. tell: takes progress texts."""
    _, reports_end = await log.bounds(REPORTS)
    order = await log.publish(POLICIES, Directive(order="drain", owner=owner))
    ends_s = time.monotonic() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await _master_drained(log, reports_end, order.offset, tell)
    except TimeoutError:
        return await audit(log, run), False
    again_s = AGAIN_S
    while True:
        account = await audit(log, run)
        tell(f"nothing is outstanding; {account.on_the_way:,} experiences are still on their way")
        if not account.on_the_way or time.monotonic() + again_s > ends_s:
            return account, not account.on_the_way
        await asyncio.sleep(again_s)  # stragglers of superseded attempts, on their way through verify and collect
        again_s = min(2 * again_s, MAX_AGAIN_S)


async def _master_drained(log: Log, start: Mapping[int, int], drain: int, tell: Callable[[str], None]) -> None:
    """Wait until a master that has read the directive at offset `drain` reports that nothing is outstanding."""
    async with aclosing(log.tail(REPORTS, start)) as messages:
        async for message in messages:
            report = message.value
            if not isinstance(report, Progress) or report.master is None or report.master.drained_to < drain:
                continue  # an older master, or one that has not read it yet
            tell(f"{report.master.state}: {report.master.outstanding:,} groups outstanding")
            if report.master.is_drained:
                return


# Downstream first: an id that is read here was published before.
ORDER = (
    topics.BATCHES, topics.PROGRESS, topics.BUFFER, topics.DEAD_LETTERS, topics.VERIFIED, topics.EXPERIENCES, topics.EXPERTS,
)  # fmt: skip
SOURCES = (topics.EXPERIENCES, topics.EXPERTS)

OnReading = Callable[[str, int], None]
"""A topic, and how many of its records are left to read; "" once all are read."""


async def audit(log: Log, run: str, on_reading: OnReading = lambda topic, left: None) -> Account:
    """The account of the kept log. Raises ConfigError where the disk of temporary files is full."""
    begins = await log.bus.beginning_offsets(log.name(topics.BUFFER))
    with closing(Ledger(run, buffer_begins=min(begins.values()))) as ledger:
        for topic in ORDER:
            # Read after the journal, so that experiences whose journal records were trimmed meanwhile are left out, too.
            since_ms = await _journal_begin_ms(log) if topic in SOURCES else 0
            async for message in _messages(log, topic, on_reading):
                if message.timestamp_ms >= since_ms:
                    ledger.fold(topic.name, message)
        on_reading("", 0)
        return ledger.account()


async def _journal_begin_ms(log: Log) -> int:
    """Time of the first kept record of a trimmed journal; 0 where all of it is kept."""
    begin = (await log.bounds(topics.BATCHES))[0][0]
    found = await log.at(topics.BATCHES, 0, [begin]) if begin else {}
    return found[begin].timestamp_ms if found else 0


async def _messages(log: Log, topic: Topic, on_reading: OnReading) -> AsyncIterator[LogMessage]:
    begins, ends = await log.bounds(topic)
    following = dict(begins)
    on_reading(topic.name, sum(ends.values()) - sum(following.values()))
    async with aclosing(log.chunks(topic, stops=ends)) as chunks:
        async for records in chunks:
            for record in records:
                yield await log.decoded(record)
            following |= {record.partition: record.offset + 1 for record in records}
            on_reading(topic.name, sum(ends.values()) - sum(following.values()))
