"""Dead letters, whose sealed texts stay sealed, and sealed answers: the Data and Privacy pages."""

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from infra.ledger.index import NEWEST
from infra.ledger.index_fold import number
from infra.store.seal import is_sealed
from schemas import DeadLetter
from schemas.records import MAX_LETTER_BYTES

SHOWN = 100
MAX_SHOWN = 20_000  # characters of a letter
SHUT = "(sealed)"

Rows = Sequence[sqlite3.Row]


def letters(database: sqlite3.Connection, reason: str, before: int | None) -> tuple[Rows, int]:
    """Dead letters below a number of the index, newest first, and the number where the next page begins, 0 at the end."""
    which = "reason = ? AND" if reason else "? = '' AND"
    found = database.execute(
        "SELECT letters.*, marks.n IS NOT NULL AS done, coalesce(done_by, '') AS done_by FROM letters LEFT JOIN marks"
        f" USING (part, offset) WHERE {which} letters.n < ? ORDER BY letters.n DESC LIMIT ?",
        (reason, before or 2**62, SHOWN + 1),
    ).fetchall()
    return found[:SHOWN], found[SHOWN - 1]["n"] if len(found) > SHOWN else 0


def mark(database: sqlite3.Connection, partition: int, offset: int) -> sqlite3.Row | None:
    asked = "SELECT time_ms, done_by FROM marks WHERE part = ? AND offset = ?"
    row: sqlite3.Row | None = database.execute(asked, (partition, offset)).fetchone()
    return row


def letter_counts(database: sqlite3.Connection) -> Rows:
    return database.execute(
        "SELECT reason, stage, count(*) AS count, count(marks.n) AS done FROM letters LEFT JOIN marks USING (part, offset)"
        " GROUP BY reason, stage ORDER BY count DESC LIMIT 50"
    ).fetchall()


def privacy(database: sqlite3.Connection) -> dict[str, Any]:
    """Sealed answers, forgotten users and openings. num_counted: number of the newest orders that were
    counted; None for all.
    """
    counts = dict(database.execute("SELECT word, count(*) FROM orders WHERE word IN ('open', 'forget') GROUP BY word"))
    newest = "SELECT * FROM orders WHERE word = ? ORDER BY offset DESC LIMIT ?"
    (first,) = database.execute("SELECT min(n) FROM orders").fetchone()  # 1 where none went yet
    return {
        "num_counted": NEWEST["orders"][1] if (first or 1) > 1 else None,
        "times_opened": counts.get("open", 0),
        "times_forgotten": counts.get("forget", 0),
        "sealed": database.execute("SELECT count(*) FROM answers WHERE sealed > 0").fetchone()[0],
        "opened": database.execute(newest, ("open", SHOWN)).fetchall(),
        "forgotten": database.execute(newest, ("forget", SHOWN)).fetchall(),
        "newest": database.execute("SELECT * FROM answers WHERE sealed > 0 ORDER BY n DESC LIMIT 20").fetchall(),
    }


def fate(database: sqlite3.Connection, answer: str) -> str:
    """Fate of an answer, "" while it is pending."""
    row = database.execute("SELECT fate FROM answers WHERE key = ?", (number(answer),)).fetchone()
    return str(row["fate"]) if row else ""


def openings(database: sqlite3.Connection, about: str) -> Rows:
    return database.execute(
        "SELECT * FROM orders WHERE word = 'open' AND about = ? ORDER BY offset", (about,)
    ).fetchall()


def shown_letter(letter: DeadLetter) -> dict[str, Any]:
    """The record that a letter holds: `text` (its JSON, "" where none can be shown), `why` not, and `cut` (characters that are
    not shown).
    """
    value, shown = letter.value, {"text": "", "why": "", "cut": 0}
    if not value:
        return shown | {"why": "The letter is empty."}
    if value.startswith(b'"sealed:'):
        return shown | {"why": "Sealed: it concerns an answer of a named user."}
    try:
        held = msgspec.json.decode(value)
        text = json.dumps(_changed(held, lambda text: SHUT if is_sealed(text) else text), indent=2, ensure_ascii=False)
    except (msgspec.DecodeError, RecursionError):
        is_whole = len(value) < MAX_LETTER_BYTES
        size = f"{len(value):,} bytes" if is_whole else f"only the first {len(value):,} bytes were kept"
        return shown | {"why": f"Not JSON: {size}."}
    return shown | {"text": text[:MAX_SHOWN], "cut": max(0, len(text) - MAX_SHOWN)}


def _changed(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, dict):
        return {name: _changed(part, change) for name, part in value.items()}
    if isinstance(value, list):
        return [_changed(part, change) for part in value]
    return change(value) if isinstance(value, str) else value
