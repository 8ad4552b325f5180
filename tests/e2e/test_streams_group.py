"""A stream worker and its consumer group on a real broker: a worker that is dealt nothing does not stay so."""

import asyncio
from pathlib import Path

import pytest

from infra.log.access import PLAINTEXT
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.observe.metrics import Metrics
from schemas.topics import EXPERIENCES, EXPERTS
from streams.stages.driver import WindowDriver
from streams.stages.hosted import BrokerLogin, HostedStage
from streams.stages.verify import Verifier

pytestmark = pytest.mark.full


async def log_at(bootstrap: str, app: str) -> Log:
    bus = KafkaBus(bootstrap)
    await bus.start()
    return Log(bus, app)


def verify_stage(log: Log, bootstrap: str, folder: Path, tasks: asyncio.TaskGroup) -> HostedStage:
    stage = HostedStage(log, BrokerLogin(bootstrap, PLAINTEXT), "verify", folder, "")
    for topic in (EXPERIENCES, EXPERTS):
        stage.add(topic, WindowDriver("verify", Verifier(()), log, Metrics("process"), tasks))
    return stage


def test_a_topic_that_the_broker_did_not_list_when_the_group_was_dealt_is_dealt_soon(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    """As of a broker that has just started: Faust then deals nothing, and looks again when its metadata is old."""

    async def main() -> None:
        log, dealt = await log_at(kafka, app_name), asyncio.Queue[set[object]]()
        async with asyncio.TaskGroup() as tasks:
            stage = verify_stage(log, kafka, tmp_path, tasks)

            async def assigned(app: object, assigned: set[object], **_: object) -> None:
                dealt.put_nowait(assigned)

            stage.app.on_partitions_assigned.connect(assigned)
            await stage.app.start()
            assert await dealt.get() == set()
            await log.create_topics(partitions=2, keep_ms=24 * 3600 * 1000)
            async with asyncio.timeout(90):
                while stage.partitions() != (0, 1):
                    await dealt.get()
            await stage.stop()
        await log.bus.close()

    asyncio.run(main())
