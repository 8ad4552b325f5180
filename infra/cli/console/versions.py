"""Versions: their publication times, and the decisions of the gate with their numbers."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from infra.cli.govern.words import PolicyWords

SHOWN = 60
MAX_DRAWN = 400  # versions and decisions of the timeline
STABLE = "stable/"  # the gate's prefix of a suite's name, for the stable version's value

Row = dict[str, Any]


def version_rows(
    history: PolicyWords, evaluated: Mapping[int, Sequence[sqlite3.Row]], before: int | None, *, every: bool
) -> list[Row]:
    """The versions below `before`, newest first, at most SHOWN; unless `every`, only decided or evaluated versions, and the
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


def timeline(history: PolicyWords) -> Row:
    """Positions of published versions, decisions and the stable version from the first moment (0.0) to the last (1.0):
    `published` (place, version), `decided` (place, decision) and `stable` (from, to, version).
    """
    moments = [time_ms for time_ms, _ in history.events] + [each.time_ms for each in history.decisions]
    first, last = min(moments, default=0), max(moments, default=0)

    def place(time_ms: int) -> float:
        return (time_ms - first) / max(1, last - first)

    published = [(place(time_ms), event.version) for time_ms, event in history.events if event.event == "published"]
    decided = [(place(each.time_ms), each) for each in history.decisions[-MAX_DRAWN:] if each.version >= 0]
    moved = [(place(time_ms), version) for time_ms, version in history.moves[-MAX_DRAWN:]]
    ends = [at for at, _ in moved[1:]] + [1.0]
    return {
        "num_published": len(published), "published": published[:: max(1, len(published) // MAX_DRAWN)], "decided": decided,
        "stable": [(at, end, version) for (at, version), end in zip(moved, ends, strict=bool(moved))],
    }  # fmt: skip
