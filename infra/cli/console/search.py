"""A search in the index: newest first, one window after another, for a bounded time.

Guarantee: a search looks at no further window after LONGEST_S. It says how far back it looked, and the next search continues
there.
"""

import math
import re
import sqlite3
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from infra.ledger.index_fold import TIME_BITS

LONGEST_S = 0.1
FIRST_WINDOW, WINDOW = 500, 20_000  # answers of the first window; each next one is twice as long, up to this
PAGE = 50
MAX_DISTINCT = 60  # values of a column that a page offers
MAX_PIECES = 16  # of a text that are looked for in the texts themselves
FEW = 2000  # as long as a window is where texts themselves are read
RANGES = ("low", "high")
_WORD = re.compile(r"\w+", re.UNICODE)
# Thai to Tibetan, Burmese, Khmer, and all that is written with Chinese or Japanese signs.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31a0-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)


class Query(msgspec.Struct, frozen=True):
    """Conditions of a search. Fields that are "" or None ask nothing.

    text: Words that all occur in the indexed texts. version: Version that sampled any of it. learned: Version whose steps
    trained it. low, high: Bounds of the score, or of the reward without one. said: Whether there is feedback, "yes" or "no".
    fate: "pending", "trained" or a reason. made: "yes" for answers that a processor made. before: A number of the index.
    """

    text: str = ""
    version: int | None = None
    learned: int | None = None
    lane: str = ""
    tenant: str = ""
    session: str = ""
    suite: str = ""
    task: str = ""
    score: str = ""
    low: float | None = None
    high: float | None = None
    said: str = ""
    fate: str = ""
    made: str = ""
    before: int | None = None


class Page(msgspec.Struct, frozen=True):
    """One page of answers, newest first. further: Where the next page begins, None at the end. looked_at_ms: Time of the oldest
    answer looked at, 0 where the page is full.
    """

    rows: Sequence[Mapping[str, Any]]
    further: int | None
    looked_at_ms: int = 0


def parse_query(asked: Mapping[str, str]) -> tuple[Query, dict[str, str]]:
    """The query of a form's fields, and by name the fault of each field that is left out."""
    values: dict[str, object] = {}
    faults: dict[str, str] = {}
    for field in msgspec.structs.fields(Query):
        text = asked.get(field.name, "").strip()[:500]
        if not text:
            continue
        try:
            if field.default is None:
                values[field.name] = float(text) if field.name in RANGES else int(text.removeprefix("v"))
            else:
                values[field.name] = text
        except ValueError:
            faults[field.name] = f'got "{text[:40]}", expected a number'
    for name in ("version", "learned", "before"):
        number = values.get(name)
        if isinstance(number, int) and abs(number) > 2**62:
            faults[name] = "got a number that no version has"
            del values[name]
    if len(split_terms(str(values.get("text", "")))[1]) == MAX_PIECES:
        faults["text"] = f"of signs, and of words in scripts without spaces, the first {MAX_PIECES} are searched for"
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
    low, high = -math.inf if query.low is None else query.low, math.inf if query.high is None else query.high
    if query.score:
        within = "EXISTS (SELECT 1 FROM scores WHERE name = ? AND scores.n = answers.n AND value BETWEEN ? AND ?)"
        add(within, query.score, low, high)
    elif query.low is not None or query.high is not None:
        add("reward BETWEEN ? AND ?", low, high)
    if query.said:
        add("said > 0" if query.said == "yes" else "said = 0")
    if query.made:
        add("made > 0")
    if query.fate:
        add(*(("fate = '' AND suite = ''",) if query.fate == "pending" else ("fate = ?", query.fate)))
    words, pieces = split_terms(query.text)
    if words:
        add("n IN (SELECT rowid FROM words WHERE words MATCH ? AND rowid BETWEEN :low AND :high)", fts_query(words))
    if pieces:
        held = " AND ".join(["(instr(lower(asked), lower(?)) OR instr(lower(answered), lower(?)))"] * len(pieces))
        twice = [piece for piece in pieces for _ in range(2)]
        add(f"n IN (SELECT n FROM texts WHERE n BETWEEN :low AND :high AND {held})", *twice)
    return found, values


