"""The report of a reprocessing: totals, and differences from the record by kind and reason, with a few examples each."""

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from streams.reprocess.outcome import Difference, Outcome, differences

EXAMPLES = 3
FLUSH = 2000
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Outcome)


class OutcomeTable:
    """Recorded outcomes by key, on disk, the first of each key. Not safe for concurrent use."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE recorded (key TEXT PRIMARY KEY, parent TEXT NOT NULL, data BLOB NOT NULL) WITHOUT ROWID;"
            "CREATE TABLE met (key TEXT PRIMARY KEY) WITHOUT ROWID;"
        )
        self._new: dict[str, Outcome] = {}
        self._met: set[str] = set()

    def put(self, outcome: Outcome) -> None:
        """Add a recorded outcome; a second outcome of a key (a repeated send) changes nothing."""
        self._new.setdefault(outcome.key, outcome)
        if len(self._new) >= FLUSH:
            self._flush()

    def get(self, key: str) -> Outcome | None:
        found = self._new.get(key)
        if found is not None:
            return found
        row = self._connection.execute("SELECT data FROM recorded WHERE key = ?", (key,)).fetchone()
        return None if row is None else _decoder.decode(row[0])

    def meet(self, key: str) -> bool:
        """Note that the range has an outcome `key`; False if that was known."""
        if key in self._met or self._connection.execute("SELECT 1 FROM met WHERE key = ?", (key,)).fetchone():
            return False
        self._met.add(key)
        if len(self._met) >= FLUSH:
            self._flush()
        return True

    def orphans(self) -> Iterator[Outcome]:
        """Yield recorded outcomes made from an outcome of the range, and missing from the range."""
        self._flush()
        rows = self._connection.execute(
            "SELECT data FROM recorded WHERE parent != '' AND parent IN (SELECT key FROM met)"
            " AND key NOT IN (SELECT key FROM met)"
        )
        for (data,) in rows:
            yield _decoder.decode(data)

    def _flush(self) -> None:
        rows = [(key, outcome.parent, _encoder.encode(outcome)) for key, outcome in self._new.items()]
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT OR IGNORE INTO recorded VALUES (?, ?, ?)", rows)
        self._connection.executemany("INSERT OR IGNORE INTO met VALUES (?)", [(key,) for key in self._met])
        self._connection.execute("COMMIT")
        self._new.clear()
        self._met.clear()

    def close(self) -> None:
        self._connection.close()


class Example(msgspec.Struct, frozen=True):
    """One case of a change. key: of the experience. old: as recorded. new: as it comes out now."""

    key: str
    old: str
    new: str


class Change(msgspec.Struct):
    """All differences of one kind and reason.

    kind, reason: as in Difference. count: their number. examples: the first EXAMPLES of them.
    """

    kind: str
    reason: str
    count: int = 0
    examples: list[Example] = []


class ReprocessReport(msgspec.Struct):
    """The result of a reprocessing.

    stage: that was run. records: read from the range. kept: experiences (tasks) that go on. dropped: the others, by reason.
    repeated: experiences that came out before. compared: experiences that the log has a record of; unrecorded: the others.
    behind: records of the range that the workers have not committed yet, left out of a comparison. open_groups: groups that
    wait for records behind the range. reused_scores: verdicts taken from the log instead of being asked for again.
    other_code: reused scores that were recorded under the same version by other code, by name. changes: differences from
    the record, the most frequent first.
    """

    stage: str
    records: int = 0
    kept: int = 0
    dropped: dict[str, int] = {}
    repeated: int = 0
    compared: int = 0
    unrecorded: int = 0
    behind: int = 0
    open_groups: int = 0
    reused_scores: int = 0
    other_code: dict[str, int] = {}
    changes: list[Change] = []

    @property
    def is_same(self) -> bool:
        return not self.changes

    def take(self, kept: int, dropped: Mapping[str, int], records: int) -> None:
        self.records += records
        self.kept += kept
        for reason, count in dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def compare(self, table: OutcomeTable, new: Outcome, absent: Outcome | None = None) -> None:
        """Compare with the record; absent: the outcome that is meant if nothing is recorded under the key."""
        if not table.meet(new.key):
            self.repeated += 1
            return
        old = table.get(new.key) or absent
        if old is None:
            if new.parent and table.get(new.parent) is not None:
                self.note(Difference("newly made", "", "", f"from {new.parent}"), new.key)
            else:
                self.unrecorded += 1
            return
        self.compared += 1
        for difference in differences(old, new):
            self.note(difference, new.key)

    def note(self, difference: Difference, key: str) -> None:
        for change in self.changes:
            if (change.kind, change.reason) == (difference.kind, difference.reason):
                break
        else:
            change = Change(difference.kind, difference.reason)
            self.changes.append(change)
        change.count += 1
        if len(change.examples) < EXAMPLES:
            change.examples.append(Example(key, difference.old, difference.new))

    def finish(self, table: OutcomeTable) -> None:
        """Note recorded outcomes that are no longer made, and sort the changes."""
        for gone in table.orphans():
            self.note(Difference("no longer made", "", f"from {gone.parent}", ""), gone.key)
        self.changes.sort(key=lambda change: (-change.count, change.kind, change.reason))
