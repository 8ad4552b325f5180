"""Charts as SVG, without script or style attributes. Each chart of lines or areas is also shown as a table (`tables`).

Colours are classes of the stylesheet (`s0` to `s7`), which sets them for light and dark. Each point has a title, which a
browser shows where the pointer rests. People without a pointer read the table.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
from markupsafe import Markup, escape

from infra.cli.terminal import printable

WIDTH, HEIGHT = 360, 132
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 20
MAX_POINTS, MAX_BINS = 240, 120


class ChartPoint(msgspec.Struct, frozen=True):
    """A point of a line. x, y: in the chart's units. title: shown where the pointer rests. low, high: of its interval.
    version: of the policy.
    """

    x: float
    y: float
    title: str = ""
    low: float | None = None
    high: float | None = None
    version: int = -1


class Line(msgspec.Struct, frozen=True):
    """A line. name: in the legend and in titles. points: from left to right. colour: 0 to 7. dashed: for another run."""

    name: str
    points: Sequence[ChartPoint]
    colour: int = 0
    dashed: bool = False


class Scale(msgspec.Struct, frozen=True):
    """A map from values to pixels. low, high: values. start, stop: the pixels where they lie."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Where a value is drawn."""
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return round(self.start + share * (self.stop - self.start), 1)


def safe(text: str) -> Markup:
    """Foreign text made safe for a page: no markup, and no character that turns or hides the text around it."""
    return escape(printable(text))


