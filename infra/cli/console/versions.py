"""Versions: when each was published, what the gate decided on which numbers, and two of them side by side."""

import difflib
import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from infra.cli.console.reading import History
from infra.cli.console.search import distinct
from infra.cli.govern.channel import ChannelDecision
from infra.cli.terminal import printable
from infra.ledger.index_fold import MAX_TEXT

SHOWN = 60
MAX_DRAWN = 400  # versions and decisions of the timeline
MAX_TASKS = 200
MAX_COMPARED = 50_000  # answers of a version to a suite
MAX_PIECES = 1000  # of an answer that is compared piece by piece, which bounds the time
STABLE = "stable/"  # what the gate puts before a suite's name for the figure of the stable version
_PIECE = re.compile(r"\s+|\w+|[^\w\s]", re.UNICODE)
WORDS = {
    "promoted": "promoted", "held": "held back", "pinned": "pinned", "rolled_back": "rolled back",
    "pause": "learning paused", "continue": "learning resumed", "drain": "drained",
}  # fmt: skip

Row = dict[str, Any]


def version_rows(
    history: History, evaluated: Mapping[int, Sequence[sqlite3.Row]], before: int | None, *, every: bool
) -> list[Row]:
    """The newest versions first, at most SHOWN, below `before`; unless `every`, those that were decided or evaluated, and the
    newest. Each has `version`, `time_ms`, `event` (its publication), `decision` (the newest, or None) and `evals`.
    """
    newest = {decision.version: decision for decision in history.decisions if decision.version >= 0}
    published = {event.version: (time_ms, event) for time_ms, event in history.events if event.event == "published"}
    highest = max(published, default=-1)
    chosen = [
        version
        for version in sorted(published, reverse=True)
        if (before is None or version < before)
        and (every or version in newest or version in evaluated or (before is None and version == highest))
    ]
    return [
        {
            "version": version, "time_ms": published[version][0], "event": published[version][1],
            "decision": newest.get(version), "evals": evaluated.get(version, ()),
        }
        for version in chosen[:SHOWN]
    ]  # fmt: skip


def held_back(history: History) -> int:
    """The version that the newest decision held back, -1 where it was another decision."""
    newest = history.decisions[-1] if history.decisions else None
    return newest.version if newest is not None and newest.event == "held" else -1


def word(decision: ChannelDecision) -> str:
    if decision.channel == "canary" and decision.event == "promoted":
        return "watch" if decision.by == "watch" else "on trial"
    if decision.event == "pinned" and decision.version < 0:
        return "unpinned"
    return WORDS.get(decision.event, decision.event)


def decision_numbers(numbers: Mapping[str, float]) -> list[tuple[str, float | None, float | None]]:
    """The numbers of a decision: name, value of the version and of the stable version then, None for none."""
    names = dict.fromkeys(name.removeprefix(STABLE) for name in sorted(numbers))
    return [
        (name.replace("/", ": ").replace("_", " "), numbers.get(name), numbers.get(f"{STABLE}{name}")) for name in names
    ]


def evals(database: sqlite3.Connection) -> dict[int, list[sqlite3.Row]]:
    found: dict[int, list[sqlite3.Row]] = {}
    for row in database.execute("SELECT * FROM evals ORDER BY version, suite"):
        found.setdefault(row["version"], []).append(row)
    return found


