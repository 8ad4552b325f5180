"""The broker's disk is full under stream workers: what they make of the log afterwards is what one makes of it in peace."""

import asyncio
import signal
from pathlib import Path

import pytest

from infra.local.broker import EmbeddedKafka
from infra.log.log import Log
from schemas import Closure
from tests.e2e.test_full_disk_roles import end_by_full_disk
from tests.e2e.test_streams_kill import (
    DEADLINE_S,
    NUM_GROUPS,
    Crew,
    all_closed,
    closures,
    compared,
    contents,
    crew,
    feed,
    letters,
    opened,
    traffic,
)

pytestmark = pytest.mark.full
SOME = 20  # groups closed before the disk is full


def test_workers_fill_the_buffer_after_the_brokers_disk_was_full_as_one_does_in_peace(
    app_name: str, tmp_path: Path
) -> None:
    asyncio.run(compare_with_peace(app_name, tmp_path))


async def compare_with_peace(app: str, folder: Path) -> None:
    """The same input through one worker in peace, and through two whose broker has a full disk in between."""
    records = traffic(seed=17)
    half = len(records) // 2
    with EmbeddedKafka(folder / "kafka") as broker:
        async with opened(broker.bootstrap, f"{app}-one", folder / "one") as one:
            await feed(one, records, 0.0)
            with crew(broker.bootstrap, one.app, folder / "one", 1) as workers:
                expected = compared(await all_closed(one, workers))
                assert workers.stop() == [0]
            peace, poison = await contents(one), len(await letters(one))
        async with opened(broker.bootstrap, f"{app}-two", folder / "two") as two:
            with crew(broker.bootstrap, two.app, folder / "two", 2) as workers:
                await feed(two, records[:half], 0.0)
                await closed(two, workers, SOME)
                await end_by_full_disk(broker, two)
                broker.kill()
                await asyncio.to_thread(broker.start)
                await feed(two, records[half:], 0.0)
                found = await closed(two, workers, NUM_GROUPS)
                assert workers.stop() == [0, 0]
            assert await contents(two) == peace
            assert compared(found) == expected
            assert len(await letters(two)) == poison


async def closed(log: Log, workers: Crew, least: int) -> dict[tuple[str, int, int], Closure]:
    """Closures once so many groups have one; a worker that ended in one line is started again."""
    found = await closures(log)
    async with asyncio.timeout(DEADLINE_S):
        while len({group for group, _, _ in found}) < least:
            for index, worker in enumerate(workers.workers):
                if worker.poll() is not None:
                    assert worker.returncode == 1, f"{worker.returncode}: {workers.said.read_text()[-2000:]}"
                    await asyncio.to_thread(workers.replace, index, signal.SIGTERM, 1.0)
            await asyncio.sleep(0.5)
            found = await closures(log)
    assert "Traceback" not in workers.said.read_text()
    return found
