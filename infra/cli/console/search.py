"""What a search asks of the index, and how: newest first, a window at a time, and never longer than it may take.

Guarantee: a search ends within LONGEST_S and says how far back it looked; whoever wants more asks from there on.
"""

import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

LONGEST_S = 0.1
WINDOW = 20_000
PAGE = 50
_WORD = re.compile(r"\w+", re.UNICODE)


class Query(msgspec.Struct, frozen=True):
    """What is looked for; "" and None ask nothing. version: sampled any of it. learned: the version whose steps trained it.
    low, high: of the reward. said: "yes" or "no". fate: "pending", "trained" or a reason. text: words that all occur.
    made: "yes" for what a processor made. before: only answers older than this number of the index.

    Example: Query(lane="live", low=0.5, text="refund")
    """

    text: str = ""
    version: int | None = None
    learned: int | None = None
    lane: str = ""
    tenant: str = ""
    session: str = ""
    suite: str = ""
    task: str = ""
    low: float | None = None
    high: float | None = None
    said: str = ""
    fate: str = ""
    made: str = ""
    before: int | None = None


class Page(msgspec.Struct, frozen=True):
    """One page of answers. further: where to look on, None where nothing is left. looked_at: the oldest answer looked at,
    ms; 0 where the page is full. faults: fields that were not understood, with what was expected.
    """

    rows: Sequence[Mapping[str, Any]]
    further: int | None
    looked_at_ms: int = 0


def query_of(asked: Mapping[str, str]) -> tuple[Query, dict[str, str]]:
    """The query of a form's fields, and what is wrong with those that are left out."""
    values: dict[str, object] = {}
    faults: dict[str, str] = {}
    for field in msgspec.structs.fields(Query):
        text = asked.get(field.name, "").strip()[:500]
        if not text:
            continue
        try:
            if field.default is None:
                values[field.name] = float(text) if field.name in ("low", "high") else int(text.removeprefix("v"))
            else:
                values[field.name] = text
        except ValueError:
            faults[field.name] = f'got "{text[:40]}", expected a number'
    for name in ("version", "learned", "before"):
        number = values.get(name)
        if isinstance(number, int) and abs(number) > 2**62:
            faults[name] = "got a number that no version has"
            del values[name]
    return Query(**values), faults  # type: ignore[arg-type]


def conditions(query: Query, steps: tuple[int, int] | None) -> tuple[list[str], list[object]]:
    """SQL conditions and their values. steps: of the version that is asked for as `learned`."""
    found: list[str] = []
    values: list[object] = []

    def add(condition: str, *given: object) -> None:
        found.append(condition)
        values.extend(given)

    if query.version is not None:
        add("hi >= ? AND lo <= ? AND (hi = ? OR lo = ? OR hi > lo)", *[query.version] * 4)
    if query.learned is not None:
        add("n IN (SELECT n FROM uses WHERE step BETWEEN ? AND ?)", *(steps or (0, -1)))
    for name in ("lane", "tenant", "session", "suite", "task"):
        if value := getattr(query, name):
            add(f"{name} = ? AND {name} != ''", value)  # the second lets SQLite use an index that leaves "" out
    if query.low is not None:
        add("reward >= ?", query.low)
    if query.high is not None:
        add("reward <= ?", query.high)
    if query.said:
        add("said > 0" if query.said == "yes" else "said = 0")
    if query.made:
        add("made > 0")
    if query.fate:
        add("fate = ?", "" if query.fate == "pending" else query.fate)
    if words := _WORD.findall(query.text):
        add("n IN (SELECT rowid FROM words WHERE words MATCH ? AND rowid BETWEEN :low AND :high)", match_of(words))
    return found, values


def match_of(words: Sequence[str]) -> str:
    """What FTS5 is asked: all of the words, none of its own language; the last may go on.

    >>> match_of(["refund", "NOT"])
    '"refund" "NOT"*'
    """
    return " ".join(f'"{word}"' for word in words) + "*"


def search(database: sqlite3.Connection, query: Query, *, longest_s: float = LONGEST_S) -> Page:
    """The newest answers that fit."""
    steps = steps_of(database, query.learned) if query.learned is not None else None
    found, values = conditions(query, steps)
    # Apart: both in one SELECT would look at every row.
    top = database.execute(
        "SELECT coalesce((SELECT max(n) FROM answers), 0), coalesce((SELECT min(n) FROM answers), 0)"
    ).fetchone()
    high = top[0] if query.before is None else min(top[0], query.before - 1)
    began_s = time.monotonic()
    rows: list[Mapping[str, Any]] = []
    # Few fit, and an index has them: then all are looked at.
    is_narrow = bool(query.session or query.task or query.learned is not None) and not query.text
    size, place = (top[0], "+n") if is_narrow else (WINDOW, "n")
    by = "session" if query.session else "task" if query.task else ""
    index = f" INDEXED BY by_{by}" if is_narrow and by else ""
    while high >= top[1] and high > 0:
        low = max(top[1], high - size + 1)
        where = (
            " AND ".join([f"{place} BETWEEN :low AND :high", *found])
            .replace(":low", str(low))
            .replace(":high", str(high))
        )
        rows += database.execute(
            f"SELECT * FROM answers{index} WHERE {where} ORDER BY n DESC LIMIT {PAGE - len(rows)}", values
        ).fetchall()
        if len(rows) >= PAGE:
            return Page(_told(database, rows), further=rows[-1]["n"])
        high = low - 1
        if time.monotonic() - began_s > longest_s:
            at = database.execute("SELECT time_ms FROM answers WHERE n >= ? ORDER BY n LIMIT 1", (low,)).fetchone()
            return Page(_told(database, rows), further=low, looked_at_ms=at[0] if at else 0)
    return Page(_told(database, rows), further=None)


def steps_of(database: sqlite3.Connection, version: int) -> tuple[int, int]:
    """First and last step that a published version learned since the one before; nothing where it was never published."""
    row = database.execute("SELECT step FROM published WHERE version = ?", (version,)).fetchone()
    if row is None:
        return 0, -1
    before = database.execute("SELECT max(step) FROM published WHERE version < ?", (version,)).fetchone()[0]
    return (0 if before is None else before + 1), row[0]


def _told(database: sqlite3.Connection, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their texts and scores."""
    found = []
    for row in rows:
        text = database.execute("SELECT asked, answered FROM texts WHERE n = ?", (row["n"],)).fetchone()
        found.append(
            {
                **{name: row[name] for name in row.keys()},  # noqa: SIM118 (a sqlite3.Row iterates over its values)
                "asked": text["asked"] if text else "",
                "answered": text["answered"] if text else "",
            }
        )
    return found


def choices(database: sqlite3.Connection) -> dict[str, list[str]]:
    """What the lists of the form offer: lanes, tenants, suites and fates there are, by one jump in an index for each."""
    return {name: distinct(database, name) for name in ("lane", "tenant", "suite", "fate")}


def score_names(database: sqlite3.Connection) -> list[str]:
    """What scores are called."""
    return distinct(database, "name", table="scores")


def distinct(database: sqlite3.Connection, column: str, *, table: str = "answers", at_most: int = 60) -> list[str]:
    """The values of an indexed column, without looking at every row."""
    found: list[str] = []
    value = ""
    where = " AND suite != ''" if column == "suite" else ""
    while len(found) < at_most:
        row = database.execute(f"SELECT min({column}) FROM {table} WHERE {column} > ?{where}", (value,)).fetchone()
        if row[0] is None:
            break
        value = row[0]
        found.append(value)
    return found
