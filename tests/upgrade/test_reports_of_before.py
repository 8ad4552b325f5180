"""Reports that older writers put into `progress` are read beside those in `reports`: by whoever decides or shows from them."""

import asyncio

from actors.master.master import take_in
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from schemas import MasterState, Progress, encode, kafka_headers
from schemas.topics import PROGRESS, REPORTS
from tests.actors.rig import until
from tests.actors.test_plan import plan
from trainer.buffer.buffer import Buffer
from trainer.buffer.intake import Intake, follow_progress, follow_reports


async def new_log() -> Log:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    return log


async def publish_as_before(log: Log, report: Progress) -> None:
    """As a release without `reports` did."""
    await log.bus.send(log.name(PROGRESS), encode(report), key=b"m", headers=kafka_headers(report))


def of_master(state: MasterState, instance: str = "master/1") -> Progress:
    return Progress(role="master", instance=instance, master=state)


def test_the_trainer_hears_a_master_of_either_release() -> None:
    async def main() -> None:
        log = await new_log()
        intake = Intake(Buffer({"usual": 1}), buffer_next=0, progress_next=0)
        hearing = [asyncio.create_task(follow(log, intake)) for follow in (follow_progress, follow_reports)]
        await publish_as_before(log, of_master(MasterState(state="draining", outstanding=3)))
        await until(lambda: intake.draining and intake.outstanding_groups == 3)
        await log.publish(REPORTS, of_master(MasterState(state="issuing", outstanding=5)))
        await until(lambda: not intake.draining and intake.outstanding_groups == 5)
        for one in hearing:
            one.cancel()

    asyncio.run(main())


def test_a_master_counts_the_time_of_explorers_of_both_releases() -> None:
    async def main() -> float:
        log, made = await new_log(), plan()
        for second in range(4):
            report = Progress(role="explore", instance=f"e{second % 2}", life="working")
            assert isinstance(log.bus, MemoryBus)
            log.bus.clock = lambda: 1_000_000 + 1000 * second  # noqa: B023
            await (publish_as_before(log, report) if second % 2 else log.publish(REPORTS, report))
        found = [one for topic in (PROGRESS, REPORTS) async for one in log.read_all(topic)]
        for message in sorted(found, key=lambda one: one.timestamp_ms):
            take_in(made, Metrics("test"), message)
        return made.active_s

    assert asyncio.run(main()) == 3.0