def thin(points: Sequence[ChartPoint], at_most: int = MAX_POINTS) -> list[ChartPoint]:
    """At most so many points: the first, the last, and the lowest and highest of each stretch between."""
    points = [one for one in points if math.isfinite(one.y)]
    if len(points) <= at_most:
        return points
    inner, many = range(1, len(points) - 1), max(1, (at_most - 2) // 2)
    kept = {0, len(points) - 1}
    for number in range(many):
        stretch = inner[number * len(inner) // many : (number + 1) * len(inner) // many]
        if stretch:
            kept |= {min(stretch, key=lambda at: points[at].y), max(stretch, key=lambda at: points[at].y)}
    return [points[at] for at in sorted(kept)]


def ticks(low: float, high: float, wanted: int = 4, *, whole: bool = False) -> list[float]:
    """Round values between two, some `wanted` of them. whole: no fractions.

    >>> ticks(0.0, 1.0), ticks(0.0, 1.0, whole=True)
    ([0.0, 0.5, 1.0], [0.0, 1.0])
    """
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / wanted
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))  # index * step is not round
    return [round(index * step, digits) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number in few characters.

    >>> short(12500.0), short(0.25), short(3.0)
    ('12.5k', '0.25', '3')
    """
    size = abs(value)
    if size >= 1e12:
        return f"{value:.0e}"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}" if size >= 1e-4 or not size else f"{value:.0e}"


def bounds(values: Sequence[float], zero: bool) -> tuple[float, float]:
    """The lowest and the highest value of the axis."""
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    return (low if zero and low == 0 else low - pad), high + pad


def line_chart(title: str, lines: Sequence[Line], *, x_name: str = "version", zero: bool = False) -> Markup:
    """Lines over one axis, with their intervals as bands."""
    lines = [line for line in (msgspec.structs.replace(one, points=thin(one.points)) for one in lines) if line.points]
    every = [point for line in lines for point in line.points]
    if not every:
        return Markup('<p class="none">nothing yet</p>')
    edges = [
        one for point in every for one in (point.y, point.low, point.high) if one is not None and math.isfinite(one)
    ]
    xs = Scale(min(one.x for one in every), max(one.x for one in every), LEFT, WIDTH - RIGHT)
    ys = Scale(*bounds(edges or [0.0], zero), HEIGHT - BOTTOM, TOP)
    parts = [_grid(xs, ys, x_name)]
    for line in lines:
        parts += _line(line, xs, ys)
    parts += _hits(lines, xs, ys)
    newest = ", ".join(f"{line.name} {short(line.points[-1].y)}" for line in lines)
    return _svg(f"{title}; newest: {newest}", parts)


def _line(line: Line, xs: Scale, ys: Scale) -> list[str]:
    points = [one for one in line.points if math.isfinite(one.y)]
    kind = f"s{line.colour % 8}{' dashed' if line.dashed else ''}"
    found = []
    band = [one for one in points if one.low is not None and one.high is not None]
    if len(band) > 1:
        upper = [f"{xs(one.x)},{ys(one.high or 0.0)}" for one in band]
        lower = [f"{xs(one.x)},{ys(one.low or 0.0)}" for one in reversed(band)]
        found.append(f'<polygon class="band {kind}" points="{" ".join([*upper, *lower])}"/>')
    found.append(f'<polyline class="line {kind}" points="{" ".join(f"{xs(one.x)},{ys(one.y)}" for one in points)}"/>')
    if len(points) <= 60:
        found += [f'<circle class="dot {kind}" cx="{xs(one.x)}" cy="{ys(one.y)}" r="1.8"/>' for one in points]
    return found


def _hits(lines: Sequence[Line], xs: Scale, ys: Scale) -> list[str]:
    """Areas for the pointer: at each x the points of every line. Where there are several lines, each point names its own."""
    places: dict[float, list[tuple[Line, ChartPoint]]] = {}
    for line in lines:
        for one in line.points:
            if one.title and math.isfinite(one.y):
                places.setdefault(xs(one.x), []).append((line, one))
    found = []
    for at, left, wide in _rooms(sorted(places), xs):
        mine = places[at]
        shown = "\n".join(f"{line.name} {one.title}" if len(lines) > 1 else one.title for line, one in mine)
        marks = "".join(
            f'<circle class="mark s{line.colour % 8}" cx="{at}" cy="{ys(one.y)}" r="3"/>' for line, one in mine
        )
        found.append(f"<g>{_hit(left, wide)}{marks}<title>{safe(shown)}</title></g>")
    return found


def _rooms(places: Sequence[float], xs: Scale) -> list[tuple[float, float, float]]:
    """Each place with the left edge and the width of the area that is nearer to it than to its neighbours."""
    edges = [xs.start, *((one + other) / 2 for one, other in pairwise(places)), xs.stop]
    return [(at, left, right - left) for at, (left, right) in zip(places, pairwise(edges), strict=True)]


def _hit(left: float, wide: float) -> str:
    return f'<rect class="hit" x="{left:.1f}" y="{TOP}" width="{wide:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'


class Bins(msgspec.Struct, frozen=True):
    """Equal ranges of whole numbers. first: where the first bin begins. width: of each. count: of bins.

    Example: Bins(first=40, width=2, count=100)
    """

    first: int
    width: int
    count: int

    def at(self, x: int) -> int:
        """Which bin a number is in."""
        return (x - self.first) // self.width


def bins_of(low: int, high: int) -> Bins:
    """At most MAX_BINS + 1 bins from `low` to `high`, each as wide as the next.

    >>> bins_of(3, 8), bins_of(0, 300)
    (Bins(first=3, width=1, count=6), Bins(first=0, width=3, count=101))
    """
    width = -(-(high - low + 1) // MAX_BINS)
    return Bins(low, width, (high - low) // width + 1)


def area_chart(
    title: str, bins: Bins, layers: Mapping[str, Sequence[float]], *, x_name: str, origin: int = 0
) -> Markup:
    """Stacked areas in the order of the mapping, as steps: no value is made up between two bins. The legend names them.
    layers: a value for each bin. origin: the number that the axis counts from.
    """
    if not layers:
        return Markup('<p class="none">nothing yet</p>')
    totals = [sum(values) for values in zip(*layers.values(), strict=True)]
    edges = [bins.first - origin + index * bins.width for index in range(bins.count + 1)]
    xs = Scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    ys = Scale(0.0, max(totals) * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)
    floor = [0.0] * bins.count
    named = Scale(edges[0], edges[-1] - bins.width, xs(edges[0] + bins.width / 2), xs(edges[-1] - bins.width / 2))
    parts = [_grid(named, ys, x_name)]
    for colour, (name, values) in enumerate(layers.items()):
        roof = [below + value for below, value in zip(floor, values, strict=True)]
        upper, lower = _stairs(edges, roof, xs, ys), _stairs(edges, floor, xs, ys)[::-1]
        total = f"{name}: {sum(values):,.0f}"
        parts.append(
            f'<polygon class="area s{colour % 8}" points="{" ".join([*upper, *lower])}"><title>{safe(total)}</title></polygon>'
        )
        floor = roof
    # Over the areas, so that the pointer names every layer at once.
    for index, (left, right) in enumerate(pairwise(edges)):
        counts = [f"{name} {values[index]:,.0f}" for name, values in layers.items() if values[index]] or ["nothing"]
        where = _x_label(left, x_name) + (f" to {_x_label(right - 1, x_name)}" if bins.width > 1 else "")
        shown = "\n".join([where, *counts])
        parts.append(f"<g>{_hit(xs(left), xs(right) - xs(left))}<title>{safe(shown)}</title></g>")
    return _svg(title, parts)


def _stairs(edges: Sequence[float], values: Sequence[float], xs: Scale, ys: Scale) -> list[str]:
    """A level for each bin, from its left edge to its right one."""
    return [
        f"{xs(edge)},{ys(value)}"
        for (left, right), value in zip(pairwise(edges), values, strict=True)
        for edge in (left, right)
    ]


def spark(values: Sequence[float], title: str) -> Markup:
    """A line without axes, as high as a word."""
    kept = [value for value in values if math.isfinite(value)]
    if len(kept) < 2:
        return Markup("")
    xs, ys = Scale(0, len(kept) - 1, 1, 79), Scale(min(0.0, *kept), max(kept) or 1.0, 17, 2)
    points = " ".join(f"{xs(at)},{ys(value)}" for at, value in enumerate(kept))
    return Markup(
        f'<svg class="spark" viewBox="0 0 80 18" role="img" aria-label="{safe(title)}"><polyline class="line s0" '
        f'points="{points}"/></svg>'
    )


def interval(share: float, low: float | None, high: float | None) -> Markup:
    """A share with its 95 % interval on a line from 0 to 1."""
    at = Scale(0.0, 1.0, 2, 118)
    band = (
        f'<rect class="band s0" x="{at(low)}" y="5" width="{max(1.0, at(high) - at(low)):.1f}" height="8" rx="2"/>'
        if low is not None and high is not None
        else ""
    )
    return Markup(
        f'<svg class="interval" viewBox="0 0 120 18" aria-hidden="true"><line class="axis" x1="2" x2="118" y1="9" y2="9"/>'
        f'{band}<circle class="dot s0" cx="{at(share)}" cy="9" r="3"/></svg>'
    )


def _grid(xs: Scale, ys: Scale, x_name: str) -> str:
    found = []
    for value in ticks(ys.low, ys.high):
        y = ys(value)
        found.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        found.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 3}">{short(value)}</text>')
    for value in ticks(xs.low, xs.high, 5, whole=x_name == "version") if xs.high > xs.low else [xs.low]:
        found.append(f'<text class="tick mid" x="{xs(value)}" y="{HEIGHT - 6}">{_x_label(value, x_name)}</text>')
    return "".join(found)


def _x_label(value: float, x_name: str) -> str:
    return f"v{value:.0f}" if x_name == "version" else f"{value:.10g}m"


def _svg(title: str, parts: Sequence[str]) -> Markup:
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(title)}">{"".join(parts)}</svg>'
    )
