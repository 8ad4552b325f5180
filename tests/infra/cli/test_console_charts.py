"""Charts of the console: what they name, what they keep, and what they do not make up."""

import re

import pytest

from infra.cli.console.charts import MAX_POINTS, Bins, Line, Point, area_chart, bins_of, line_chart, thin


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (3, 8), (0, 119), (0, 120), (7, 2_600), (100_000, 250_001), (2_000_001, 2_000_301)]
)
def test_areas_over_however_many_versions_name_whole_ones_each_once(low: int, high: int) -> None:
    bins = bins_of(low, high)
    assert bins.at(low) == 0 and bins.at(high) == bins.count - 1 < 120
    chart = area_chart("fates", bins, {"trained": [1.0] * bins.count}, x_name="version")
    told = [one.splitlines()[0] for one in re.findall(r"<g>.*?<title>([^<]*)", chart, re.DOTALL)]
    named: list[int] = []
    for one in told:
        first, _, last = one.partition(" to ")
        named += range(int(first.removeprefix("v")), int((last or first).removeprefix("v")) + 1)
    assert named[: high - low + 1] == [*range(low, high + 1)]


@pytest.mark.parametrize("newest", [1, 2, 3, 7, 12])
def test_the_axis_of_a_small_run_names_versions_that_there_are(newest: int) -> None:
    points = [Point(version, 0.5, f"v{version}") for version in range(newest + 1)]
    for chart in (
        line_chart("suite", [Line("dev", points)]),
        area_chart("fates", bins_of(0, newest), {"trained": [1.0] * (newest + 1)}, x_name="version"),
    ):
        named = re.findall(r'class="tick mid"[^>]*>v([^<]*)<', chart)
        assert named and all(one.isdecimal() and int(one) <= newest for one in named), named


def test_a_spike_in_a_long_curve_is_drawn() -> None:
    points = [Point(at, 1.0) for at in range(10_000)]
    points[4_321], points[8_765] = Point(4_321, 50.0), Point(8_765, -50.0)
    kept = thin(points)
    assert len(kept) <= MAX_POINTS and {4_321, 8_765, 0, 9_999} <= {one.x for one in kept}
    assert [one.x for one in kept] == sorted(one.x for one in kept)


def test_where_nobody_sampled_an_area_is_empty() -> None:
    """Versions 0 and 4 were sampled: between them the roof lies on the floor."""
    chart = area_chart("fates", Bins(0, 1, 5), {"trained": [10.0, 0.0, 0.0, 0.0, 10.0]}, x_name="version")
    (points,) = re.findall(r'<polygon class="area s0" points="([^"]*)"', chart)
    places = [tuple(map(float, one.split(","))) for one in points.split()]
    floor = max(y for _, y in places)
    low, high = min(x for x, _ in places), max(x for x, _ in places)
    inner = [y for x, y in places if low + 0.25 * (high - low) < x < high - 0.25 * (high - low)]
    assert inner and set(inner) == {floor}
    assert re.findall("<title>(v2[^<]*)", chart) == ["v2\nnothing"]
