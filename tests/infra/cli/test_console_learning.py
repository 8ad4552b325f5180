"""The learning page: of every lane what the issue of learning is judged by, over versions and over time."""

import asyncio
import re
from pathlib import Path

import pytest

from infra.cli.console.learning import CURVES
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Block, DropMarker, PolicyEvent, topics
from schemas.fields import KEPT_FIGURES
from tests.infra.cli.console_rig import live, looking

LANES = ("live", "usual")
VERSIONS = 4


async def learned() -> Log:
    """Versions of which each figure was measured, in two lanes; and answers that were dropped for two reasons."""
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await log.create_topics(partitions=1, keep_ms=-1)
    for version in range(VERSIONS):
        of_lanes = [f"{lane}{name}" for lane in LANES for name in KEPT_FIGURES if name.startswith("/")]
        names = [*of_lanes, *(name for name in KEPT_FIGURES if not name.startswith("/"))]
        stats = {name: 0.125 * (version + 1) for name in names}
        event = PolicyEvent(
            event="published", policy="main", version=version, parent=version - 1, step=version, stats=stats
        )
        await log.publish(topics.POLICIES, event)
    for number, reason in enumerate(("too short", "too old", "too old")):
        one = live(2 * number + 1, "asked", "said", version=number)
        await log.publish(topics.EXPERIENCES, Block((one,)))
        marker = DropMarker(
            id=one.id, group=one.group, episode=0, group_size=1, reason=reason, stage="verify", processor="mine@1"
        )
        await log.publish(topics.VERIFIED, marker)
    return log


@pytest.mark.parametrize("over", ["version", "time"])
def test_each_measure_of_learning_is_drawn_for_each_lane_and_every_point_names_its_version(
    tmp_path: Path, over: str
) -> None:
    async def main() -> None:
        async with looking(tmp_path, await learned()) as (client, _):
            page = (await client.get(f"/learning?over={over}")).text
            for title, ends, _ in CURVES:
                figure = page.partition(f"<figcaption>{title}<")[2].partition("</figure>")[0]
                lines = sum(len(LANES) if end.startswith("/") else 1 for end in ends)
                assert figure.count('<polyline class="line') == lines, title
                told = "\n".join(re.findall("<title>([^<]*)", figure))
                assert all(told.count(f"v{version}: {0.125 * (version + 1):.4g}") == lines for version in range(4)), (
                    title
                )

    asyncio.run(main())


def test_drops_by_reason_are_areas_one_upon_the_other_with_how_many_of_each(tmp_path: Path) -> None:
    async def main() -> None:
        async with looking(tmp_path, await learned()) as (client, _):
            page = (await client.get("/learning")).text
            figure = page.partition("<figcaption>What became of answers")[2].partition("</figure>")[0]
            told = re.findall('<polygon class="area s([0-9])"[^>]*><title>([^<]*)', figure)
            assert told == [("0", "too old: 2"), ("1", "too short: 1")]
            assert [one.splitlines() for one in re.findall("<g>.*?<title>([^<]*)", figure, re.DOTALL)] == [
                ["v0", "too short 1"], ["v1", "too old 1"], ["v2", "too old 1"],
            ]  # fmt: skip

    asyncio.run(main())
