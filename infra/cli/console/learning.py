"""The Learning page: charts of measurements by version, drawn by uPlot.

A chart is plain data for the page's script and for the table below it: `title`, `x` (versions), `labels` of each x,
`series` with a value or None for each x, and how to draw them.
"""

import math
import sqlite3
from collections.abc import Sequence
from typing import Any

from infra.cli.terminal import printable

# Title of a chart, suffixes of the names it draws, and True if its axis starts at zero.
CURVES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("Reward of trained answers", ("reward_mean",), False),
    ("Loss", ("loss",), False),
    ("Staleness, versions", ("/staleness_mean",), True),
    ("Entropy", ("/entropy",), True),
    ("KL, k3 estimate", ("/k3", "/kl_reference"), True),
    ("Clipped share", ("/clip_positive", "/clip_negative"), True),
    ("Gradient norm", ("grad_norm",), True),
    ("Effective sample share", ("/ess",), True),
)
MAX_POINTS, MAX_BINS = 240, 120
MAX_FATES = 7
COLOURS = 8  # of the stylesheet

Chart = dict[str, Any]
Point = tuple[int, float, float | None, float | None]
"""The version, a value, and the ends of its interval."""


def charts(run: str, database: sqlite3.Connection) -> list[Chart]:
    """A chart for each suite and for each group of curves that has values. run: name of the lines of suites."""
    lines: dict[tuple[str, bool], list[tuple[str, list[Point]]]] = {}
    for row in database.execute("SELECT * FROM evals WHERE asked > 0 ORDER BY suite, version"):
        ((_, points),) = lines.setdefault((f"Suite {row['suite']}", True), [(run, [])])
        points.append((row["version"], row["right"] / row["asked"], row["low"], row["high"]))
    names = [row["name"] for row in database.execute("SELECT DISTINCT name FROM curves ORDER BY name")]
    for title, ends, zero in CURVES:
        for name in names:
            if any(name == end or (end[0] == "/" and name.endswith(end)) for end in ends):
                rows = database.execute("SELECT * FROM curves WHERE name = ? ORDER BY version", (name,))
                points = [(row["version"], row["value"], None, None) for row in rows]
                lines.setdefault((title, zero), []).append((name, points))
    found = [
        _aligned(title, zero, [(name, thin(points)) for name, points in of_title])
        for (title, zero), of_title in lines.items()
    ]
    return [chart for chart in found if chart["x"]]


def _aligned(title: str, zero: bool, lines: Sequence[tuple[str, Sequence[Point]]]) -> Chart:
    versions = sorted({version for _, points in lines for version, *_ in points})
    series = []
    for colour, (name, points) in enumerate(lines):
        known = {version: point for version, *point in points}
        values, low, high = ([known[at][part] if at in known else None for at in versions] for part in range(3))
        band = {"low": low, "high": high} if any(end is not None for end in low) else {"low": None, "high": None}
        series.append({"name": printable(name), "colour": colour % COLOURS, "values": values, **band})
    return {
        "title": title, "zero": zero, "stacked": False, "x": versions, "labels": [f"v{version}" for version in versions],
        "series": series,
    }  # fmt: skip


def thin(points: Sequence[Point], at_most: int = MAX_POINTS) -> list[Point]:
    """At most `at_most` finite points: the first, the last, and the lowest and highest of each stretch between."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= at_most:
        return points
    inner, many = range(1, len(points) - 1), max(1, (at_most - 2) // 2)
    kept = {0, len(points) - 1}
    for part in range(many):
        stretch = inner[part * len(inner) // many : (part + 1) * len(inner) // many]
        kept |= {min(stretch, key=lambda at: points[at][1]), max(stretch, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def fates_chart(database: sqlite3.Connection) -> Chart:
    """Fates of answers as stacked areas over equal ranges of versions."""
    rows = database.execute(
        "SELECT hi AS x, fate, count(*) AS count FROM answers WHERE suite = '' AND hi >= 0 GROUP BY x, fate ORDER BY x"
    ).fetchall()
    totals: dict[str, int] = {}
    for row in rows:
        totals[row["fate"]] = totals.get(row["fate"], 0) + row["count"]
    names = sorted(totals, key=lambda name: (name != "trained", -totals[name]))
    first, last = (rows[0]["x"], rows[-1]["x"]) if rows else (0, 0)
    width = -(-(last - first + 1) // MAX_BINS)
    xs = range(first, last + 1, width)
    layers = {name: [0] * len(xs) for name in (*names[:MAX_FATES], *(["others"] if len(names) > MAX_FATES else []))}
    for row in rows:
        layer = layers[row["fate"] if row["fate"] in names[:MAX_FATES] else "others"]
        layer[(row["x"] - first) // width] += row["count"]
    return {
        "title": "Outcomes of answers", "zero": True, "stacked": True, "x": [*xs],
        "labels": [f"v{x}" + (f" to v{x + width - 1}" if width > 1 else "") for x in xs],
        "series": [
            {
                "name": printable(name) or "pending", "colour": colour % COLOURS, "values": values,
                "low": None, "total": sum(values),
            }
            for colour, (name, values) in enumerate(layers.items())
        ],
    }  # fmt: skip
