"""What verify remembers survives its worker: duplicates are known after a restart, and kills change nothing."""

import asyncio

import msgspec

from infra.chain.chain import make_step
from infra.chain.processor import Memory, processor
from infra.log.log import Log
from infra.observe.metrics import Metrics
from schemas import Block, Experience, Score
from schemas.topics import EXPERIENCES, VERIFIED
from streams.processors.filter import dedupe
from streams.stages.driver import WindowDriver, recall
from streams.stages.verify import Verifier
from tests.streams.collect.collecting import answer, block
from tests.streams.deliveries import KeptDelivery, memory_log, stored, until, values


@processor(version=1, memory=1000)
def numbered(experience: Experience, *, memory: Memory) -> Experience:
    """Depends on everything that came before: how many there were."""
    count = memory.get("count", 0)
    assert isinstance(count, int)
    memory.set("count", count + 1)
    return msgspec.structs.replace(experience, scores=(Score(name="number", value=float(count)),))


@processor(version=1)
def slow_if_odd(experience: Experience) -> Experience:
    """Threaded, and later records overtake earlier ones."""
    import time

    time.sleep(0.02 if experience.episode % 2 else 0.0)
    return experience


def verifier(*functions: object) -> Verifier:
    return Verifier([make_step(function.__name__, function) for function in functions])  # type: ignore[attr-defined,arg-type]


async def drive(log: Log, stage: Verifier, deliveries: list[KeptDelivery]) -> None:
    async with asyncio.TaskGroup() as tasks:
        driver = WindowDriver("verify", stage, log, Metrics("process"), tasks)
        for delivery in deliveries:
            await driver.accept(delivery)
        await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))


async def test_a_duplicate_after_a_restart_is_still_a_duplicate() -> None:
    async with memory_log() as log:
        for group in ("a.0", "b.0", "a.0"):
            await log.publish(EXPERIENCES, block(answer(group, 0)))
        records = [message.record for message in await stored(log, EXPERIENCES)]
        await drive(log, verifier(dedupe), [KeptDelivery(record) for record in records[:2]])
        await drive(log, verifier(dedupe), [KeptDelivery(record) for record in records[2:]])
        sent = await values(log, VERIFIED)
        assert [sent_block.group for sent_block in sent if isinstance(sent_block, Block)] == ["a.0", "b.0"]


async def test_a_rebalance_rebuilds_the_memory_before_the_first_record_is_handled() -> None:
    async with memory_log() as log:
        for number in range(6):
            await log.publish(EXPERIENCES, block(answer(f"g{number}.0", 0)))
        records = [message.record for message in await stored(log, EXPERIENCES)]
        stage = verifier(numbered)
        async with asyncio.TaskGroup() as tasks:
            driver = WindowDriver("verify", stage, log, Metrics("process"), tasks)
            first = [KeptDelivery(record) for record in records[:4]]
            for delivery in first:
                await driver.accept(delivery)
            await until(lambda: all(delivery.is_acknowledged for delivery in first))
            again = [KeptDelivery(record, generation=2) for record in records[2:]]
            for delivery in again:
                await driver.accept(delivery)
            await until(lambda: all(delivery.is_acknowledged for delivery in again))
        sent = [record.experiences[0] for record in await values(log, VERIFIED) if isinstance(record, Block)]
        assert {sent_block.group: sent_block.score("number") for sent_block in sent} == {
            f"g{n}.0": float(n) for n in range(6)
        }


async def test_reading_back_ends_where_the_memory_reaches() -> None:
    async with memory_log() as log:
        for number in range(40):
            await log.publish(EXPERIENCES, block(answer(f"g{number}.0", 0), answer(f"g{number}.0", 1)))
        stage = Verifier([msgspec.structs.replace(make_step("dedupe", dedupe), memory=10)])
        taken: list[int] = []

        class Counting:
            reach = stage.reach

            async def recall(self, message) -> None:  # type: ignore[no-untyped-def]
                taken.append(message.offset)
                await stage.recall(message)

        await recall(log, Counting(), log.name(EXPERIENCES), 0, 30)
        assert taken == [25, 26, 27, 28, 29]


async def test_memories_see_records_in_log_order_whatever_overtakes_before() -> None:
    async with memory_log() as log:
        for number in range(12):
            await log.publish(EXPERIENCES, block(answer(f"g{number}.0", number % 2)))
        deliveries = [KeptDelivery(message.record) for message in await stored(log, EXPERIENCES)]
        await drive(log, verifier(slow_if_odd, numbered), deliveries)
        sent = [record.experiences[0] for record in await values(log, VERIFIED) if isinstance(record, Block)]
        assert {sent_block.group: sent_block.score("number") for sent_block in sent} == {
            f"g{n}.0": float(n) for n in range(12)
        }
