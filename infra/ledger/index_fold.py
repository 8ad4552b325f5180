"""Fold records of the log into the tables of the index (`infra.ledger.index`).

Places are the positions of the records about a group, by headers and keys. Pages, for the console, hold the facts of each
record about an answer, a version or a task. Sealed sections stay sealed: the index has their headers and never their text.
A record that does not decode adds no facts: it is in dead-letters, where it has a page.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence

import xxhash

from infra.ledger.account import VALIDATION
from infra.log.bus import Record
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
    topics,
)
from schemas.errors import BadFrame
from schemas.fields import is_kept_figure
from schemas.ids import ANSWER_PREFIX, experience_group, session_of
from schemas.journal import Effective
from schemas.topics import Topic

# Their header or their key is the group.
KEYED = (topics.EXPERIENCES, topics.EXPERTS, topics.VERIFIED, topics.BUFFER, topics.PROGRESS)
MAX_TEXT = 2000
MAX_ERROR = 2000
MARK = "re-delivered"  # stage of a letter that says another was delivered again
TRAINED = "trained"
TIME_BITS = 21  # of a row's number below its time in ms
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE reads (topic TEXT, part INTEGER, next INTEGER, pruned INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (topic, part))
  WITHOUT ROWID;
CREATE TABLE places (grp INTEGER, topic TEXT, part INTEGER, offset INTEGER, time_ms INTEGER);
CREATE TABLE sealed (key TEXT, grp INTEGER, session TEXT, PRIMARY KEY (key, grp)) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, token INTEGER, offset INTEGER, time_ms INTEGER);
CREATE TABLE trained (grp INTEGER, step INTEGER);
CREATE TABLE undone (first INTEGER, last INTEGER, reason TEXT);
CREATE TABLE policies (offset INTEGER PRIMARY KEY, version INTEGER, step INTEGER, time_ms INTEGER, event TEXT);
CREATE INDEX policies_by_version ON policies (version);
CREATE TABLE answers (
  n INTEGER PRIMARY KEY, key INTEGER UNIQUE, id TEXT, grp INTEGER, time_ms INTEGER, lane TEXT, tenant TEXT, session TEXT,
  suite TEXT, task TEXT, lo INTEGER, hi INTEGER, sealed INTEGER, made INTEGER, reward REAL, advantage REAL,
  fate TEXT NOT NULL DEFAULT '', said INTEGER NOT NULL DEFAULT 0, rated REAL
);
CREATE TABLE scores (name TEXT, n INTEGER, value REAL, PRIMARY KEY (name, n)) WITHOUT ROWID;
CREATE TABLE uses (step INTEGER, n INTEGER, PRIMARY KEY (step, n)) WITHOUT ROWID;
CREATE TABLE texts (n INTEGER PRIMARY KEY, asked TEXT, answered TEXT);
CREATE VIRTUAL TABLE words USING fts5 (asked, answered, content = 'texts', content_rowid = 'n');
CREATE TABLE curves (name TEXT, version INTEGER, time_ms INTEGER, value REAL, kept INTEGER,
  PRIMARY KEY (name, version)) WITHOUT ROWID;
CREATE TABLE evals (suite TEXT, version INTEGER, time_ms INTEGER, right INTEGER, asked INTEGER, low REAL, high REAL,
  PRIMARY KEY (suite, version)) WITHOUT ROWID;
CREATE TABLE letters (n INTEGER PRIMARY KEY, part INTEGER, offset INTEGER, time_ms INTEGER, topic TEXT, at TEXT, stage TEXT,
  reason TEXT, error TEXT, size INTEGER, UNIQUE (part, offset));
CREATE TABLE marks (n INTEGER PRIMARY KEY, part INTEGER, offset INTEGER, time_ms INTEGER, done_by TEXT, UNIQUE (part, offset));
CREATE TABLE orders (n INTEGER PRIMARY KEY, offset INTEGER UNIQUE, time_ms INTEGER, word TEXT, owner TEXT, about TEXT,
  reason TEXT);
CREATE INDEX by_group ON answers (grp);
CREATE INDEX by_lane ON answers (lane);
CREATE INDEX by_tenant ON answers (tenant);
CREATE INDEX by_session ON answers (session) WHERE session != '';
CREATE INDEX by_version ON answers (hi, fate, time_ms, suite);
CREATE INDEX by_fate ON answers (fate);
CREATE INDEX by_said ON answers (said) WHERE said > 0;
CREATE INDEX by_reward ON answers (reward) WHERE reward IS NOT NULL;
CREATE INDEX by_suite ON answers (suite, hi) WHERE suite != '';
CREATE INDEX by_task ON answers (task) WHERE task != '';
CREATE INDEX by_made ON answers (made) WHERE made > 0;
CREATE INDEX by_sealed ON answers (sealed) WHERE sealed > 0;
CREATE INDEX by_answer ON uses (n);
CREATE INDEX by_reason ON letters (reason);
CREATE INDEX by_curve ON curves (version);
CREATE INDEX by_eval ON evals (version);
"""
# The first reason counts, unless the answer was trained.
END_PENDING = "UPDATE answers SET fate = ? WHERE key = ? AND fate = ''"
Found = tuple[Record, Control | Block]


