"""No start grows with the age of the app: what each role reads after one day and after thirty, by counts of records."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache

import pytest

from infra.policies.beginning import LOOK
from infra.store.memory import MemoryStore
from schemas.topics import REPORTS
from tests.starts import (
    REPORT,
    CountingBus,
    log_of_groups,
    start_engine,
    start_master,
    start_trainer,
    store_records,
    store_versions,
)
from trainer.loop.publication import SUMMARIZE_EVERY

ANSWERS, VERSIONS, REPORTS_AN_HOUR = 40, 600, 10_000  # of a day; of an hour
CHECKPOINT_VERSIONS = 20


@cache
def records_read(day: int) -> dict[str, dict[str, int]]:
    """Records by role and topic."""

    async def read() -> dict[str, dict[str, int]]:
        bus, store = CountingBus(), MemoryStore()
        log = await log_of_groups(ANSWERS * day, bus, store)
        store_versions(log, VERSIONS * day)
        store_records(log, REPORTS, [REPORT] * REPORTS_AN_HOUR)
        await start_master(log, store)  # leaves a snapshot, as the master before has
        starts: dict[str, Callable[[], Awaitable[None]]] = {
            "master": lambda: start_master(log, store),
            "trainer": lambda: start_trainer(log, VERSIONS * day - 1 - CHECKPOINT_VERSIONS),
            "engine": lambda: start_engine(log, store),
        }
        found = {}
        for role, start in starts.items():
            bus.read.clear()
            await start()
            found[role] = dict(bus.read)
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("role", ["master", "trainer", "engine"])
def test_a_start_after_thirty_days_reads_no_more_than_half_again_that_of_day_one(role: str) -> None:
    assert sum(records_read(30)[role].values()) <= 1.5 * sum(records_read(1)[role].values())


def test_a_trainer_reads_of_versions_what_an_engine_reads_and_no_more_than_since_the_last_summary() -> None:
    for day in (1, 30):
        found = records_read(day)
        assert found["trainer"] == found["engine"] and len(found["engine"]) == 1
        assert 0 < sum(found["engine"].values()) <= LOOK + 1 + SUMMARIZE_EVERY + 4
