"""What the pages search and draw: a SQLite file beside the run, folded from the log.

Guarantees: a cache of the log and of nothing else, which may be removed at any time; a log that begins anew makes it begin
anew; of what is sealed it holds headers and never text; what is older than the log keeps goes, and every table has a bound
(`bounds`). One process writes it, any number read. Text is held up to MAX_TEXT characters: the last question, and the answer;
of the whole answer its length and hash.
"""

import fcntl
import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from infra.ledger.account import VALIDATION
from infra.ledger.rows import number
from schemas import Experience
from schemas.errors import BadFrame
from schemas.ids import session_of

LAYOUT = 5
MAX_TEXT = 2000
SCHEMA = """
CREATE TABLE reads (topic TEXT, part INTEGER, next INTEGER, PRIMARY KEY (topic, part)) WITHOUT ROWID;
CREATE TABLE answers (
  n INTEGER PRIMARY KEY, key INTEGER UNIQUE, id TEXT, grp INTEGER, time_ms INTEGER, lane TEXT, tenant TEXT, session TEXT,
  suite TEXT, task TEXT, lo INTEGER, hi INTEGER, tokens INTEGER, sealed INTEGER, made INTEGER, reward REAL, advantage REAL,
  fate TEXT NOT NULL DEFAULT '', said INTEGER NOT NULL DEFAULT 0, rated REAL
);
CREATE TABLE scores (name TEXT, n INTEGER, value REAL, PRIMARY KEY (name, n)) WITHOUT ROWID;
CREATE TABLE uses (step INTEGER, n INTEGER, PRIMARY KEY (step, n)) WITHOUT ROWID;
CREATE TABLE texts (n INTEGER PRIMARY KEY, asked TEXT, answered TEXT, size INTEGER, digest INTEGER);
CREATE VIRTUAL TABLE words USING fts5 (asked, answered, content = 'texts', content_rowid = 'n');
CREATE TABLE fates (version INTEGER, minute INTEGER, fate TEXT, count INTEGER, PRIMARY KEY (version, minute, fate))
  WITHOUT ROWID;
CREATE TABLE tasks (task TEXT PRIMARY KEY, judged INTEGER, total REAL, newest INTEGER, time_ms INTEGER) WITHOUT ROWID;
CREATE TABLE curves (name TEXT, version INTEGER, time_ms INTEGER, value REAL, kept INTEGER,
  PRIMARY KEY (name, version)) WITHOUT ROWID;
CREATE TABLE evals (suite TEXT, version INTEGER, time_ms INTEGER, right INTEGER, asked INTEGER, low REAL, high REAL,
  PRIMARY KEY (suite, version)) WITHOUT ROWID;
CREATE TABLE letters (n INTEGER PRIMARY KEY, part INTEGER, offset INTEGER, time_ms INTEGER, topic TEXT, at TEXT, stage TEXT,
  reason TEXT, error TEXT, size INTEGER, UNIQUE (part, offset));
CREATE TABLE marks (n INTEGER PRIMARY KEY, part INTEGER, offset INTEGER, time_ms INTEGER, done_by TEXT, UNIQUE (part, offset));
CREATE TABLE orders (n INTEGER PRIMARY KEY, offset INTEGER UNIQUE, time_ms INTEGER, word TEXT, owner TEXT, about TEXT,
  reason TEXT);
CREATE TABLE steps (step INTEGER PRIMARY KEY, token INTEGER, time_ms INTEGER, version INTEGER);
CREATE TABLE fence (token INTEGER);
CREATE TABLE published (version INTEGER PRIMARY KEY, step INTEGER, time_ms INTEGER);
CREATE INDEX by_time ON answers (time_ms);
CREATE INDEX by_group ON answers (grp);
CREATE INDEX by_lane ON answers (lane);
CREATE INDEX by_tenant ON answers (tenant);
CREATE INDEX by_session ON answers (session) WHERE session != '';
CREATE INDEX by_version ON answers (hi);
CREATE INDEX by_fate ON answers (fate);
CREATE INDEX by_said ON answers (said) WHERE said > 0;
CREATE INDEX by_reward ON answers (reward) WHERE reward IS NOT NULL;
CREATE INDEX by_suite ON answers (suite, hi) WHERE suite != '';
CREATE INDEX by_reason ON letters (reason);
CREATE INDEX by_curve ON curves (version);
CREATE INDEX by_eval ON evals (version);
CREATE INDEX by_share ON tasks (total / judged, judged DESC);
CREATE INDEX by_ease ON tasks (total / judged DESC, judged DESC);
CREATE INDEX by_judged ON tasks (judged);
CREATE INDEX by_judging ON tasks (time_ms);
CREATE INDEX by_answer ON uses (n);
CREATE INDEX by_task ON answers (task) WHERE task != '';
CREATE INDEX by_made ON answers (made) WHERE made > 0;
CREATE INDEX by_sealed ON answers (sealed) WHERE sealed > 0;
"""
# Beside the file, of one connection: what became of which answers, until it is written.
ENDED = "CREATE TEMP TABLE ended (n INTEGER PRIMARY KEY, fate TEXT)"
OLD = "CREATE TEMP TABLE old (n INTEGER PRIMARY KEY)"  # and which are to be forgotten
COUNTED = "ON CONFLICT DO UPDATE SET count = count + excluded.count"
TRAINED = "trained"


