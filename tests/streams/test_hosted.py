"""A hosted stage, without a broker."""

import asyncio
from pathlib import Path

from infra.log.access import PLAINTEXT
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from schemas.topics import EXPERIENCES, EXPERTS
from streams.stages.driver import WindowDriver
from streams.stages.hosted import BrokerLogin, HostedStage
from streams.stages.verify import Verifier


def test_a_stage_whose_consumer_has_not_begun_holds_nothing_and_does_not_fail(tmp_path: Path) -> None:
    """Faust starts the thread of its consumer after it has said that it is started; reports ask in between."""

    async def main() -> None:
        log = Log(MemoryBus(), "test")
        async with asyncio.TaskGroup() as tasks:
            stage = HostedStage(log, BrokerLogin("127.0.0.1:9", PLAINTEXT), "verify", tmp_path, "")
            for topic in (EXPERIENCES, EXPERTS):
                stage.add(topic, WindowDriver("verify", Verifier(()), log, Metrics("process"), tasks))
            assert stage.assignment() == {"test.experiences": set(), "test.experts": set()}
            assert stage.partitions() == ()

    asyncio.run(main())
