"""What a judge has said and cost, in SQLite: a bounded cache of replies by content, and the spending of each day.

Guarantees: the oldest entries go first; a reservation is one transaction, so workers that share a file never pass the
budget together; a process that dies between reserving and settling has spent what it reserved.
"""

import sqlite3
from pathlib import Path

BUSY_S = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS replies (place INTEGER PRIMARY KEY AUTOINCREMENT, inputs TEXT UNIQUE, reply TEXT);
CREATE TABLE IF NOT EXISTS spending (day INTEGER PRIMARY KEY, usd REAL NOT NULL);
"""


class JudgeLedger:
    """One SQLite file, or ":memory:"."""

    def __init__(self, path: str, max_entries: int) -> None:
        if path != ":memory:":
            Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
            path = str(Path(path).expanduser())
        self._max_entries = max_entries
        self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.executescript(_TABLES)

    def get(self, inputs: str) -> str | None:
        """The reply to these inputs, if it is kept."""
        row = self._database.execute("SELECT reply FROM replies WHERE inputs = ?", (inputs,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, inputs: str, reply: str) -> None:
        """Keep a reply."""
        self._database.execute("INSERT OR REPLACE INTO replies (inputs, reply) VALUES (?, ?)", (inputs, reply))
        self._database.execute(
            "DELETE FROM replies WHERE place <= (SELECT max(place) FROM replies) - ?", (self._max_entries,)
        )

    def reserve(self, day: int, usd: float, budget_usd: float) -> bool:
        """Whether `usd` still fit into the day's budget; then they are spent."""
        self._database.execute("INSERT OR IGNORE INTO spending VALUES (?, 0.0)", (day,))
        changed = self._database.execute(
            "UPDATE spending SET usd = usd + ? WHERE day = ? AND usd + ? <= ?", (usd, day, usd, budget_usd)
        )
        return changed.rowcount == 1

    def settle(self, day: int, difference_usd: float) -> None:
        """Correct a reservation by what it really cost."""
        self._database.execute("UPDATE spending SET usd = max(0, usd + ?) WHERE day = ?", (difference_usd, day))

    def close(self) -> None:
        """Close the file."""
        self._database.close()
