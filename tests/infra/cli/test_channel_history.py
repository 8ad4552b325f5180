"""What a person may move the channel to: what counts, and nothing that an overtaken trainer wrote."""

import asyncio

import pytest

from infra.cli.channel import check_move, policy_history
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import PolicyEvent
from schemas.errors import ConfigError
from schemas.topics import POLICIES


def test_a_version_that_an_overtaken_trainer_published_cannot_be_promoted() -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t")
        await log.create_topics(partitions=1, keep_ms=-1)
        first = await log.publish(POLICIES, PolicyEvent(event="lease", policy="main"))
        await log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=1, token=first.offset))
        second = await log.publish(POLICIES, PolicyEvent(event="lease", policy="main"))
        await log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=2, token=first.offset))
        await log.publish(
            POLICIES, PolicyEvent(event="orphaned", policy="main", version=1, token=first.offset, reason="late")
        )
        history, stable = await policy_history(log, "main")
        check_move(history, stable, "promoted", 1)
        with pytest.raises(ConfigError, match="version 2: never published; the newest is 1"):
            check_move(history, stable, "promoted", 2)
        await log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=2, token=second.offset))
        check_move(*await policy_history(log, "main"), "promoted", 2)

    asyncio.run(main())
