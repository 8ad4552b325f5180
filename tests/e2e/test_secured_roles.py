"""A right that is revoked in mid-run ends a master, an explorer and a trainer with a line that names the topic."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from actors.engines.scripted import ScriptedEngine
from infra.cli.settings import load_settings
from infra.log.access import kafka_access
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.roles.role import first_error
from infra.store.memory import MemoryStore
from schemas.errors import BrokerDenies
from schemas.topics import BATCHES, BUFFER, EXPERIENCES, TASKS, Topic
from tests.actors.rig import explorer, load, master
from tests.actors.test_explorer import issue
from tests.e2e.acls import allow
from tests.e2e.secured_broker import Secured, secured_broker
from tests.e2e.secured_clients import settings_file
from tests.trainer.memory_run import block, train
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.scripted import ScriptedLearner

pytestmark = pytest.mark.full

Feed = Callable[[Log, int], Awaitable[object]]
Start = Callable[[Log], asyncio.Task[None]]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


def start_trainer(log: Log) -> asyncio.Task[None]:
    config = TrainerConfig(lanes={"usual": LaneConfig()}, max_steps=1000)
    return asyncio.create_task(train(log, MemoryStore(), ScriptedLearner(), config))


async def feed_buffer(log: Log, number: int) -> None:
    for sequence in (2 * number, 2 * number + 1):  # a step takes two groups
        await log.publish(BUFFER, block(sequence))


async def feed_task(log: Log, number: int) -> None:
    await log.publish(TASKS, issue(f"task-{number}", number))


async def feed_taskset(log: Log, number: int) -> None:
    if number == 0:  # what nobody answers is issued again and again
        await load(log)


@pytest.mark.parametrize(
    ("start", "feed", "written"),
    [
        (master, feed_taskset, TASKS),
        (lambda log: explorer(log, MemoryStore(), ScriptedEngine()), feed_task, EXPERIENCES),
        (start_trainer, feed_buffer, BATCHES),
    ],
    ids=["master", "explore", "train"],
)
def test_a_role_whose_right_to_write_is_revoked_ends_with_a_line_that_names_the_topic(
    start: Start, feed: Feed, written: Topic, secured: Secured, app_name: str, tmp_path: Path
) -> None:
    settings = load_settings(settings_file(secured, tmp_path, app_name, sasl_mechanism="SCRAM-SHA-256"))

    async def main() -> BaseException:
        bus = KafkaBus(secured.bootstrap, deadline_s=20.0, access=kafka_access(settings))
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=2, keep_ms=-1)
        role, fed = start(log), 0
        try:
            while True:  # until the connections of before are closed, a write may still be let through
                await feed(log, fed)
                if fed == 0:
                    async with asyncio.timeout(60):
                        async for _ in log.read_all(written, until_end=False):
                            break
                    await allow(secured.broker.bootstrap, "somebody-else", "topic", log.name(written))
                fed += 1
                done, _ = await asyncio.wait((role,), timeout=0.5)
                assert fed < 60, "it never ended"
                if done:
                    break
            error = role.exception()
        finally:
            role.cancel()
            await asyncio.gather(role, return_exceptions=True)
            await bus.close()
        assert error is not None
        return first_error(error) if isinstance(error, BaseExceptionGroup) else error

    said = asyncio.run(main())
    assert isinstance(said, BrokerDenies) and "\n" not in str(said)
    assert f"{app_name}.{written.name}" in str(said) and "`headrace check --connect` names every missing right" in str(
        said
    )
