"""What the log records of a range, put aside on disk by key, so that comparing needs little memory however long it is."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from streams.reprocess.outcome import Reprocessed

FLUSH = 2000
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Reprocessed)


class OutcomeShelf:
    """Outcomes by key, the first of each. Not safe for concurrent use."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE recorded (key TEXT PRIMARY KEY, parent TEXT NOT NULL, data BLOB NOT NULL) WITHOUT ROWID;"
            "CREATE TABLE met (key TEXT PRIMARY KEY) WITHOUT ROWID;"
        )
        self._new: dict[str, Reprocessed] = {}
        self._met: set[str] = set()

    def put(self, outcome: Reprocessed) -> None:
        """Keep what the log records; a second record of one key (a repeated send) changes nothing."""
        self._new.setdefault(outcome.key, outcome)
        if len(self._new) >= FLUSH:
            self.flush()

    def get(self, key: str) -> Reprocessed | None:
        """What the log records under `key`."""
        found = self._new.get(key)
        if found is not None:
            return found
        row = self._connection.execute("SELECT data FROM recorded WHERE key = ?", (key,)).fetchone()
        return None if row is None else _decoder.decode(row[0])

    def meet(self, key: str) -> bool:
        """Note that `key` came out of the range; False if it did before."""
        if key in self._met or self._connection.execute("SELECT 1 FROM met WHERE key = ?", (key,)).fetchone():
            return False
        self._met.add(key)
        if len(self._met) >= FLUSH:
            self.flush()
        return True

    def orphans(self) -> Iterator[Reprocessed]:
        """Recorded, made from what was met, and not met itself."""
        self.flush()
        rows = self._connection.execute(
            "SELECT data FROM recorded WHERE parent != '' AND parent IN (SELECT key FROM met)"
            " AND key NOT IN (SELECT key FROM met)"
        )
        for (data,) in rows:
            yield _decoder.decode(data)

    def flush(self) -> None:
        """Write what is still in memory."""
        rows = [(key, one.parent, _encoder.encode(one)) for key, one in self._new.items()]
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT OR IGNORE INTO recorded VALUES (?, ?, ?)", rows)
        self._connection.executemany("INSERT OR IGNORE INTO met VALUES (?)", [(key,) for key in self._met])
        self._connection.execute("COMMIT")
        self._new.clear()
        self._met.clear()

    def close(self) -> None:
        """The file may be removed."""
        self._connection.close()
