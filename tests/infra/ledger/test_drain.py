"""A drain ends with nothing on its way, whatever runs; and an operator's word outlives the master that heard it."""

import asyncio
from pathlib import Path

import pytest

from infra.ledger.drain import Draining, drain, go_on
from schemas import Directive, Drawn, Progress
from schemas.topics import EXPERIENCES, POLICIES, PROGRESS, REPORTS, TASKS
from tests.actors.rig import TopicArrivals, load, master, memory_log, running, until
from tests.infra.ledger.whole_loop import trained_steps, whole_loop
from tests.streams.collect.collecting import answer, block


@pytest.mark.slow
def test_master_explorer_streams_and_trainer_drain_to_zero_and_go_on_when_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with whole_loop(tmp_path) as log:
            await trained_steps(log, 5)
            seen: list[Draining] = []
            account = await drain(log, "test", "ann", 60.0, seen.append)
            assert account.is_clean and account.on_the_way == 0, account.pending_ids[:5]
            assert account.trained > 10 and {one.state for one in seen} >= {"drained"}
            issued = len([one async for one in log.read_all(TASKS)])
            again = await drain(log, "test", "ann", 60.0, seen.append)
            assert again.published == account.published, "a drained app does not go on by itself"
            assert len([one async for one in log.read_all(TASKS)]) == issued
            steps = len([one async for one in log.read_all(PROGRESS) if isinstance(one.value, Drawn)])
            await go_on(log, "ann")
            await trained_steps(log, steps + 2)

    asyncio.run(main())


def test_a_drain_that_nobody_hears_ends_with_its_time_and_says_what_is_on_its_way(tmp_path: Path) -> None:
    async def main() -> None:
        log = await memory_log()
        await log.publish(EXPERIENCES, block(answer("t.0", 0)))
        account = await drain(log, "test", "ann", 0.2, lambda now: None)
        assert account.on_the_way == 1

    asyncio.run(main())


def test_a_master_that_starts_into_a_drain_issues_nothing() -> None:
    async def main() -> None:
        log = await memory_log()
        await load(log)
        await log.publish(POLICIES, Directive(order="drain", owner="ann"))
        heard, tasks = TopicArrivals(log, REPORTS), TopicArrivals(log, TASKS)
        listening = [asyncio.create_task(one.listen()) for one in (heard, tasks)]
        async with running(master(log), *listening):
            await until(lambda: any(one.state == "drained" for one in heard.of(Progress)))
            assert not tasks.records
            await go_on(log, "ann")
            await until(lambda: len(tasks.records) == 4)

    asyncio.run(main())
