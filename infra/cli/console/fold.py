"""From the log to the index of the pages: what each record says of an answer, a version, a task.

Read downstream first and folded upstream first, so that whatever a record is about was folded before it. A record that does
not decode says nothing here: it is in dead-letters, where it has a page.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from infra.cli.console.index import TRAINED, ConsoleIndex, key_of
from infra.ledger.index import INDEXED, LogIndex
from infra.ledger.rows import number
from infra.log.blobs import is_claim
from infra.log.bus import Record
from infra.log.follower import Follower
from infra.log.log import Log
from schemas import (
    Batch,
    Block,
    Closure,
    Control,
    DeadLetter,
    Directive,
    Drawn,
    DropMarker,
    EvalResult,
    Experience,
    Feedback,
    Fence,
    PolicyEvent,
    Progress,
    Rollback,
    Skip,
    decode,
    topics,
)
from schemas.errors import BadFrame
from schemas.fields import is_kept_figure
from schemas.ids import ANSWER_PREFIX
from schemas.topics import Topic

# What a group goes through, in order.
FOLDED = (
    topics.EXPERTS, topics.EXPERIENCES, topics.VERIFIED, topics.EVALS, topics.BUFFER, topics.PROGRESS, topics.REPORTS,
    topics.BATCHES, topics.POLICIES, topics.DEAD_LETTERS,
)  # fmt: skip
MAX_RECORDS = 2000
MARK = "re-delivered"  # stage of a letter that says another was delivered again
Found = tuple[int, Record, Control | Block]  # time in ms, record, what it holds
OnLeft = Callable[
    [str, int, int], None
]  # a topic, how many of its records are still to be folded, how many the log has


class Stretch(msgspec.Struct, frozen=True):
    """Records of a topic that were read together. topic: theirs. records: in the order of their partitions. before, behind:
    where the reading of each partition was before them, and where it goes on.
    """

    topic: Topic
    records: Sequence[Record]
    before: Mapping[int, int]
    behind: Mapping[int, int]


class Folder:
    """Folds records of one run and one policy into an index."""

    def __init__(self, index: ConsoleIndex, *, run: str, policy: str) -> None:
        self._index = index
        self._run = run
        self._policy = policy

    async def refresh(
        self,
        log: Log,
        on_left: OnLeft = lambda topic, left, held: None,
        follower: Follower | None = None,
        trace: LogIndex | None = None,
    ) -> None:
        """Fold what has come since the last time. on_left: see `OnLeft`.

        follower: over FOLDED, of a caller that comes back every few seconds. trace: the index of where records lie, which
        is offered what is read here, so that it is read once for both. Wherever the two are, the reading begins at the
        one that is behind, and each takes what is new to it. What the pages list was offered before.
        """
        read = log.chunks if follower is None else follower.chunks
        bounds = {topic: await log.bounds(topic) for topic in reversed(FOLDED)}
        reads = self._index.reads()
        if any(
            bounds[topic][1].get(part, 0) < reads.get((topic.name, part), 0)
            for topic in FOLDED
            for part in bounds[topic][1]
        ):
            await asyncio.to_thread(self._index.begin_anew)
            reads = {}
        owns = {topic: _starts(topic, bounds[topic][0], reads) for topic in FOLDED}
        held = {topic: _left(*bounds[topic]) for topic in FOLDED}
        for topic, own in owns.items():
            on_left(topic.name, _left(own, bounds[topic][1]), held[topic])
        noted = await _resumed(log, trace, bounds) if trace is not None else {}
        for topic, own in owns.items():
            begins, ends = bounds[topic]
            of_trace = _starts(topic, begins, noted) if trace is not None and topic in INDEXED else own
            at = {part: min(start, of_trace[part]) for part, start in own.items()}
            if not _left(at, ends):
                continue
            async with aclosing(read(topic, at, ends, max_records=MAX_RECORDS)) as chunks:
                async for records in chunks:
                    behind = at | {record.partition: record.offset + 1 for record in records}
                    await self._take(log, trace, Stretch(topic, records, at, behind), own)
                    at = behind
                    on_left(topic.name, _left({part: max(at[part], own[part]) for part in at}, ends), held[topic])
            if at != at | ends:  # compaction may have taken the last
                await self._take(log, trace, Stretch(topic, (), at, at | ends), own)
            on_left(topic.name, 0, held[topic])

    async def _take(self, log: Log, trace: LogIndex | None, read: Stretch, own: Mapping[int, int]) -> None:
        """Both indexes take what is new to them. own: where the folding of each partition began, or begins."""
        claims = [(await log.decoded(one)).value if is_claim(one.value) else None for one in read.records]
        values = await asyncio.to_thread(held_in, read.records, claims)
        if trace is not None and read.topic in INDEXED:
            await trace.offer(read.topic, read.records, values, read.before, read.behind)
        pairs = zip(read.records, values, strict=True)
        fresh = [(record, value) for record, value in pairs if record.offset >= own[record.partition]]
        following = {part: at for part, at in read.behind.items() if at > own[part]}
        await asyncio.to_thread(self.fold, read.topic, fresh, following)

    async def tell(self, log: Log, on_left: OnLeft) -> None:
        """Say how much of each topic is still to be folded, and fold nothing."""
        reads = self._index.reads()
        for topic in FOLDED:
            begins, ends = await log.bounds(topic)
            on_left(topic.name, _left(_starts(topic, begins, reads), ends), _left(begins, ends))

    def fold(
        self, topic: Topic, records: Sequence[tuple[Record, Control | Block | None]], following: Mapping[int, int]
    ) -> None:
        """Records of one topic with what they hold (None for what does not decode), in one transaction. following: where the
        next of each partition begins.
        """
        found = [(record.timestamp_ms, record, value) for record, value in records if value is not None]
        with self._index.turn, self._index.database:
            if topic in (topics.EXPERIENCES, topics.EXPERTS):
                self._index.add(members_of(found))
            elif topic in (topics.VERIFIED, topics.EVALS):
                self._verified(found)
                self._decided(found)
            elif topic is topics.BUFFER:
                self._buffered(found)
            elif topic in (topics.PROGRESS, topics.REPORTS):
                self._progress(found)
            elif topic is topics.BATCHES:
                self._journaled(found)
            else:
                self._decided(found)
            self._index.note_reads(topic.name, following)

    def _verified(self, found: Sequence[Found]) -> None:
        members = members_of(found)
        self._index.add(members)
        self._index.many(
            "INSERT OR REPLACE INTO scores SELECT ?, n, ? FROM answers WHERE key = ?",
            [(score.name, score.value, key_of(one.id)) for _, one in members for score in one.scores],
        )
        self._index.many(
            "INSERT INTO tasks VALUES (?, 1, ?, ?, ?) ON CONFLICT DO UPDATE SET judged = judged + 1, total = total +"
            " excluded.total, newest = max(newest, excluded.newest), time_ms = max(time_ms, excluded.time_ms)",
            [
                (one.task, sum(score.value for score in one.scores) / len(one.scores), one.max_version, time_ms)
                for time_ms, one in members
                if one.task and one.scores
            ],
        )
        self._index.end([(one.reason, key_of(one.id)) for _, _, one in found if isinstance(one, DropMarker)])
        self._index.many(
            "UPDATE answers SET said = said + 1, rated = coalesce(?, rated) WHERE key = ?",
            [
                (one.value, key_of(one.ref.removeprefix(ANSWER_PREFIX)))
                for _, _, one in found
                if isinstance(one, Feedback)
            ],
        )

    def _buffered(self, found: Sequence[Found]) -> None:
        members = [(time_ms, one) for time_ms, one in members_of(found) if one.kind != "withdrawal"]
        self._index.add(members)
        self._index.many(
            "UPDATE answers SET reward = coalesce(?, reward), advantage = coalesce(?, advantage) WHERE key = ?",
            [(one.reward, one.advantage, key_of(one.id)) for _, one in members],
        )

    def _progress(self, found: Sequence[Found]) -> None:
        ended = []
        for time_ms, _, one in found:
            if isinstance(one, Closure) and one.outcome != "buffered":
                mine = f"{one.group}.{one.attempt}-"
                ended.append((one.reason or one.outcome, number(one.group), len(mine), mine))
            elif isinstance(one, Drawn):
                ended += [(why, number(group), 0, "") for group, why in one.dropped.items()]
            elif isinstance(one, Progress) and one.role == "train" and one.version >= 0:
                self._measured(one.version, time_ms, one.gauges, is_kept=False)
        self._index.end_those("SELECT n, ? FROM answers WHERE grp = ? AND fate = '' AND substr(id, 1, ?) = ?", ended)

    def _measured(self, version: int, time_ms: int, values: Mapping[str, float], *, is_kept: bool) -> None:
        """What was measured of a version: as its event keeps it, else as the trainer last reported it, for a day."""
        self._index.many(
            "INSERT INTO curves VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET time_ms = excluded.time_ms,"
            " value = excluded.value, kept = excluded.kept WHERE excluded.kept >= kept",
            [(name, version, time_ms, value, int(is_kept)) for name, value in values.items() if is_kept_figure(name)],
        )

    def _journaled(self, found: Sequence[Found]) -> None:
        for time_ms, _, one in found:
            if not isinstance(one, Batch | Skip | Rollback | Fence) or one.run != self._run:
                continue
            database = self._index.database
            (highest,) = database.execute("SELECT max(token) FROM fence").fetchone()
            if highest is not None and one.token < highest:
                continue
            # Of a journal whose beginning was trimmed the first record is taken for the fence: see `schemas.journal.Effective`.
            if highest is None or isinstance(one, Fence):
                database.execute("DELETE FROM fence")
                database.execute("INSERT INTO fence VALUES (?)", (one.token,))
            match one:
                case Batch():
                    row = (one.step, one.token, time_ms, one.version)
                    if database.execute("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?)", row).rowcount:
                        keys = [key_of(item.id) for item in one.items]
                        trained = [(TRAINED, key) for key in keys]
                        self._index.end_those("SELECT n, ? FROM answers WHERE key = ?", trained)
                        self._index.many(
                            "INSERT OR IGNORE INTO uses SELECT ?, n FROM answers WHERE key = ?",
                            [(one.step, key) for key in keys],
                        )
                        pairs = zip(one.dropped, one.dropped_because, strict=False)
                        self._index.end([(why, key_of(item.id)) for item, why in pairs])
                case Skip():
                    self._undone("step skipped", one.step, one.step)
                case Rollback():
                    self._undone("rolled back", one.from_step, one.to_step)

    def _undone(self, why: str, first: int, last: int) -> None:
        """What only these steps used is trained no more."""
        self._index.end_those(
            "SELECT n, ? FROM answers WHERE n IN (SELECT n FROM uses WHERE step BETWEEN ? AND ?)"
            " AND NOT EXISTS (SELECT 1 FROM uses WHERE uses.n = answers.n AND step NOT BETWEEN ? AND ?)",
            [(why, first, last, first, last)],
        )
        self._index.many("DELETE FROM uses WHERE step BETWEEN ? AND ?", [(first, last)])

    def _decided(self, found: Sequence[Found]) -> None:
        row: tuple[object, ...]
        for time_ms, record, one in found:
            match one:
                case EvalResult(policy=self._policy):
                    low, high = one.interval or (None, None)
                    asked = one.num_tasks * one.num_samples
                    row = (one.suite, one.version, time_ms, one.num_correct, asked, low, high)
                    self._index.many("INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?, ?, ?, ?)", [row])
                case PolicyEvent(policy=self._policy, event="published"):
                    self._measured(one.version, time_ms, one.stats, is_kept=True)
                    row = (one.version, one.step, time_ms)
                    self._index.many("INSERT OR REPLACE INTO published VALUES (?, ?, ?)", [row])
                case Directive() if one.order not in ("lease", "eval"):
                    row = (record.offset, time_ms, one.order, one.owner, one.about, one.reason)
                    self._index.many(
                        "INSERT OR IGNORE INTO orders (offset, time_ms, word, owner, about, reason) VALUES (?, ?, ?, ?, ?, ?)",
                        [row],
                    )
                case DeadLetter() if one.stage == MARK:
                    # Not in the row of the letter: that may lie in another partition, and be read after its mark.
                    row = (one.partition, one.offset, time_ms, one.error[:2000])
                    self._index.many(
                        "INSERT OR IGNORE INTO marks (part, offset, time_ms, done_by) VALUES (?, ?, ?, ?)", [row]
                    )
                case DeadLetter():
                    where = f"{one.topic}/{one.partition}@{one.offset}"
                    row = (
                        record.partition, record.offset, time_ms, one.topic, where, one.stage, one.reason, one.error[:2000],
                        len(one.value),
                    )  # fmt: skip
                    self._index.many(
                        "INSERT OR IGNORE INTO letters (part, offset, time_ms, topic, at, stage, reason, error, size)"
                        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        [row],
                    )


def members_of(found: Sequence[Found]) -> list[tuple[int, Experience]]:
    """Every experience of these records, with its record's time."""
    return [(time_ms, member) for time_ms, _, one in found if isinstance(one, Block) for member in one.experiences]