def timeline(history: History) -> Row:
    """Positions of published versions, decisions and the stable version from the first moment (0.0) to the last (1.0):
    `published` (place, version), `decided` (place, decision) and `stable` (from, to, version).
    """
    moments = [time_ms for time_ms, _ in history.events] + [each.time_ms for each in history.decisions]
    first, last = min(moments, default=0), max(moments, default=0)

    def place(time_ms: int) -> float:
        return (time_ms - first) / max(1, last - first)

    published = [(place(time_ms), event.version) for time_ms, event in history.events if event.event == "published"]
    decided = [(place(each.time_ms), each) for each in history.decisions[-MAX_DRAWN:] if each.version >= 0]
    moved = [(at, each.version) for at, each in decided if each.channel == "stable" and each.event != "held"]
    ends = [at for at, _ in moved[1:]] + [1.0]
    return {
        "num_published": len(published), "published": published[:: max(1, len(published) // MAX_DRAWN)], "decided": decided,
        "stable": [(at, end, version) for (at, version), end in zip(moved, ends, strict=bool(moved))],
    }  # fmt: skip


def pairs(
    database: sqlite3.Connection, suite: str, left: int, right: int, everything: bool
) -> tuple[list[Row], dict[str, int]]:
    """Pairs of answers of two versions to a suite, different scores first, and their counts. everything: list
    pairs that do not differ, too.

    Counts: same, differ, better, worse, of whole answers. unshown: pairs beyond MAX_TASKS. further: answers that are not
    compared, since there is one to the same task or more than MAX_COMPARED. unread: pairs with one that is not readable.
    """
    (mine, rest), (other, more) = _answers(database, suite, left), _answers(database, suite, right)
    counts = {"same": 0, "differ": 0, "better": 0, "worse": 0, "unread": 0, "unshown": 0, "further": rest + more}
    found = []
    for task in mine.keys() & other.keys():
        a, b = mine[task], other[task]
        if a["digest"] is None or b["digest"] is None:
            counts["unread"] += 1
            continue
        differs = a["digest"] != b["digest"]
        counts["differ" if differs else "same"] += 1
        low, high = a["score"], b["score"]
        if low is not None and high is not None and low != high:
            counts["better" if high > low else "worse"] += 1
        if differs or everything:
            found.append((low == high, task, a, b))
    found.sort(key=lambda pair: (pair[0], pair[1]))
    counts["unshown"] = max(0, len(found) - MAX_TASKS)
    return [_pair(database, a, b) for _, _, a, b in found[:MAX_TASKS]], counts


def suites_both(database: sqlite3.Connection, left: int, right: int) -> list[str]:
    rows = database.execute(
        "SELECT suite FROM evals WHERE version = ? INTERSECT SELECT suite FROM evals WHERE version = ?", (left, right)
    )
    return [row[0] for row in rows]


def _answers(database: sqlite3.Connection, suite: str, version: int) -> tuple[dict[str, dict[str, Any]], int]:
    """The first answer of a version to each task of a suite, without its texts; and how many more there are."""
    names = distinct(database, "name", table="scores")
    where = "suite = ? AND suite != '' AND hi = ? AND task != ''"
    rows = database.execute(
        "SELECT answers.n, task, id, size, digest,"
        f" (SELECT avg(value) FROM scores WHERE name IN ({', '.join('?' * len(names))}) AND scores.n = answers.n) AS score"
        f" FROM answers LEFT JOIN texts ON texts.n = answers.n WHERE {where} LIMIT {MAX_COMPARED}",
        (*names, suite, version),
    ).fetchall()
    (count,) = database.execute(f"SELECT count(*) FROM answers WHERE {where}", (suite, version)).fetchone()
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["id"]):
        found.setdefault(row["task"], dict(row))
    return found, count - len(found)


def _pair(database: sqlite3.Connection, a: Row, b: Row) -> Row:
    """One recorded prompt and what two versions said, as far as the index holds it. behind: number of characters of the longer
    one that the index does not hold. differs_behind: whether they differ only in these.
    """
    held = [database.execute("SELECT asked, answered FROM texts WHERE n = ?", (row["n"],)).fetchone() for row in (a, b)]
    (asked, said), (_, other) = held
    left, right = marked(said, other)
    return {
        "asked": asked, "sides": ((left, a), (right, b)), "behind": max(0, max(a["size"], b["size"]) - MAX_TEXT),
        "differs_behind": said == other and a["digest"] != b["digest"],
    }  # fmt: skip


def marked(left: str, right: str) -> tuple[Markup, Markup]:
    """Two texts with their differences marked, piece by piece; all is marked where one has more than MAX_PIECES.

    >>> marked("a b", "a c")
    (Markup('a <del>b</del>'), Markup('a <ins>c</ins>'))
    """
    first, second = (_PIECE.findall(text) for text in (left, right))
    runs: Sequence[tuple[str, int, int, int, int]] = [("replace", 0, len(first), 0, len(second))]
    if max(len(first), len(second)) <= MAX_PIECES:
        runs = difflib.SequenceMatcher(str.isspace, first, second).get_opcodes()
    found: tuple[list[str], list[str]] = ([], [])
    for kind, a, b, c, d in runs:
        for side, text, tag in zip(found, ("".join(first[a:b]), "".join(second[c:d])), ("del", "ins"), strict=True):
            if text:
                shown = escape(printable(text))
                side.append(str(shown) if kind == "equal" else f"<{tag}>{shown}</{tag}>")
    return Markup("".join(found[0])), Markup("".join(found[1]))
