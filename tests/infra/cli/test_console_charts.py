"""Charts of the console: what they name, what they keep, and what they do not make up."""

import asyncio
import re
from pathlib import Path

import pytest

from infra.cli.console.charts import MAX_POINTS, Bins, ChartPoint, Line, area_chart, bins_of, line_chart, thin
from infra.cli.console.tables import area_table, line_table
from tests.infra.cli.console_rig import looking
from tests.infra.cli.test_console_pages import filled, text_of


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
    points = [ChartPoint(version, 0.5, f"v{version}") for version in range(newest + 1)]
    for chart in (
        line_chart("suite", [Line("dev", points)]),
        area_chart("fates", bins_of(0, newest), {"trained": [1.0] * (newest + 1)}, x_name="version"),
    ):
        named = re.findall(r'class="tick mid"[^>]*>v([^<]*)<', chart)
        assert named and all(one.isdecimal() and int(one) <= newest for one in named), named


def test_a_spike_in_a_long_curve_is_drawn() -> None:
    points = [ChartPoint(at, 1.0) for at in range(10_000)]
    points[4_321], points[8_765] = ChartPoint(4_321, 50.0), ChartPoint(8_765, -50.0)
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


@pytest.mark.parametrize("over", ["versions", "time"])
def test_every_figure_of_the_learning_page_is_also_a_table_that_a_keyboard_opens(tmp_path: Path, over: str) -> None:
    async def main() -> None:
        async with looking(tmp_path, await filled()) as (client, _):
            page = await client.get(f"/learning?over={over}")
            figures = re.findall("<figure>.*?</figure>", page.text, re.DOTALL)
            assert len(figures) > 4
            for figure in figures:
                table = figure.partition("<details")[2]
                first = table.partition('<th scope="col">')[2].partition("<")[0]
                assert "<summary>" in table and first in ("version", "minute"), figure
                assert table.count('<th scope="row">') >= 1 and 'tabindex="0"' in table
            (suite,) = [one for one in figures if "<figcaption>Suite dev" in one]
            assert re.search("v5</th>(<td>[^<]*</td>)?<td>0.6667</td><td>0.2 to 0.9</td>", suite)
            if over == "versions":
                assert "Suite dev as a table version value 95 % interval v0 0.6667" in text_of(page)

    asyncio.run(main())


def test_the_table_of_a_figure_holds_what_is_drawn_and_no_more() -> None:
    points = [ChartPoint(at, float(at), version=at) for at in range(10_000)]
    table = line_table([Line("a", points), Line("b", [ChartPoint(0, 0.5, low=0.25, high=0.75, version=0)])], "version")
    assert table.columns == ["version", "of", "value", "95 % interval"]
    assert len(table.rows) == MAX_POINTS + 1 and table.rows[-1] == ["v0", "b", "0.5", "0.25 to 0.75"]
    areas = area_table(Bins(4, 2, 3), {"trained": [1.0, 0.0, 2_000.0], "late": [0.0, 0.0, 3.0]}, "version")
    assert areas.columns == ["version", "trained", "late"]
    assert areas.rows == [["v4 to v5", "1", "0"], ["v8 to v9", "2,000", "3"]]
