"""The Learning page: charts of measurements by version, for this run and other runs, drawn by uPlot.

A chart is plain data for the page's script and for the table below it: `title`, `x` (versions or minutes), `labels` of each x,
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

Run = tuple[str, sqlite3.Connection]
Chart = dict[str, Any]
Point = tuple[float, int, float, float | None, float | None]
"""x, the version, a value, and the ends of its interval."""


def charts(runs: Sequence[Run], *, by_time: bool) -> list[Chart]:
    """A chart for each suite and for each group of curves that has values. runs: this one first."""
    found: dict[str, Chart] = {}

    def draw(title: str, zero: bool, name: str, points: Sequence[Point], colour: int, run: int) -> None:
        chart = found.setdefault(
            title, {"title": title, "zero": zero, "stacked": False, "by_time": by_time, "lines": []}
        )
        chart["lines"].append(({"name": printable(name), "colour": colour % COLOURS, "dashed": run > 0}, thin(points)))

    for place, (run, database) in enumerate(runs):
        start = _start(database)
        suites: dict[str, list[Point]] = {}
        for row in database.execute("SELECT * FROM evals WHERE asked > 0 ORDER BY suite, version"):
            point = (*_x(row, start, by_time), row["right"] / row["asked"], row["low"], row["high"])
            suites.setdefault(row["suite"], []).append(point)
        for suite, points in suites.items():
            draw(f"Suite {suite}", True, run, points, place, place)
    for place, (run, database) in enumerate(runs):
        start = _start(database)
        names = [row["name"] for row in database.execute("SELECT DISTINCT name FROM curves ORDER BY name")]
        for title, ends, zero in CURVES:
            mine = [
                name for name in names if any(name == end or (end[0] == "/" and name.endswith(end)) for end in ends)
            ]
            for colour, name in enumerate(mine):
                rows = database.execute("SELECT * FROM curves WHERE name = ? ORDER BY version", (name,))
                points = [(*_x(row, start, by_time), row["value"], None, None) for row in rows]
                is_alone = len(runs) == 1
                label, shade = (name, colour) if is_alone else (f"{run} {name}", place + 2 * colour)
                draw(title, zero, label, points, shade, place)
    return [_aligned(chart) for chart in found.values() if any(points for _, points in chart["lines"])]


def _x(row: sqlite3.Row, start_ms: int, by_time: bool) -> tuple[float, int]:
    x = round((row["time_ms"] - start_ms) / 60_000, 5) if by_time else row["version"]
    return x, row["version"]


def _aligned(chart: Chart) -> Chart:
    lines = chart.pop("lines")
    places = sorted({point[:2] for _, points in lines for point in points})
    chart |= {"x": [x for x, _ in places], "labels": [f"v{version}" for _, version in places], "series": []}
    for about, points in lines:
        known = {point[:2]: point[2:] for point in points}
        values, low, high = ([known[at][part] if at in known else None for at in places] for part in range(3))
        has_band = any(end is not None for end in low)
        band = {"low": low if has_band else None, "high": high if has_band else None}
        chart["series"].append(about | {"values": values} | band)
    return chart


def thin(points: Sequence[Point], at_most: int = MAX_POINTS) -> list[Point]:
    """At most `at_most` finite points: the first, the last, and the lowest and highest of each stretch between."""
    points = [point for point in points if math.isfinite(point[2])]
    if len(points) <= at_most:
        return points
    inner, many = range(1, len(points) - 1), max(1, (at_most - 2) // 2)
    kept = {0, len(points) - 1}
    for part in range(many):
        stretch = inner[part * len(inner) // many : (part + 1) * len(inner) // many]
        kept |= {min(stretch, key=lambda at: points[at][2]), max(stretch, key=lambda at: points[at][2])}
    return [points[at] for at in sorted(kept)]


def fates_chart(database: sqlite3.Connection, *, by_time: bool) -> Chart:
    """Fates of answers as stacked areas over equal ranges of versions or minutes."""
    column = "time_ms / 60000" if by_time else "hi"
    rows = database.execute(
        f"SELECT {column} AS x, fate, count(*) AS count FROM answers WHERE suite = '' AND hi >= 0 GROUP BY x, fate ORDER BY x"
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
    origin, mark = (first, "") if by_time else (0, "v")
    ranges = [(x - origin, x - origin + width - 1) for x in xs]
    return {
        "title": "Outcomes of answers", "zero": True, "stacked": True, "by_time": by_time, "x": [x for x, _ in ranges],
        "labels": [f"{mark}{low}" + (f" to {mark}{high}" if width > 1 else "") for low, high in ranges],
        "series": [
            {
                "name": printable(name) or "pending", "colour": colour % COLOURS, "dashed": False, "values": values,
                "low": None, "total": sum(values),
            }
            for colour, (name, values) in enumerate(layers.items())
        ],
    }  # fmt: skip


def _start(database: sqlite3.Connection) -> int:
    found = database.execute(
        "SELECT min(at) FROM (SELECT min(time_ms) AS at FROM evals UNION SELECT min(time_ms) FROM curves)"
    ).fetchone()[0]
    return int(found or 0)
