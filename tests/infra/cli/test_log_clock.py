"""Ages go by the log's clock, however far off the one of this machine is."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from infra.cli.look.clock import LISTEN_S, LogClock, clock_line
from infra.cli.look.status import GONE_S, read_status
from infra.log.follower import Follower
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import Progress, topics
from tests.infra.cli.test_heard_hour import CountingFollower
from tests.infra.cli.test_status_command import shown
from tests.simulator.virtual_loop import VirtualLoop

HOURS_S = 7200.0
TRUE_S = 1_763_715_600.0  # what time it is when the loop begins
WANTED = {"explore": 0}


class Scene:
    """An app whose broker has the right time; this machine's clock is `off_s` ahead of it."""

    def __init__(self, off_s: float) -> None:
        self.loop = VirtualLoop(Random(0))
        self.began_s = self.loop.time()
        self.off_s = off_s
        self.log = Log(MemoryBus(lambda: round(self.true_s() * 1000)), "t")
        self.follower = Follower(self.log, (topics.REPORTS,))
        self.clock = LogClock(self.log, self.follower, silent_s=GONE_S, wall_s=lambda: self.true_s() + self.off_s)

    def true_s(self) -> float:
        return TRUE_S + self.loop.time() - self.began_s

    async def speak(self, pid: int, *, for_s: float = float("inf")) -> None:
        began_s = self.true_s()
        while self.true_s() - began_s < for_s:
            report = Progress(role="explore", instance=f"explore/vm/{pid}", state="exploring")
            await self.log.publish(topics.REPORTS, report)
            await asyncio.sleep(2.0)

    async def status(self) -> dict[str, Any]:
        now_s = await self.clock.now_s()
        state = await read_status(self.log, now_s=now_s, max_lag=10, wanted=WANTED)
        return {**state, "clock_off_s": self.clock.off_s}

    def play(self, act: Callable[[], Any]) -> dict[str, Any]:
        async def main() -> dict[str, Any]:
            await self.log.create_topics(partitions=1, keep_ms=-1)
            state: dict[str, Any] = await act()
            await self.follower.close()
            return state

        return self.loop.run_until_complete(main())


@pytest.mark.parametrize("off_s", [0.0, HOURS_S, -HOURS_S])
def test_who_runs_and_who_died_is_the_same_whatever_this_machines_clock_says(off_s: float) -> None:
    scene = Scene(off_s)

    async def act() -> dict[str, Any]:
        lasting = asyncio.create_task(scene.speak(11))
        await scene.speak(12, for_s=60.0)
        await asyncio.sleep(30.0)
        state = await scene.status()
        lasting.cancel()
        return state

    state = scene.play(act)
    (line,) = state["alarms"]
    assert line.startswith("1 of 2 explore run: explore/vm/12 was last heard of 3")
    assert [role["instance"] for role in state["roles"]] == ["explore/vm/11"]
    assert state["clock_off_s"] == pytest.approx(off_s, abs=2.5)
    assert ("clock      this machine's clock is 2 h 0 min" in shown(state)) == bool(off_s)


@pytest.mark.parametrize("off_s", [0.0, HOURS_S, -HOURS_S])
def test_an_app_in_which_all_died_is_never_taken_for_one_that_runs(off_s: float) -> None:
    scene = Scene(off_s)

    async def act() -> dict[str, Any]:
        await scene.speak(11, for_s=10.0)
        await asyncio.sleep(600.0)
        return await scene.status()

    (line,) = scene.play(act)["alarms"]
    assert line.startswith("no explore runs: explore/vm/11 was last heard of")


def test_a_clock_that_is_right_waits_for_nothing() -> None:
    scene = Scene(1.5)

    async def act() -> dict[str, Any]:
        speaking = asyncio.create_task(scene.speak(11))
        await asyncio.sleep(7.0)
        before_s = scene.true_s()
        state = await scene.status()
        assert scene.true_s() - before_s < 0.1 < LISTEN_S
        speaking.cancel()
        return state

    assert scene.play(act)["clock_off_s"] == 0.0


@pytest.mark.parametrize("off_s", [0.0, HOURS_S, -HOURS_S])
def test_who_looks_again_and_again_finds_the_time_without_waiting(off_s: float) -> None:
    scene = Scene(off_s)

    async def act() -> dict[str, Any]:
        speaking = asyncio.create_task(scene.speak(11))
        for _ in range(3):
            await asyncio.sleep(3.0)
            before_s = scene.true_s()
            now_s = await scene.clock.glance_s(10.0)
            assert scene.true_s() - before_s < 0.1
        assert now_s == pytest.approx(scene.true_s(), abs=3.0)
        speaking.cancel()
        return {}

    scene.play(act)


def test_a_report_is_read_once_however_often_one_looks() -> None:
    scene = Scene(0.0)
    counted = CountingFollower(scene.log, (topics.REPORTS,))
    clock = LogClock(scene.log, counted, silent_s=GONE_S, wall_s=scene.true_s)

    async def act() -> dict[str, Any]:
        await scene.speak(11, for_s=10.0)
        for _ in range(3):
            await clock.glance_s(10.0)
        assert counted.num_read == 1
        await scene.speak(11, for_s=10.0)
        await clock.glance_s(10.0)
        assert counted.num_read == 1 + 5
        await counted.close()
        return {}

    scene.play(act)


def test_the_difference_is_told_in_one_line() -> None:
    assert clock_line(0.0) == ""
    assert clock_line(-7260.0).startswith("this machine's clock is 2 h 1 min behind the log's; ")
    assert clock_line(12.0).startswith("this machine's clock is 12 s ahead of the log's; ")
