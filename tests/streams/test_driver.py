"""The windowed driver: acks in order whatever finishes first, and nothing escapes."""

import asyncio
from collections.abc import Awaitable, Callable

from infra.chain.turn import ChainTurn
from infra.log.bus import Record
from infra.log.log import Log, LogMessage
from infra.observe.metrics import Metrics
from schemas import Block, DeadLetter, DropMarker, Message, Task
from schemas.topics import DEAD_LETTERS, EXPERIENCES, TASKSET, VERIFIED
from streams.stages.driver import WindowDriver
from streams.stages.stage import Handled, Output, letter
from streams.stages.verify import Verifier
from tests.streams.collect.collecting import answer, block
from tests.streams.deliveries import KeptDelivery, memory_log, stored, until, values

Handle = Callable[[LogMessage], Awaitable[Handled]]


class GatedStage:
    """A stage whose records finish when the test says so."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.errors: dict[int, Exception] = {}
        self.num_forgets = 0

    reach = 0

    async def recall(self, message: LogMessage) -> None:
        raise AssertionError("nothing is remembered here")

    async def handle(self, message: LogMessage, turn: ChainTurn | None = None) -> Handled:
        await self.gates.setdefault(message.offset, asyncio.Event()).wait()
        if message.offset in self.errors:
            raise self.errors[message.offset]
        task = Task(id=f"task-{message.offset}", messages=(Message(role="user", content="?"),))
        return Handled(first=(Output(TASKSET, task),), num_in=1, num_out=1)

    def failed(self, message: LogMessage, reason: str, error: str) -> Handled:
        return Handled(then=(letter(message, "gated", reason, error),), dropped={reason: 1})

    def forget(self) -> None:
        self.num_forgets += 1

    def open(self, offset: int) -> None:
        self.gates.setdefault(offset, asyncio.Event()).set()


async def fed(log: Log, number: int) -> list[Record]:
    for index in range(number):
        await log.publish(EXPERIENCES, block(answer(f"t{index}.0", 0)))
    return [message.record for message in await stored(log, EXPERIENCES)]


def test_records_are_acknowledged_in_order_whatever_finishes_first() -> None:
    async def run() -> None:
        async with memory_log() as log, asyncio.TaskGroup() as tasks:
            stage = GatedStage()
            driver = WindowDriver("gated", stage, log, Metrics("process"), tasks)
            deliveries = [KeptDelivery(record) for record in await fed(log, 3)]
            for delivery in deliveries:
                await driver.accept(delivery)
            stage.open(2)
            stage.open(1)
            await until(lambda: len(stage.gates) == 3)
            assert not any(delivery.is_acknowledged for delivery in deliveries)
            stage.open(0)
            await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))

    asyncio.run(run())


def test_a_full_window_holds_its_partition_back() -> None:
    async def run() -> None:
        async with memory_log() as log, asyncio.TaskGroup() as tasks:
            stage = GatedStage()
            driver = WindowDriver("gated", stage, log, Metrics("process"), tasks, limit=2)
            first, second, third = (KeptDelivery(record) for record in await fed(log, 3))
            await driver.accept(first)
            await driver.accept(second)
            waiting = tasks.create_task(driver.accept(third))
            await asyncio.sleep(0)
            assert not waiting.done()
            stage.open(0)
            await waiting
            assert first.is_acknowledged
            stage.open(1)
            stage.open(2)

    asyncio.run(run())


def test_a_stage_that_raises_becomes_a_dead_letter_and_its_neighbours_go_on() -> None:
    async def run() -> None:
        async with memory_log() as log, asyncio.TaskGroup() as tasks:
            stage = GatedStage()
            stage.errors[1] = RuntimeError("no such thing")
            metrics = Metrics("process")
            driver = WindowDriver("gated", stage, log, metrics, tasks)
            deliveries = [KeptDelivery(record) for record in await fed(log, 3)]
            for delivery in deliveries:
                await driver.accept(delivery)
                stage.open(delivery.record.offset)
            await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))
            assert len(await values(log, TASKSET)) == 2
            (dead,) = await values(log, DEAD_LETTERS)
            assert isinstance(dead, DeadLetter)
            assert (dead.topic, dead.offset, dead.reason) == ("experiences", 1, "stage failed")
            assert metrics.counters()["dropped{reason=stage failed}"] == 1

    asyncio.run(run())


def test_a_stage_that_hangs_is_given_up_after_its_timeout() -> None:
    async def run() -> None:
        async with memory_log() as log, asyncio.TaskGroup() as tasks:
            driver = WindowDriver("gated", GatedStage(), log, Metrics("process"), tasks, timeout_s=0.01)
            (record,) = await fed(log, 1)
            delivery = KeptDelivery(record)
            await driver.accept(delivery)
            await until(lambda: delivery.is_acknowledged)
            (dead,) = await values(log, DEAD_LETTERS)
            assert isinstance(dead, DeadLetter)
            assert dead.reason == "timed out"

    asyncio.run(run())


def test_what_was_in_flight_before_a_rebalance_is_not_acknowledged_after_it() -> None:
    async def run() -> None:
        async with memory_log() as log, asyncio.TaskGroup() as tasks:
            stage = GatedStage()
            driver = WindowDriver("gated", stage, log, Metrics("process"), tasks)
            (record,) = await fed(log, 1)
            slow, again = KeptDelivery(record, generation=1), KeptDelivery(record, generation=2)
            await driver.accept(slow)
            driver.abandon()
            assert slow.is_abandoned
            await driver.accept(again)
            stage.open(0)
            await until(lambda: again.is_acknowledged)
            assert not slow.is_acknowledged
            assert stage.num_forgets == 2

    asyncio.run(run())


def test_outputs_of_one_key_keep_the_order_of_the_records() -> None:
    async def run() -> None:
        async with memory_log() as log, asyncio.TaskGroup() as tasks:
            stage = GatedStage()
            driver = WindowDriver("gated", stage, log, Metrics("process"), tasks)
            for _ in range(2):
                await log.publish(EXPERIENCES, block(answer("t.0", 0)))
            deliveries = [KeptDelivery(message.record) for message in await stored(log, EXPERIENCES)]
            for delivery in deliveries:
                await driver.accept(delivery)
            stage.open(1)
            await asyncio.sleep(0.01)
            assert await values(log, TASKSET) == []
            stage.open(0)
            await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))
            tasks_out = [task for task in await values(log, TASKSET) if isinstance(task, Task)]
            assert [task.id for task in tasks_out] == ["task-0", "task-1"]

    asyncio.run(run())


def test_poison_between_good_records_is_dead_lettered_and_they_go_on() -> None:
    async def run() -> None:
        async with memory_log() as log, asyncio.TaskGroup() as tasks:
            driver = WindowDriver("verify", Verifier(()), log, Metrics("process"), tasks)
            await log.publish(EXPERIENCES, block(answer("t.0", 0)))
            await log.bus.send(log.name(EXPERIENCES), b"HR\x01\x00garbage", key=b"t.0")
            await log.publish(EXPERIENCES, block(answer("t.0", 1)))
            deliveries = [KeptDelivery(message.record) for message in await stored(log, EXPERIENCES)]
            for delivery in deliveries:
                await driver.accept(delivery)
            await until(lambda: all(delivery.is_acknowledged for delivery in deliveries))
            sent = await values(log, VERIFIED)
            assert [one.experiences[0].episode for one in sent if isinstance(one, Block)] == [0, 1]
            assert not any(isinstance(one, DropMarker) for one in sent)
            (dead,) = await values(log, DEAD_LETTERS)
            assert isinstance(dead, DeadLetter)
            assert (dead.reason, dead.value) == ("bad frame", b"HR\x01\x00garbage")

    asyncio.run(run())
