"""A stream worker goes by the broker's clock, however far off that of its machine is."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from infra.log.bus import RecordPosition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from schemas import Closure, Progress
from schemas.topics import PROGRESS, VERIFIED
from streams.collect.inbox import CollectDriver
from streams.worker import LogTime, report
from tests.simulator.virtual_loop import VirtualLoop
from tests.streams.collect.collecting import answer, block
from tests.streams.collect.test_collector import settings
from tests.streams.deliveries import KeptDelivery

HOURS_MS = 2 * 3_600_000
TRUE_MS = 1_763_715_600_000


async def feed(log: Log, driver: CollectDriver) -> None:
    """Hand on what comes, ticks too."""
    async for message in log.read_all(VERIFIED, until_end=False):
        await driver.accept(KeptDelivery(message.record, generation=1))


@pytest.mark.parametrize("off_ms", [HOURS_MS, -HOURS_MS, 0])
def test_a_group_of_an_idle_partition_is_closed_in_time_whatever_the_machines_clock_says(
    off_ms: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = VirtualLoop(Random(0))
    began_s = loop.time()

    def true_ms() -> int:
        return TRUE_MS + round(1000 * (loop.time() - began_s))

    async def closed_after_ms() -> int:
        bus = MemoryBus(true_ms)
        log, time = Log(bus, "t"), LogTime(lambda: true_ms() + off_ms)
        await log.create_topics(partitions=1, keep_ms=-1)
        telling = asyncio.create_task(report(log, lambda: Progress(role="process", instance="p"), time))
        async with asyncio.TaskGroup() as tasks:

            async def committed(partition: int) -> int:
                return 0

            driver = CollectDriver(log, Metrics("process"), settings(tmp_path), committed, tasks, wall_ms=time.now_ms)
            driver.assigned({0}, 1)
            came = await log.publish(VERIFIED, block(answer("t.0", 0)))  # of two: the group waits for the other
            feeding = tasks.create_task(feed(log, driver))
            async for closure in log.read_all(PROGRESS, until_end=False):
                if isinstance(closure.value, Closure):
                    break
            feeding.cancel()
            driver.retire(1)
            await driver.finish()
        telling.cancel()
        return closure.record.timestamp_ms - came.timestamp_ms

    with caplog.at_level(logging.WARNING):
        took_ms = loop.run_until_complete(closed_after_ms())
    rules = settings(tmp_path).rules
    assert rules.deadline_ms <= took_ms <= rules.deadline_ms + 10_000
    said = [one.getMessage() for one in caplog.records if "clock_off" in one.getMessage()]
    assert said == ([f"clock_off seconds={off_ms // 1000}: stages go by the broker's clock"] if off_ms else [])


def heard(time: LogTime, stored_ms: int, then: Callable[[], None] = lambda: None) -> None:
    """A record that the broker says was stored then. then: what happens before that is known."""

    async def storing() -> RecordPosition:
        then()
        return RecordPosition("t.reports", 0, 0, stored_ms)

    asyncio.run(time.hear(storing()))


def test_a_clock_that_is_put_right_is_gone_by_again() -> None:
    now = [HOURS_MS]
    time = LogTime(lambda: now[0])
    assert time.now_ms() == HOURS_MS
    heard(time, 0)
    assert time.now_ms() == 0
    now[0] = 2000
    heard(time, 1990)
    assert time.now_ms() == 2000


@pytest.mark.parametrize("stored_ms", [1_000_000, 1_030_000, 1_060_000])
def test_a_report_that_took_a_minute_says_nothing_against_the_clock(stored_ms: int) -> None:
    now = [1_000_000]
    time = LogTime(lambda: now[0])
    heard(time, stored_ms, lambda: now.append(now.pop() + 60_000))
    assert time.now_ms() == 1_060_000