def _starts(topic: Topic, begins: Mapping[int, int], reads: Mapping[tuple[str, int], int]) -> dict[int, int]:
    """Where the folding of a topic continues, by partition."""
    return {part: max(begin, reads.get((topic.name, part), 0)) for part, begin in begins.items()}


def _left(following: Mapping[int, int], ends: Mapping[int, int]) -> int:
    return sum(max(0, end - following[part]) for part, end in ends.items())


async def _resumed(
    log: Log, trace: LogIndex, bounds: Mapping[Topic, tuple[dict[int, int], dict[int, int]]]
) -> dict[tuple[str, int], int]:
    """Where the index of `trace` goes on."""
    if trace.is_of_another_log(
        {(topic.name, part): end for topic in INDEXED for part, end in bounds[topic][1].items()}
    ):
        await trace.refresh(log)
    return await trace.resume({topic: bounds[topic][0] for topic in INDEXED})


def held_in(records: Sequence[Record], claims: Sequence[Control | Block | None]) -> list[Control | Block | None]:
    """What records hold, sealed sections shut; None for one that does not decode. claims: what was fetched from the store,
    beside each record. Raises UnknownMajor.
    """
    return [claimed or _held(record) for record, claimed in zip(records, claims, strict=True)]


def _held(record: Record) -> Control | Block | None:
    """What a record holds, sealed sections shut; None where it does not decode. Raises UnknownMajor."""
    if is_claim(record.value):
        return None
    try:
        return decode(record.value)
    except BadFrame:
        return None