def key_of(text: str) -> int:
    """An experience's id, or any text, as 63 bits."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace")) >> 1


def inode(path: Path) -> int:
    """Which file lies there; 0 for none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def lists(database: sqlite3.Connection, experience: str) -> bool:
    """Whether the index has this experience."""
    return bool(database.execute("SELECT 1 FROM answers WHERE key = ?", (key_of(experience),)).fetchone())


class ConsoleIndex:
    """The index as its one writer has it. Not safe for concurrent use; `is_writer` is False where another process writes.

    turn: held by a thread while it writes, so that `close` waits for one that still runs after its caller was cancelled.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.turn = threading.Lock()
        self._lock = path.with_suffix(".lock").open("w", encoding="ascii")
        self.is_writer = False
        self.claim()
        self.database = self._connected()
        (layout,) = self.database.execute("PRAGMA user_version").fetchone()
        if self.is_writer and layout != LAYOUT:
            if layout:  # of another release: to empty a long file takes as long as to read it
                self.database.close()
                for end in ("", "-wal", "-shm"):
                    path.with_name(path.name + end).unlink(missing_ok=True)
                self.database = self._connected()
            self.begin_anew()
        self._inode = inode(path)

    def _connected(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=60.0, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(ENDED)
        database.execute(OLD)
        # A cache of the log: what the machine loses of it is read again.
        database.execute("PRAGMA synchronous = OFF" if self.is_writer else "PRAGMA query_only = ON")
        database.execute("PRAGMA cache_size = -32000")
        return database

    def is_there(self) -> bool:
        """Whether the file is still where it was made: it may have been removed."""
        return inode(self.path) == self._inode

    def claim(self) -> bool:
        """Become the writer if there is none; the kernel lets go for one that dies."""
        if not self.is_writer:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_writer = True
            except BlockingIOError:
                return False
        return True

    def take_over(self) -> bool:
        """Write from here on, if the process that wrote is gone."""
        if self.is_writer or not self.claim():
            return False
        self.database.execute("PRAGMA query_only = OFF")
        return True

    def close(self) -> None:
        """Close the file, once no thread writes."""
        with self.turn:
            self.database.close()
        self._lock.close()

    def begin_anew(self) -> None:
        """Forget everything, at once: who reads meanwhile finds all as it was, or nothing yet."""
        found: list[tuple[str, str]] = self.database.execute(
            "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' AND name NOT LIKE 'words_%'"
            " AND type IN ('table', 'trigger')"
        ).fetchall()
        drops = "".join(f"DROP {kind} IF EXISTS {name};\n" for kind, name in found)
        self.database.executescript(f"BEGIN IMMEDIATE;\n{drops}{SCHEMA}PRAGMA user_version = {LAYOUT};\nCOMMIT;")

    def reads(self) -> dict[tuple[str, int], int]:
        """How far each partition was read."""
        rows = self.database.execute("SELECT topic, part, next FROM reads")
        return {(topic, part): following for topic, part, following in rows}

    def note_reads(self, topic: str, following: Mapping[int, int]) -> None:
        """Remember how far a topic was read."""
        self.database.executemany(
            "INSERT OR REPLACE INTO reads VALUES (?, ?, ?)", [(topic, part, at) for part, at in following.items()]
        )

    def prune(self, before_ms: int, at_most: int = 20_000) -> int:
        """Forget answers older than the log keeps, some at a time, in whatever order they were read; how many. What has bounds
        of its own goes by `bounds.trim`.
        """
        old = self.database.execute("SELECT n FROM answers WHERE time_ms < ? LIMIT ?", (before_ms, at_most)).fetchall()
        if not old:
            return 0
        with self.database:
            self.database.execute("DELETE FROM old")
            self.database.executemany("INSERT INTO old VALUES (?)", old)
            those = "IN (SELECT n FROM old)"
            self.database.execute(
                "INSERT INTO words (words, rowid, asked, answered)"
                f" SELECT 'delete', n, asked, answered FROM texts WHERE n {those}"
            )
            self.database.execute(f"DELETE FROM texts WHERE n {those}")
            self.database.execute(f"DELETE FROM scores WHERE n {those} AND name IN (SELECT DISTINCT name FROM scores)")
            self.database.execute(f"DELETE FROM uses WHERE n {those}")
            gone = self.database.execute(f"DELETE FROM answers WHERE n {those}").rowcount
            self.database.execute("DELETE FROM fates WHERE minute < ?", (before_ms // 60_000,))
        return gone

    def add(self, members: Sequence[tuple[int, Experience]]) -> None:
        """Answers as they were published, with their times; those that are here already stay as they are."""
        fresh: dict[int, tuple[int, Experience]] = {}
        for time_ms, one in sorted(members, key=lambda pair: pair[0]):
            fresh.setdefault(key_of(one.id), (time_ms, one))
        for known in self._known(fresh):
            del fresh[known]
        (last,) = self.database.execute("SELECT coalesce(max(n), 0) FROM answers").fetchone()
        numbered = list(enumerate(fresh.values(), last + 1))
        self.database.executemany(
            "INSERT INTO answers (n, key, id, grp, time_ms, lane, tenant, session, suite, task, lo, hi, tokens, sealed, made,"
            " fate) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(n, *_row(time_ms, one)) for n, (time_ms, one) in numbered],
        )
        self.database.execute(
            "INSERT INTO fates SELECT hi, time_ms / 60000, fate, count(*) FROM answers WHERE n > ? AND suite = ''"
            f" GROUP BY 1, 2, 3 {COUNTED}",
            (last,),
        )
        texts = [(n, *texts_of(one)) for n, (_, one) in numbered if not one.key_id]
        self.database.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?)", texts)
        words = [text[:3] for text in texts]
        self.database.executemany("INSERT INTO words (rowid, asked, answered) VALUES (?, ?, ?)", words)

    def _known(self, keys: Iterable[int]) -> list[int]:
        """Which of these answers are here."""
        rows = self.database.execute(
            "SELECT key FROM answers WHERE key IN (SELECT value FROM json_each(?))", (json.dumps([*keys]),)
        )
        return [key for (key,) in rows]

    def end(self, rows: Sequence[tuple[str, int]]) -> None:
        """Fates of experiences by key; the first word counts, unless it was trained."""
        self.end_those("SELECT n, ? FROM answers WHERE key = ? AND fate = ''", rows)

    def end_those(self, select: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Fates by answer: those that `select` finds, for each of the rows; of one answer the first counts."""
        database = self.database
        database.executemany(f"INSERT OR IGNORE INTO ended {select}", rows)
        for fate, count in (("answers.fate", "-count(*)"), ("ended.fate", "count(*)")):
            database.execute(
                f"INSERT INTO fates SELECT hi, time_ms / 60000, {fate}, {count} FROM ended CROSS JOIN answers USING (n)"
                f" WHERE suite = '' AND answers.fate != ended.fate GROUP BY 1, 2, 3 {COUNTED}"
            )
        database.execute(
            "UPDATE answers SET fate = (SELECT fate FROM ended WHERE ended.n = answers.n) WHERE n IN (SELECT n FROM ended)"
        )
        database.execute("DELETE FROM ended")

    def many(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """One statement for many rows."""
        self.database.executemany(statement, rows)


def texts_of(one: Experience) -> tuple[str, str, int | None, int | None]:
    """The last question and the answer, cut; characters and hash of the whole answer. What cannot be read is "" and None, and
    its page says why.
    """
    try:
        messages = one.messages
    except BadFrame:
        return "", "", None, None
    asked = next((each.content for each in reversed(messages) if each.role != "assistant"), "")
    answered = next((each.content for each in reversed(messages) if each.role == "assistant"), "")
    return asked[:MAX_TEXT], answered[:MAX_TEXT], len(answered), key_of(answered)


def _row(time_ms: int, one: Experience) -> tuple[object, ...]:
    return (
        key_of(one.id), one.id, number(one.group), time_ms, one.lane, one.tenant, session_of(one.group), one.suite, one.task,
        one.min_version, one.max_version, one.num_sampled, int(bool(one.key_id)), int(bool(one.parent)),
        VALIDATION if one.held_out and not one.suite else "",
    )  # fmt: skip


def plain(numbers: object) -> str:
    """Small numbers as JSON."""
    return json.dumps(numbers, sort_keys=True)
