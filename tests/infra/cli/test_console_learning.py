"""The Learning page: each measure of each lane over versions and over time, as a chart's data and as the table below it."""

import asyncio
import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.cli.console.learning import CURVES, MAX_BINS, MAX_POINTS, Point, fates_chart, thin
from infra.cli.settings import ConsoleConfig
from infra.ledger.index import LogIndex
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Block, DropMarker, PolicyEvent, topics
from schemas.errors import ConfigError
from schemas.fields import KEPT_FIGURES
from tests.infra.cli.console_rig import fill, filled, folded, live, look, looking, text_of

LANES = ("live", "usual")


async def measure(log: Log) -> None:
    """Versions of which each figure was measured, in two lanes; and answers that were dropped for two reasons."""
    await log.create_topics(partitions=1, keep_ms=-1)
    for version in range(4):
        of_lanes = [f"{lane}{name}" for lane in LANES for name in KEPT_FIGURES if name.startswith("/")]
        names = [*of_lanes, *(name for name in KEPT_FIGURES if not name.startswith("/"))]
        stats = {name: 0.125 * (version + 1) for name in names}
        event = PolicyEvent(
            event="published", policy="main", version=version, parent=version - 1, step=version, stats=stats
        )
        await log.publish(topics.POLICIES, event)
    for number, reason in enumerate(("too short", "too old", "too old")):
        answer = live(2 * number + 1, "asked", "said", version=number)
        await log.publish(topics.EXPERIENCES, Block((answer,)))
        marker = DropMarker(
            id=answer.id, group=answer.group, episode=0, group_size=1, reason=reason, stage="verify", processor="mine@1"
        )
        await log.publish(topics.VERIFIED, marker)


def charts_in(page: httpx.Response) -> dict[str, dict[str, Any]]:
    """What a page gives to its script, by title."""
    found = [json.loads(unescape(text)) for text in re.findall("data-chart='([^']*)'", page.text)]
    return {chart["title"]: chart for chart in found}


def test_what_is_drawn_of_a_step_is_what_the_event_of_its_version_keeps() -> None:
    assert {end for _, ends, _ in CURVES for end in ends} == set(KEPT_FIGURES)


@pytest.mark.parametrize("over", ["version", "time"])
def test_each_measure_of_learning_is_drawn_for_each_lane_and_every_value_has_its_version(
    tmp_path: Path, over: str
) -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    (page,) = look(tmp_path, f"/learning?over={over}", log=log, more=measure)
    charts = charts_in(page)
    for title, ends, zero in CURVES:
        chart = charts[title]
        names = {f"{lane}{end}" if end.startswith("/") else end for end in ends for lane in LANES}
        assert names == {line["name"] for line in chart["series"]} and chart["zero"] is zero, title
        assert chart["labels"] == [f"v{version}" for version in range(4)] and len(chart["x"]) == 4
        assert all(line["values"] == [0.125, 0.25, 0.375, 0.5] for line in chart["series"])
    areas = {line["name"]: line["values"] for line in charts["What became of answers"]["series"]}
    by_version = {"too old": [0, 1, 1], "too short": [1, 0, 0]}
    assert areas == (by_version if over == "version" else {"too old": [2], "too short": [1]})


@pytest.mark.parametrize("over", ["version", "time"])
def test_every_chart_is_also_a_table_that_a_keyboard_opens(tmp_path: Path, over: str) -> None:
    (page,) = look(tmp_path, f"/learning?over={over}")
    figures = re.findall("<figure>.*?</figure>", page.text, re.DOTALL)
    assert len(figures) > 4
    for figure in figures:
        table = figure.partition("<details")[2]
        assert "<summary>" in table and table.count('<th scope="row">') >= 1 and 'tabindex="0"' in table
    (suite,) = [figure for figure in figures if "<figcaption>Suite dev" in figure]
    assert re.search("v5</th>(<td>[^<]*</td>)?<td>0.6667, 0.2 to 0.9</td>", suite)
    assert charts_in(page)["Suite dev"]["series"][0]["low"] == [0.2] * 8
    assert "what became of answers as a table" in text_of(page).lower()


def test_runs_are_drawn_over_one_another_each_by_its_name(tmp_path: Path) -> None:
    """Two other runs beside this one, each with suites and curves of its own; a run that was never looked at is refused."""
    for name in ("last-week", "last-month"):
        folded(tmp_path / name / "state", fill).close()
    LogIndex(tmp_path / "untold" / "state" / "index.sqlite", run="t", policy="main").close()

    async def main() -> None:
        console = ConsoleConfig(beside=("../last-week", "../last-month"))
        async with looking(tmp_path / "now", await filled(), console) as (client, _):
            page = await client.get("/learning")
            charts = charts_in(page)
            lines = charts["Suite dev"]["series"]
            assert [(line["name"], line["dashed"]) for line in lines] == [
                ("t", False), ("last-week", True), ("last-month", True),
            ]  # fmt: skip
            assert len({line["colour"] for line in lines}) == 3
            entropy = {line["name"]: line["values"] for line in charts["Entropy"]["series"]}
            assert entropy["last-week live/entropy"][3] == 0.25 and len(entropy) == 3
        for nowhere in ("../nowhere", "../untold"):
            with pytest.raises(ConfigError, match="run `headrace console` on that run once"):
                async with looking(tmp_path / "now", await filled(), ConsoleConfig(beside=(nowhere,))):
                    pass

    asyncio.run(main())


def test_a_spike_in_a_long_curve_is_drawn_and_what_is_not_finite_is_not() -> None:
    points: list[Point] = [(at, at, 1.0, None, None) for at in range(10_000)]
    points[4_321], points[8_765] = (4_321, 4_321, 50.0, None, None), (8_765, 8_765, -50.0, None, None)
    points[5] = (5, 5, math.nan, None, None)
    kept = [point[0] for point in thin(points)]
    assert len(kept) <= MAX_POINTS and {4_321, 8_765, 0, 9_999} <= set(kept) and kept == sorted(kept)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (3, 8), (0, 119), (0, 120), (7, 2_600), (2_000_001, 2_000_301)])
def test_areas_over_however_many_versions_name_whole_ones_each_once_and_lose_no_answer(
    tmp_path: Path, low: int, high: int
) -> None:
    async def nothing(log: Log) -> None:
        pass

    index = folded(tmp_path, nothing)
    fates = [(version, 0, fate, 2) for version in {low, (low + high) // 2, high} for fate in ("trained", "too old", "")]
    fates += [(high, 0, f"reason {at}", 1) for at in range(9)]
    index.database.executemany("INSERT INTO fates VALUES (?, ?, ?, ?)", fates)
    chart = fates_chart(index.database, by_time=False)
    index.close()
    named: list[int] = []
    for label in chart["labels"]:
        first, _, last = label.partition(" to ")
        named += range(int(first.removeprefix("v")), int((last or first).removeprefix("v")) + 1)
    assert named[: high - low + 1] == [*range(low, high + 1)] and len(chart["x"]) <= MAX_BINS + 1
    totals = {line["name"]: line["total"] for line in chart["series"]}
    assert sum(totals.values()) == sum(fate[3] for fate in fates)
    assert next(iter(totals)) == "trained" and totals["trained"] == 2 * len({low, (low + high) // 2, high})
    assert "others" in totals and "pending" in totals
