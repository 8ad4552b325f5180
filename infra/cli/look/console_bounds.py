"""What bounds what a console holds: each table of its index, with how many rows there are, and sessions that ended.

Rows of records that the log keeps for a time are removed with these records. Of what it keeps for ever (`policies`, `evals`),
and of what may come faster than a page can list, only a number of the newest rows stay.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path

# What goes with the log, by the time of its record.
TIMED = ("answers", "scores", "uses", "texts", "words", "fates", "letters", "marks", "tasks")
# The column that numbers the rows of a table, and how many of the newest numbers stay.
NEWEST: Mapping[str, tuple[str, int]] = {
    "letters": ("n", 50_000),
    "marks": ("n", 50_000),
    "orders": ("n", 50_000),
    "steps": ("step", 100_000),
    "published": ("version", 50_000),
    "curves": ("version", 50_000),
    "evals": ("version", 50_000),
}
MAX_TASKS = 200_000
FIXED = {"fence": "one row", "reads": "a row for each partition"}
LIVES_S = 12 * 3600.0  # of a session's cookie
MAX_ENDED = 10_000  # sessions that were signed out of while their cookies last


def trim(database: sqlite3.Connection, before_ms: int) -> None:
    """Remove rows beyond the bounds, except those that are removed with their answer (`ConsoleIndex.prune`). before_ms: time of
    the oldest record that the log keeps."""
    with database:
        for table in ("letters", "marks", "tasks"):
            database.execute(f"DELETE FROM {table} WHERE time_ms < ?", (before_ms,))
        for table, (number, at_most) in NEWEST.items():
            database.execute(
                f"DELETE FROM {table} WHERE {number} <= (SELECT max({number}) FROM {table}) - ?", (at_most,)
            )
        database.execute(
            "DELETE FROM tasks WHERE task IN (SELECT task FROM tasks ORDER BY time_ms"
            " LIMIT max(0, (SELECT count(*) FROM tasks) - ?))",
            (MAX_TASKS,),
        )


def bounds_of(replay: str) -> dict[str, str]:
    """Each table with its bound, in words. replay: how long the log keeps.

    >>> bounds_of("30d")["letters"]
    '30d (keep.replay), at most the newest 50,000'
    """
    kept = {table: f"{replay} (keep.replay)" for table in TIMED}
    for table, (number, at_most) in NEWEST.items():
        what = f"the newest {at_most:,}" + ("" if number == "n" else f" {number}s")
        kept[table] = f"{kept[table]}, at most {what}" if table in kept else what
    kept["tasks"] += f", at most the newest {MAX_TASKS:,}"
    return kept | FIXED


def ended_bound() -> str:
    """How long and how many ended sessions are remembered, in words.

    >>> ended_bound()
    '12 h each, at most 10,000: one more ends every session'
    """
    return f"{LIVES_S / 3600:.0f} h each, at most {MAX_ENDED:,}: one more ends every session"


def read_only(path: Path) -> sqlite3.Connection:
    """A connection to an index that only reads. Raises sqlite3.Error where there is none."""
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.execute("PRAGMA cache_size = -8000")
    return database


def sizes(database: sqlite3.Connection) -> dict[str, int]:
    """How many rows each table has. Texts are not counted, which would read them all: each unsealed answer has one."""
    tables = bounds_of("").keys() - {"texts", "words"}
    found = {table: int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) for table in sorted(tables)}
    (num_sealed,) = database.execute("SELECT count(*) FROM answers WHERE sealed > 0").fetchone()
    return found | dict.fromkeys(("texts", "words"), found["answers"] - num_sealed)
