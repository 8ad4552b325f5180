"""The learning page: what was measured of each version, as small multiples, for this run and those beside it."""

import sqlite3
from collections.abc import Sequence

from markupsafe import Markup

from infra.cli.console.charts import ChartPoint, Line, area_chart, bins_of, line_chart
from infra.cli.console.tables import area_table, line_table, shown

# What a chart is called, the end of the names it draws, and whether its axis begins at zero.
CURVES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("Reward of what was trained", ("reward_mean",), False),
    ("Loss", ("loss",), False),
    ("Staleness, versions", ("/staleness_mean",), True),
    ("Entropy", ("/entropy",), True),
    ("KL, k3 estimate", ("/k3", "/kl_reference"), True),
    ("Clipped share", ("/clip_positive", "/clip_negative"), True),
    ("Gradient norm", ("grad_norm",), True),
    ("Effective sample share", ("/ess",), True),
)
MAX_FATES = 7
Run = tuple[str, sqlite3.Connection]


def charts_of(runs: Sequence[Run], *, by_time: bool) -> list[tuple[str, list[tuple[str, int]], Markup]]:
    """Every chart, its table below it, with its title and legend (name and colour). runs: this one first."""
    x_name = "time" if by_time else "version"
    found = []
    for title, lines in [*_evals(runs, by_time), *_curves(runs, by_time)]:
        zero = next((zero for name, _, zero in CURVES if name == title), True)
        legend = list(dict.fromkeys((line.name, line.colour) for line in lines))
        chart = line_chart(title, lines, x_name=x_name, zero=zero)
        found.append((title, legend, chart + shown(title, line_table(lines, x_name))))
    return found


def _evals(runs: Sequence[Run], by_time: bool) -> list[tuple[str, list[Line]]]:
    suites: dict[str, list[Line]] = {}
    for number, (run, database) in enumerate(runs):
        start = _start(database)
        rows = database.execute("SELECT * FROM evals ORDER BY suite, version").fetchall()
        for suite in dict.fromkeys(row["suite"] for row in rows):
            points = []
            for row in rows:
                if row["suite"] != suite or not row["asked"]:
                    continue
                share = row["right"] / row["asked"]
                within = "" if row["low"] is None else f" ({row['low']:.1%} to {row['high']:.1%})"
                x = (row["time_ms"] - start) / 60_000 if by_time else row["version"]
                title = f"v{row['version']}: {share:.1%}{within}, {row['right']} of {row['asked']}"
                points.append(ChartPoint(x, share, title, row["low"], row["high"], row["version"]))
            suites.setdefault(suite, []).append(Line(run, points, number, dashed=number > 0))
    return [(f"Suite {suite}", lines) for suite, lines in suites.items()]


def _curves(runs: Sequence[Run], by_time: bool) -> list[tuple[str, list[Line]]]:
    found: dict[str, list[Line]] = {}
    for number, (run, database) in enumerate(runs):
        start = _start(database)
        names = [row[0] for row in database.execute("SELECT DISTINCT name FROM curves ORDER BY name")]
        for title, ends, _ in CURVES:
            mine = [
                name for name in names if any(name == end or (end[0] == "/" and name.endswith(end)) for end in ends)
            ]
            for colour, name in enumerate(mine):
                rows = database.execute("SELECT * FROM curves WHERE name = ? ORDER BY version", (name,)).fetchall()
                points = [
                    ChartPoint(
                        (row["time_ms"] - start) / 60_000 if by_time else row["version"],
                        row["value"],
                        f"v{row['version']}: {row['value']:.4g}",
                        version=row["version"],
                    )
                    for row in rows
                ]
                label = name if len(runs) == 1 else f"{run} {name}"
                shade = colour if len(runs) == 1 else number + 2 * colour
                found.setdefault(title, []).append(Line(label, points, shade, dashed=number > 0))
    return list(found.items())


def fates_chart(database: sqlite3.Connection, *, by_time: bool) -> tuple[list[tuple[str, int, int]], Markup]:
    """What became of answers, as stacked areas: legend (name, colour, count) and chart, its table below it."""
    column = "minute" if by_time else "version"
    rows = database.execute(
        f"SELECT {column} AS x, fate, sum(count) AS count FROM fates WHERE version >= 0 GROUP BY x, fate ORDER BY x"
    ).fetchall()
    totals: dict[str, int] = {}
    for row in rows:
        totals[row["fate"]] = totals.get(row["fate"], 0) + row["count"]
    names = sorted((name for name in totals if totals[name] > 0), key=lambda name: (name != "trained", -totals[name]))
    kept = names[:MAX_FATES]
    bins = bins_of(rows[0]["x"], rows[-1]["x"]) if rows else bins_of(0, 0)
    layers = {_fate(name): [0.0] * bins.count for name in kept}
    rest = [0.0] * bins.count
    for row in rows:
        values = layers[_fate(row["fate"])] if row["fate"] in kept else rest
        values[bins.at(row["x"])] += row["count"]
    if any(rest):
        layers["others"] = rest
    legend = [(name, colour % 8, int(sum(values))) for colour, (name, values) in enumerate(layers.items())]
    origin = bins.first if by_time else 0
    x_name = "time" if by_time else "version"
    title = "What became of answers"
    chart = area_chart(title, bins, layers, x_name=x_name, origin=origin)
    return legend, chart + shown(title, area_table(bins, layers, x_name, origin))


def _fate(name: str) -> str:
    return name or "pending"


def _start(database: sqlite3.Connection) -> int:
    found = database.execute(
        "SELECT min(at) FROM (SELECT min(time_ms) AS at FROM evals UNION SELECT min(time_ms) FROM curves)"
    ).fetchone()[0]
    return int(found or 0)
