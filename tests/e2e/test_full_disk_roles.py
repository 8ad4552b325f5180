"""The broker's disk is full under a master, an explorer and a trainer: each waits or ends in one line, and goes on after."""

import asyncio
from collections.abc import Iterator

import pytest

from actors.engines.scripted import ScriptedEngine
from infra.local.broker import EmbeddedKafka
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.roles.role import first_error
from infra.store.memory import MemoryStore
from schemas import Closure, Task
from schemas.errors import BrokerUnavailable
from schemas.topics import BATCHES, EXPERIENCES, PROGRESS, TASKS, Topic
from tests.actors.rig import explorer, load, master
from tests.e2e.test_full_disk import fill_disk
from tests.e2e.test_secured_roles import Feed, feed_buffer, feed_task
from tests.trainer.memory_run import train
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.scripted import ScriptedLearner

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(tmp_path_factory.mktemp("kafka")) as one:
        yield one


def started(role: str, log: Log, store: MemoryStore) -> asyncio.Task[None]:
    """A role on a log, as a process of it would run."""
    if role == "master":
        return master(log, store=store)
    if role == "explore":
        return explorer(log, store, ScriptedEngine())
    config = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=3, max_steps=1000)
    return asyncio.create_task(train(log, store, ScriptedLearner(), config))


async def close_issued(log: Log, number: int) -> None:
    """Tasks at first; then every group that was issued is given up, and the master issues others."""
    if number == 0:
        return await load(log)
    async for message in log.read_all(TASKS):
        if isinstance(message.value, Task) and (one := message.value.issued) is not None:
            closure = Closure(group=one.group, attempt=one.attempt, outcome="dropped", sequence=one.sequence)
            await log.publish(PROGRESS, closure)


async def end_by_full_disk(broker: EmbeddedKafka, log: Log) -> None:
    """The disk takes no more, and something is written: the broker ends."""
    fill_disk(broker)
    with pytest.raises((BrokerUnavailable, TimeoutError)):
        async with asyncio.timeout(5):
            while True:
                await feed_task(log, 9)
    assert await asyncio.to_thread(broker.wait) != 0, "a broker whose only disk fails ends"


@pytest.mark.parametrize(
    ("role", "feed", "topic"),
    [("master", close_issued, TASKS), ("explore", feed_task, EXPERIENCES), ("train", feed_buffer, BATCHES)],
)
def test_a_role_goes_on_after_the_brokers_disk_was_full(
    role: str, feed: Feed, topic: Topic, broker: EmbeddedKafka, app_name: str
) -> None:
    async def main() -> None:
        bus, store = KafkaBus(broker.bootstrap), MemoryStore()
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=2, keep_ms=-1)
        running = started(role, log, store)

        async def written(known: int) -> int:
            """How much lies in its topic, once it is more; a role that ended is started again."""
            nonlocal running
            async with asyncio.timeout(200):
                while (count := sum((await log.bounds(topic))[1].values())) <= known:
                    if running.done():
                        require_one_line(running)
                        running = started(role, log, store)
                    await asyncio.sleep(0.1)
            return count

        try:
            await feed(log, 0)
            before = await written(1 if role == "train" else 0)  # a trainer's first record is no step
            await end_by_full_disk(broker, log)
            broker.kill()
            await asyncio.to_thread(broker.start)
            for number in (1, 2, 3):
                await feed(log, number)
            await written(before)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await bus.close()

    asyncio.run(main())


def require_one_line(ended: asyncio.Task[None]) -> None:
    """It ended in one line that says why."""
    error = ended.exception()
    said = first_error(error) if isinstance(error, BaseExceptionGroup) else error
    assert isinstance(said, BrokerUnavailable) and "\n" not in str(said), repr(said)
