"""A paused trainer begins no step, keeps what arrives, and goes on with it when it is told."""

import asyncio

from infra.log.log import Log
from infra.store.memory import MemoryStore
from schemas import Batch, Directive, Progress, topics
from tests.actors.rig import until
from tests.simulator.virtual_loop import run_virtual
from tests.trainer.memory_run import STEPS, filled_log, journal, train
from tests.trainer.test_draw_waiting import expert, run_of, usual
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.waiting import next_draw


def test_a_pause_holds_the_next_step_until_somebody_resumes() -> None:
    async def main() -> None:
        run = run_of(usual(0), usual(1), *(expert(number) for number in range(8)))
        run.supply.intake.take_directive(Directive(order="pause", owner="ann"))
        waiting = asyncio.create_task(next_draw(run, asyncio.Event()))
        await until(lambda: run.report.state == "paused")
        run.supply.intake.take_directive(Directive(order="lease", owner="a master that began"))
        await asyncio.sleep(0)
        assert not waiting.done() and run.supply.intake.paused
        run.supply.intake.take_directive(Directive(order="continue", owner="ann"))
        async with asyncio.timeout(10):
            draw = await waiting
        assert draw is not None and draw.taken and run.report.state != "paused"

    run_virtual(main())


def test_a_paused_trainer_stops_when_asked_without_another_step() -> None:
    async def main() -> None:
        run, stop = run_of(usual(0), usual(1), *(expert(number) for number in range(8))), asyncio.Event()
        run.supply.intake.take_directive(Directive(order="pause", owner="ann"))
        waiting = asyncio.create_task(next_draw(run, stop))
        await until(lambda: run.report.state == "paused")
        stop.set()
        async with asyncio.timeout(10):
            assert await waiting is None

    run_virtual(main())


def test_a_trainer_that_starts_into_a_pause_begins_no_step_and_resumes_with_all_that_waits() -> None:
    async def main() -> None:
        store = MemoryStore()
        log = await filled_log(store)
        await log.publish(topics.POLICIES, Directive(order="pause", owner="ann"))
        training = asyncio.create_task(train(log, store, ScriptedLearner()))
        await said_paused(log)
        assert await batches(log) == [], "neither the warm-up nor a step began"
        await log.publish(topics.POLICIES, Directive(order="continue", owner="ann"))
        async with asyncio.timeout(60):
            await training
        assert len([batch for batch in await batches(log) if batch.phase == "train"]) == STEPS

    run_virtual(main())


def test_a_report_tells_how_many_groups_wait_in_the_buffer() -> None:
    async def main() -> None:
        store = MemoryStore()
        log = await filled_log(store)
        await log.publish(topics.POLICIES, Directive(order="pause", owner="ann"))
        training = asyncio.create_task(train(log, store, ScriptedLearner()))
        await said_paused(log, groups=4 + 2 * STEPS)
        await log.publish(topics.POLICIES, Directive(order="continue", owner="ann"))
        async with asyncio.timeout(60):
            await training
        reports = [one.value async for one in log.read_all(topics.REPORTS) if isinstance(one.value, Progress)]
        assert reports[-1].gauges["groups_waiting"] == 4, "demonstrations, which may be trained again"

    run_virtual(main())


async def said_paused(log: Log, groups: int | None = None) -> None:
    """Until the trainer has reported it, and that so many groups wait, if that is asked."""
    async with asyncio.timeout(60):
        async for message in log.read_all(topics.REPORTS, until_end=False):
            is_paused = isinstance(message.value, Progress) and message.value.state == "paused"
            if is_paused and groups in (None, message.value.gauges["groups_waiting"]):
                return


async def batches(log: Log) -> list[Batch]:
    return [one for one in await journal(log) if isinstance(one, Batch)]
