"""Reports that older writers put into `progress` are read beside those in `reports`: by whoever decides or shows from them."""

import asyncio
from functools import partial

from actors.master.master import take_in
from infra.cli.console.fold import FOLDED
from infra.cli.look.newest import newest, newest_reports
from infra.ledger.drain import Draining, drain
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from schemas import Closure, MasterState, Progress, encode, kafka_headers
from schemas.topics import POLICIES, PROGRESS, REPORTS
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


def test_status_shows_the_roles_of_both_releases_and_each_ones_newest_report() -> None:
    async def main() -> list[str]:
        log = await new_log()
        for number in range(3):
            await publish_as_before(log, Progress(role="explore", instance="old", version=number))
            await log.publish(PROGRESS, Closure(group=f"a.{number}", outcome="buffered"))
            await log.publish(REPORTS, Progress(role="explore", instance="new", version=number))
        found = [one.value for one in await newest_reports(partial(newest, log), 4)]
        return [f"{one.instance} {one.version}" for one in found if isinstance(one, Progress)]

    assert sorted(asyncio.run(main())) == ["new 0", "new 1", "new 2", "old 1", "old 2"]
    assert PROGRESS in FOLDED and REPORTS in FOLDED


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


def test_a_drain_ends_with_the_word_of_a_master_of_either_release() -> None:
    async def main(*, is_old: bool) -> list[Draining]:
        log, seen = await new_log(), list[Draining]()
        draining = asyncio.create_task(drain(log, "t", "ann", 60.0, seen.append))
        async for _ in log.read_all(POLICIES, until_end=False):
            break  # its word is in the log
        told = of_master(MasterState(state="drained", drained_to=0))
        await (publish_as_before(log, told) if is_old else log.publish(REPORTS, told))
        await draining
        return seen

    for is_old in (True, False):
        assert asyncio.run(main(is_old=is_old))[0] == Draining("drained", 0)


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
