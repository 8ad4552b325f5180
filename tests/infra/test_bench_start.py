"""The benchmark of starts of processes: cold and warm, and a role that does not start is named."""

import asyncio
import sys
from collections.abc import Mapping
from os import makedirs
from os.path import exists
from pathlib import Path

import pytest

from infra.cli.bench.common.awaited_log import beside_child
from infra.cli.bench.common.children import end
from infra.cli.bench.growth.start import (
    DEMO,
    KINDS,
    ROLES,
    Started,
    StartPlan,
    figures_of,
    fresh_caches,
    rounds_of,
    run,
)
from infra.cli.bench.targets import TARGETS
from infra.cli.run.up import ROLES as UP
from infra.local.process import start_watched


def test_of_each_the_best_round_is_shown_and_the_target_is_of_a_figure() -> None:
    found = {f"{DEMO}_{kind}": [Started(3.0, 9.0), Started(4.0, 8.0)] for kind in KINDS}
    figures = figures_of(found)
    assert figures["demo_cold_cpu_s"] == 3.0 and figures["demo_cold_wall_s"] == 8.0
    assert set(TARGETS["start"]) <= set(figures) and set(UP) <= set(ROLES)


def test_a_cold_start_finds_nothing_and_a_warm_one_what_that_left(tmp_path: Path) -> None:
    seen: list[tuple[str, str, bool]] = []

    async def start(log: Path, env: Mapping[str, str]) -> Started:
        caches = Path(env["PYTHONPYCACHEPREFIX"])
        seen.append((log.parent.name, caches.parent.name, exists(caches)))  # noqa: ASYNC240
        makedirs(caches, exist_ok=True)
        return Started(1.0, 2.0)

    found = rounds_of("master", start, tmp_path, 2, lambda line: None)
    assert {name: len(starts) for name, starts in found.items()} == {"master_cold": 2, "master_warm": 2}
    assert seen == [
        ("0-cold", "caches-0", False), ("0-warm", "caches-0", True),
        ("1-cold", "caches-1", False), ("1-warm", "caches-1", True),
    ]  # fmt: skip
    assert all(str(tmp_path) in value for value in fresh_caches(tmp_path).values() if value)


def test_what_does_not_start_is_said_in_one_line_and_has_no_figure(tmp_path: Path) -> None:
    said: list[str] = []

    async def start(log: Path, env: Mapping[str, str]) -> Started:
        raise RuntimeError("headrace: no engine")

    assert rounds_of("explore", start, tmp_path, 3, said.append) == {}
    assert said == ["start: explore, cold", "start: explore is left out: headrace: no engine"]


@pytest.mark.full
def test_a_role_is_measured_until_it_works() -> None:
    said: list[str] = []
    figures = run(StartPlan(roles=("master", "nobody"), demo=False), said.append)
    assert set(figures) == {f"master_{kind}_{clock}_s" for kind in KINDS for clock in ("cpu", "wall")}
    assert all(value > 0 for value in figures.values())
    assert figures["master_warm_cpu_s"] < figures["master_cold_cpu_s"], "with all of it compiled it works less"
    assert len(said) == 4 and said[-1].startswith("start: nobody is left out: ")


def test_whoever_waits_for_a_process_hears_that_it_has_ended(tmp_path: Path) -> None:
    async def waits() -> None:
        child = start_watched([sys.executable, "-c", "print('no engine')"], log=tmp_path / "log")
        try:
            await beside_child(asyncio.create_task(asyncio.sleep(600)), child, tmp_path / "log")
        finally:
            end(child)

    with pytest.raises(RuntimeError, match="no engine"):
        asyncio.run(waits())
