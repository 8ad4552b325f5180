"""A share of sessions, or a version on trial, that no canary takes care of is an alarm that says what to do."""

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest
from msgspec.structs import replace

from actors.gateway.config import CanaryShare
from actors.gateway.http.canary import SILENT_S, Canary
from infra.cli.look.status import read_status
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.roles.process import MISSING_S, Absence
from schemas import PolicyEvent, Progress
from schemas.fields import CANARY_MISSING, Channel
from schemas.topics import POLICIES, REPORTS
from tests.actors.gateway.gateway_rig import serving
from tests.actors.rig import MASTER, TopicArrivals, master, running, until
from tests.simulator.virtual_loop import VirtualLoop

LATEST_S = MISSING_S + 20.0  # until a canary that stopped reporting is missed, and a report more


def test_an_alarm_sounds_once_when_its_time_has_come_and_again_only_after_they_were_back() -> None:
    absence = Absence(limit_s=30.0)
    sounded = [absence.look(now_s, wanted=True, there=False) for now_s in (100.0, 129.0, 130.0, 200.0)]
    assert sounded == [False, False, True, False] and absence.missing_s == 100.0
    assert not absence.look(201.0, wanted=True, there=True) and absence.missing_s == 0.0
    assert not absence.look(231.0, wanted=False, there=False) and absence.missing_s == 0.0
    assert [absence.look(now_s, wanted=True, there=False) for now_s in (300.0, 330.0)] == [False, True]


async def alarms(log: Log, now_s: float) -> list[str]:
    return [one for one in (await read_status(log, now_s=now_s, max_lag=1000))["alarms"] if "canary" in one]


async def moved(log: Log, version: int, channel: Channel) -> None:
    await log.publish(POLICIES, PolicyEvent(event="promoted", policy="main", version=version, channel=channel))


def test_a_trial_that_no_canary_serves_is_an_alarm_within_its_time_until_one_is_heard_of_or_the_trial_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = VirtualLoop(Random(0))

    async def check() -> None:
        log = Log(MemoryBus(lambda: round(loop.time() * 1000)), "test")
        await log.create_topics(partitions=1, keep_ms=-1)
        heard = TopicArrivals(log, REPORTS)

        async def missing() -> bool:
            await asyncio.sleep(1.0)
            return heard.of(Progress)[-1].gauges[CANARY_MISSING] > 0

        async with running(master(log, replace(MASTER, report_s=1.0)), asyncio.create_task(heard.listen())):
            await moved(log, 3, "stable")
            await asyncio.sleep(LATEST_S)
            assert not await missing(), "nothing is on trial"
            await moved(log, 5, "canary")
            await asyncio.sleep(MISSING_S / 2)
            assert not await missing() and await alarms(log, loop.time()) == []
            await asyncio.sleep(LATEST_S)
            (alarm,) = await alarms(log, loop.time())
            assert "version 5 is on trial and no canary has been heard of for" in alarm
            assert "start headrace serve --channel canary" in alarm and "headrace promote or rollback" in alarm
            assert caplog.text.count("canary_missing trial=5") == 1
            await log.publish(REPORTS, Progress(role="serve", instance="serve/1", is_canary=True))
            await asyncio.sleep(2.0)
            assert not await missing() and await alarms(log, loop.time()) == []
            await asyncio.sleep(LATEST_S)
            assert await missing(), "it was heard of once, and never again"
            await moved(log, 5, "stable")
            await asyncio.sleep(2.0)
            assert not await missing()

    loop.run_until_complete(check())


def test_a_share_of_sessions_without_a_canary_is_an_alarm_within_its_time_until_it_is_there() -> None:
    loop, metrics, there = VirtualLoop(Random(0)), Metrics("serve"), False

    async def handle(request: httpx.Request) -> httpx.Response:
        if not there:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, json={"channel": "canary"})

    async def check() -> None:
        nonlocal there
        log = Log(MemoryBus(lambda: round(loop.time() * 1000)), "test")
        await log.create_topics(partitions=1, keep_ms=-1)
        share = CanaryShare(url="http://canary")
        canary = Canary(share, metrics, transport=httpx.MockTransport(handle))
        watching = asyncio.create_task(canary.watch())

        async def told() -> list[str]:
            await log.publish(REPORTS, Progress(role="serve", instance="serve/1", gauges=metrics.gauges()))
            return await alarms(log, loop.time())

        await asyncio.sleep(MISSING_S / 2)
        assert await told() == []
        await asyncio.sleep(MISSING_S + SILENT_S)
        (alarm,) = await told()
        assert "a share of sessions is meant for one and no canary has been heard of for" in alarm
        assert "start headrace serve --channel canary" in alarm
        there = True
        await asyncio.sleep(2.0)
        assert await told() == []
        watching.cancel()
        await canary.close()

    loop.run_until_complete(check())


@pytest.mark.parametrize("channel", ["stable", "canary"])
def test_a_gateway_reports_whether_it_is_a_canary(tmp_path: Path, channel: Channel) -> None:
    async def check() -> None:
        async with serving(tmp_path, channel=channel, report_s=0.05) as served:
            heard = TopicArrivals(served.log, REPORTS)
            async with running(asyncio.create_task(heard.listen())):
                await until(lambda: bool(heard.of(Progress)), seconds=60)
            assert heard.of(Progress)[0].is_canary == (channel == "canary")

    asyncio.run(check())
