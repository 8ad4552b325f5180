"""Dead letters, tasks, what processors made, what is sealed: what the Data and Privacy pages list from the index."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from infra.cli.console.index import key_of

SHOWN = 100


def letters(database: sqlite3.Connection, reason: str, before: int | None) -> tuple[Sequence[sqlite3.Row], int]:
    """Dead letters below a number of the index, the newest first; and the number to look on from, 0 at the end."""
    which = "reason = ? AND" if reason else "? = '' AND"
    found = database.execute(
        f"SELECT * FROM letters WHERE {which} n < ? ORDER BY n DESC LIMIT ?",
        (reason, before or 2**62, SHOWN + 1),
    ).fetchall()
    return found[:SHOWN], found[SHOWN - 1]["n"] if len(found) > SHOWN else 0


def letter_counts(database: sqlite3.Connection) -> Sequence[sqlite3.Row]:
    """How many letters there are of each reason and stage, and how many went back."""
    return database.execute(
        "SELECT reason, stage, count(*) AS count, sum(done) AS done FROM letters GROUP BY reason, stage ORDER BY count DESC"
        " LIMIT 50"
    ).fetchall()


def tasks(database: sqlite3.Connection, order: str, named: str) -> Sequence[sqlite3.Row]:
    """Tasks with their mean score: the hardest, the easiest or the most asked ones."""
    by = {"hardest": "share, judged DESC", "easiest": "share DESC, judged DESC"}.get(order, "judged DESC")
    return database.execute(
        "SELECT task, judged, total / judged AS share, newest FROM tasks WHERE task >= ? AND task < ? || char(1114111)"
        f" ORDER BY {by} LIMIT ?",
        (named, named, SHOWN),
    ).fetchall()


def task_shares(database: sqlite3.Connection) -> list[int]:
    """How many tasks have a mean score in each tenth of 0 to 1."""
    rows = database.execute(
        "SELECT min(9, max(0, cast(10 * total / judged AS INTEGER))) AS tenth, count(*) AS count FROM tasks GROUP BY tenth"
    ).fetchall()
    found = [0] * 10
    for row in rows:
        found[row["tenth"]] = row["count"]
    return found


def made(database: sqlite3.Connection) -> Sequence[sqlite3.Row]:
    """The newest experiences that processors made from others."""
    return database.execute(
        "SELECT answers.n, id, time_ms, lane, task, fate, asked, answered FROM answers LEFT JOIN texts ON"
        " texts.n = answers.n WHERE made > 0 ORDER BY answers.n DESC LIMIT 20"
    ).fetchall()


def privacy(database: sqlite3.Connection) -> Mapping[str, Any]:
    """How much is sealed, who was forgotten, and what was opened by whom."""
    counts = dict(database.execute("SELECT word, count(*) FROM orders WHERE word IN ('open', 'forget') GROUP BY word"))
    newest = "SELECT * FROM orders WHERE word = ? ORDER BY offset DESC LIMIT ?"
    return {
        "times_opened": counts.get("open", 0),
        "times_forgotten": counts.get("forget", 0),
        "sealed": database.execute("SELECT count(*) FROM answers WHERE sealed > 0").fetchone()[0],
        "opened": database.execute(newest, ("open", SHOWN)).fetchall(),
        "forgotten": database.execute(newest, ("forget", SHOWN)).fetchall(),
        "newest": database.execute(
            "SELECT id, time_ms, tenant FROM answers WHERE sealed > 0 ORDER BY n DESC LIMIT 20"
        ).fetchall(),
    }


def fate_of(database: sqlite3.Connection, answer: str) -> str:
    """What became of an answer, "" while that is open."""
    row = database.execute("SELECT fate FROM answers WHERE key = ?", (key_of(answer),)).fetchone()
    return str(row["fate"]) if row else ""


def openings_of(database: sqlite3.Connection, answer: str) -> Sequence[sqlite3.Row]:
    """Who opened an answer, when and why."""
    return database.execute(
        "SELECT * FROM orders WHERE word = 'open' AND about = ? ORDER BY offset", (answer,)
    ).fetchall()