def split_terms(text: str) -> tuple[list[str], list[str]]:
    """Terms in a text that the index of words can find, and the first MAX_PIECES pieces for which the texts themselves are
    read: signs, and scripts without spaces between words or with marks within them.
    """
    words: list[str] = []
    pieces: list[str] = []
    for term in text.split():
        found = _WORD.findall(term)
        if found and not any(_UNSPACED.match(letter) or unicodedata.category(letter)[0] == "M" for letter in term):
            words += found
        else:
            pieces.append(term)
    return words, list(dict.fromkeys(pieces))[:MAX_PIECES]


def fts_query(words: Sequence[str]) -> str:
    """The query for FTS5: all of these words, the last one as a beginning. Its query language has no effect.

    >>> fts_query(["refund", "NOT"])
    '"refund" "NOT"*'
    """
    return " ".join(f'"{word}"' for word in words) + "*"


def search(database: sqlite3.Connection, query: Query, *, longest_s: float = LONGEST_S) -> Page:
    steps = version_steps(database, query.learned) if query.learned is not None else None
    found, values = conditions(query, steps)
    high = 2**62 if query.before is None else query.before - 1
    began_s = time.monotonic()
    rows: list[Mapping[str, Any]] = []
    # Few fit, and an index has them: then all are looked at.
    is_narrow = bool(query.session or query.task or query.learned is not None) and not query.text
    by = "session" if query.session else "task" if query.task else ""
    index, place = (f" INDEXED BY by_{by}" if is_narrow and by else ""), "+n" if is_narrow else "n"
    window, widest = FIRST_WINDOW, FEW if split_terms(query.text)[1] else WINDOW
    while True:
        below = f"SELECT n FROM answers WHERE n <= {high} ORDER BY n DESC LIMIT 1 OFFSET {window - 1}"
        row = None if is_narrow else database.execute(below).fetchone()
        low = 0 if row is None else row[0]
        where = " AND ".join([f"{place} BETWEEN :low AND :high", *found])
        where = where.replace(":low", str(low)).replace(":high", str(high))
        rows += database.execute(
            f"SELECT * FROM answers{index} LEFT JOIN texts USING (n) WHERE {where} ORDER BY n DESC LIMIT {PAGE - len(rows)}",
            values,
        ).fetchall()
        if len(rows) >= PAGE:
            return Page(rows, further=rows[-1]["n"])
        if low == 0:
            return Page(rows, further=None)
        high, window = low - 1, min(2 * window, widest)
        if time.monotonic() - began_s > longest_s:
            return Page(rows, further=low, looked_at_ms=low >> TIME_BITS)


def version_steps(database: sqlite3.Connection, version: int) -> tuple[int, int]:
    """First and last step between the version before and this one; (0, -1) where it was never published."""
    asked = "SELECT max(step) FROM policies WHERE event = 'published' AND"
    row = database.execute(f"{asked} version = ?", (version,)).fetchone()
    if row[0] is None:
        return 0, -1
    before = database.execute(f"{asked} version < ?", (version,)).fetchone()[0]
    return (0 if before is None else before + 1), row[0]


def choices(database: sqlite3.Connection) -> dict[str, list[str]]:
    """The values that the lists of the form offer: lanes, tenants, suites, fates, scores. Each costs one jump in an index."""
    found = {name: distinct(database, name) for name in ("lane", "tenant", "suite", "fate")}
    return found | {"score": distinct(database, "name", table="scores")}


def distinct(database: sqlite3.Connection, column: str, *, table: str = "answers") -> list[str]:
    """The first MAX_DISTINCT values of an indexed column, without looking at every row."""
    found: list[str] = []
    value = ""
    where = " AND suite != ''" if column == "suite" else ""
    while len(found) < MAX_DISTINCT:
        row = database.execute(f"SELECT min({column}) FROM {table} WHERE {column} > ?{where}", (value,)).fetchone()
        if row[0] is None:
            break
        value = row[0]
        found.append(value)
    return found