def number(text: str) -> int:
    """The hash of an id in 63 bits: an index of a million groups stays small, and records read back are checked by name."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) >> 1


class Folder:
    """Folds records of one run and one policy. The caller holds a transaction of `database`."""

    def __init__(self, database: sqlite3.Connection, *, run: str, policy: str) -> None:
        self._database = database
        self._run = run
        self._policy = policy
        fence = database.execute("SELECT value FROM meta WHERE name = 'fence'").fetchone()
        self._journal = Effective(run, -1 if fence is None else fence[0])
        for (step,) in database.execute("SELECT step FROM steps WHERE token = ?", (self._journal.token,)):
            self._journal.counts(Batch(run=run, token=self._journal.token, step=step, version=0, items=()))

    def fold(self, topic: Topic, records: Sequence[Record], values: Sequence[Control | Block | None]) -> None:
        """Fold records of one topic. values: each decoded record, None where it was not decoded or does not decode."""
        found = [(record, value) for record, value in zip(records, values, strict=True) if value is not None]
        if topic in KEYED:
            self._many("INSERT INTO places VALUES (?, ?, ?, ?, ?)", group_places(topic, records, found))
            self._many("INSERT OR IGNORE INTO sealed VALUES (?, ?, ?)", _sealed_keys(records))
        if topic is topics.BATCHES:
            self._journaled(found)
        elif topic is topics.POLICIES:
            self._decided(found)
        if topic in (topics.EXPERIENCES, topics.EXPERTS):
            self.add(_members(found))
        elif topic in (topics.VERIFIED, topics.EVALS):
            self._verified(found)
            self._evaluated(found)
        elif topic is topics.BUFFER:
            self._buffered(found)
        elif topic in (topics.PROGRESS, topics.REPORTS):
            self._reported(found)
        elif topic is topics.DEAD_LETTERS:
            self._set_aside(found)

    def add(self, members: Sequence[tuple[int, Experience]]) -> None:
        """Add answers as they were published, with their times in ms; answers that are here already stay unchanged."""
        fresh: dict[int, tuple[int, Experience]] = {}
        for time_ms, answer in sorted(members, key=lambda pair: pair[0]):
            fresh.setdefault(number(answer.id), (time_ms, answer))
        known = self._database.execute(
            "SELECT key FROM answers WHERE key IN (SELECT value FROM json_each(?))", (json.dumps([*fresh]),)
        )
        for (key,) in known.fetchall():
            del fresh[key]
        taken: dict[int, int] = {}
        numbered = [(self._next("answers", time_ms, taken), time_ms, answer) for time_ms, answer in fresh.values()]
        rows = [(n, *_answer_row(time_ms, answer)) for n, time_ms, answer in numbered]
        self._many(
            "INSERT INTO answers (n, key, id, grp, time_ms, lane, tenant, session, suite, task, lo, hi, sealed, made, fate)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        texts = [(n, *_answer_texts(answer)) for n, _, answer in numbered if not answer.key_id]
        self._many("INSERT OR REPLACE INTO texts VALUES (?, ?, ?)", texts)
        self._many("INSERT INTO words (rowid, asked, answered) VALUES (?, ?, ?)", texts)

    def _next(self, table: str, time_ms: int, taken: dict[int, int]) -> int:
        """The number of a new row: rows are in the order of their times, for any order of reading."""
        first = time_ms << TIME_BITS
        if time_ms not in taken:
            (taken[time_ms],) = self._database.execute(
                f"SELECT coalesce(max(n), ? - 1) FROM {table} WHERE n BETWEEN ? AND ?",
                (first, first, first + (1 << TIME_BITS) - 1),
            ).fetchone()
        taken[time_ms] += 1
        return taken[time_ms]

    def _many(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._database.executemany(statement, rows)

    def _verified(self, found: Sequence[Found]) -> None:
        members = _members(found)
        self.add(members)
        self._many(
            "INSERT OR REPLACE INTO scores SELECT ?, n, ? FROM answers WHERE key = ?",
            [(score.name, score.value, number(answer.id)) for _, answer in members for score in answer.scores],
        )
        drops = [(value.reason, number(value.id)) for _, value in found if isinstance(value, DropMarker)]
        self._many(END_PENDING, drops)
        said = [value for _, value in found if isinstance(value, Feedback)]
        self._many(
            "UPDATE answers SET said = said + 1, rated = coalesce(?, rated) WHERE key = ?",
            [(each.value, number(each.ref.removeprefix(ANSWER_PREFIX))) for each in said],
        )

    def _buffered(self, found: Sequence[Found]) -> None:
        members = [(time_ms, answer) for time_ms, answer in _members(found) if answer.kind != "withdrawal"]
        self.add(members)
        self._many(
            "UPDATE answers SET reward = coalesce(?, reward), advantage = coalesce(?, advantage) WHERE key = ?",
            [(answer.reward, answer.advantage, number(answer.id)) for _, answer in members],
        )

    def _reported(self, found: Sequence[Found]) -> None:
        ended: list[tuple[object, ...]] = []
        for record, value in found:
            if isinstance(value, Closure) and value.outcome != "buffered":
                start = f"{value.group}.{value.attempt}-"
                ended.append((value.reason or value.outcome, number(value.group), len(start), start))
            elif isinstance(value, Drawn):
                ended += [(why, number(group), 0, "") for group, why in value.dropped.items()]
            elif isinstance(value, Progress) and value.role == "train" and value.version >= 0:
                self._measured(value.version, record.timestamp_ms, value.gauges, kept=0)
        self._many("UPDATE answers SET fate = ? WHERE grp = ? AND fate = '' AND substr(id, 1, ?) = ?", ended)

    def _measured(self, version: int, time_ms: int, values: Mapping[str, float], *, kept: int) -> None:
        """Measures of a version: as its event keeps them (`kept` 1), else as the trainer last reported them."""
        self._many(
            "INSERT INTO curves VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET time_ms = excluded.time_ms,"
            " value = excluded.value, kept = excluded.kept WHERE excluded.kept >= kept",
            [(name, version, time_ms, value, kept) for name, value in values.items() if is_kept_figure(name)],
        )

    def _journaled(self, found: Sequence[Found]) -> None:
        for record, value in found:
            match value:
                case Fence():
                    self._journal.counts(value)
                case Batch() if self._journal.counts(value):
                    self._trained(record, value)
                case Skip() if self._journal.counts(value):
                    self._undone("step skipped", value.step, value.step, value.reason)
                case Rollback() if self._journal.counts(value):
                    self._undone("rolled back", value.from_step, value.to_step, value.reason)
        self._database.execute("INSERT OR REPLACE INTO meta VALUES ('fence', ?)", (self._journal.token,))

    def _trained(self, record: Record, batch: Batch) -> None:
        row = (batch.step, batch.token, record.offset, record.timestamp_ms)
        if not self._database.execute("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?)", row).rowcount:
            return
        groups = {number(experience_group(item.id)) for item in batch.items}
        self._many("INSERT INTO trained VALUES (?, ?)", [(group, batch.step) for group in groups])
        keys = [number(item.id) for item in batch.items]
        self._many("UPDATE answers SET fate = ? WHERE key = ?", [(TRAINED, key) for key in keys])
        use = "INSERT OR IGNORE INTO uses SELECT ?, n FROM answers WHERE key = ?"
        self._many(use, [(batch.step, key) for key in keys])
        dropped = zip(batch.dropped, batch.dropped_because, strict=False)
        self._many(END_PENDING, [(why, number(item.id)) for item, why in dropped])

    def _undone(self, why: str, first: int, last: int, reason: str) -> None:
        """These steps changed nothing in the end; an answer that no other step used is trained no more."""
        self._database.execute("INSERT INTO undone VALUES (?, ?, ?)", (first, last, f"{why}: {reason}"))
        self._database.execute(
            "UPDATE answers SET fate = ? WHERE n IN (SELECT n FROM uses WHERE step BETWEEN ? AND ?)"
            " AND NOT EXISTS (SELECT 1 FROM uses WHERE uses.n = answers.n AND step NOT BETWEEN ? AND ?)",
            (why, first, last, first, last),
        )
        self._database.execute("DELETE FROM uses WHERE step BETWEEN ? AND ?", (first, last))

    def _decided(self, found: Sequence[Found]) -> None:
        for record, value in found:
            time_ms = record.timestamp_ms
            match value:
                case PolicyEvent(policy=self._policy):
                    row = (record.offset, value.version, value.step, time_ms, value.event)
                    self._many("INSERT OR IGNORE INTO policies VALUES (?, ?, ?, ?, ?)", [row])
                    if value.event == "published":
                        self._measured(value.version, time_ms, value.stats, kept=1)
                case Directive() if value.order != "lease":
                    self._many(
                        "INSERT OR IGNORE INTO orders (offset, time_ms, word, owner, about, reason) VALUES (?, ?, ?, ?, ?, ?)",
                        [(record.offset, time_ms, value.order, value.owner, value.about, value.reason)],
                    )

    def _evaluated(self, found: Sequence[Found]) -> None:
        self._many(
            "INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    value.suite, value.version, record.timestamp_ms, value.num_correct, value.num_tasks * value.num_samples,
                    *(value.interval or (None, None)),
                )
                for record, value in found
                if isinstance(value, EvalResult) and value.policy == self._policy
            ],
        )  # fmt: skip

    def _set_aside(self, found: Sequence[Found]) -> None:
        taken: dict[int, int] = {}
        for record, letter in found:
            if not isinstance(letter, DeadLetter):
                continue
            if letter.stage == MARK:
                # Not in the row of the letter: that may lie in another partition, and be read after its mark.
                row = (letter.partition, letter.offset, record.timestamp_ms, letter.error[:MAX_ERROR])
                self._many("INSERT OR IGNORE INTO marks (part, offset, time_ms, done_by) VALUES (?, ?, ?, ?)", [row])
                continue
            letter_row = (
                self._next("letters", record.timestamp_ms, taken), record.partition, record.offset, record.timestamp_ms,
                letter.topic, f"{letter.topic}/{letter.partition}@{letter.offset}", letter.stage, letter.reason,
                letter.error[:MAX_ERROR], len(letter.value),
            )  # fmt: skip
            self._many("INSERT OR IGNORE INTO letters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [letter_row])


def group_places(
    topic: Topic, records: Iterable[Record], found: Iterable[Found]
) -> list[tuple[int, str, int, int, int]]:
    """Positions of records about a group, by header or else key, and by the trainer's drops; without the roles' own reports."""
    about: list[tuple[str, Record]] = []
    for record in records:
        headers = dict(record.headers)
        if topic != topics.PROGRESS or headers.get("kind") == b"closure":
            about.append((headers.get("group", record.key).decode(errors="replace"), record))
    about += [(group, record) for record, value in found if isinstance(value, Drawn) for group in value.dropped]
    return [(number(group), topic.name, at.partition, at.offset, at.timestamp_ms) for group, at in about]


def _sealed_keys(records: Iterable[Record]) -> Iterator[tuple[str, int, str]]:
    """Key id, group and its session ("" for none) of sealed records, by their headers."""
    for record in records:
        headers = {name: value.decode(errors="replace") for name, value in record.headers}
        if "key" in headers and "group" in headers:
            yield headers["key"], number(headers["group"]), session_of(headers["group"])


def _members(found: Sequence[Found]) -> list[tuple[int, Experience]]:
    return [
        (record.timestamp_ms, member)
        for record, value in found
        if isinstance(value, Block)
        for member in value.experiences
    ]


def _answer_row(time_ms: int, answer: Experience) -> tuple[object, ...]:
    return (
        number(answer.id), answer.id, number(answer.group), time_ms, answer.lane, answer.tenant, session_of(answer.group),
        answer.suite, answer.task, answer.min_version, answer.max_version, int(bool(answer.key_id)), int(bool(answer.parent)),
        VALIDATION if answer.held_out and not answer.suite else "",
    )  # fmt: skip


def _answer_texts(answer: Experience) -> tuple[str, str]:
    """The last question and the answer, cut to MAX_TEXT; "" for unreadable texts."""
    try:
        messages = answer.messages
    except BadFrame:
        return "", ""
    asked = next((each.content for each in reversed(messages) if each.role != "assistant"), "")
    answered = next((each.content for each in reversed(messages) if each.role == "assistant"), "")
    return asked[:MAX_TEXT], answered[:MAX_TEXT]
