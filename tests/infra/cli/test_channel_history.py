"""What a person may move the channel to: what counts, and nothing that an overtaken trainer wrote."""

import asyncio

import pytest

from infra.cli.bench.days import CountingBus, summarize
from infra.cli.channel import check_move, versions_and_stable
from infra.cli.evaluate import request
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.beginning import LOOK
from infra.policies.fold import WINDOW
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
        versions, stable = await versions_and_stable(log, "main", 1)
        check_move(versions, stable, "promoted", 1)
        with pytest.raises(ConfigError, match="version 2: never published; the newest is 1"):
            check_move(versions, stable, "promoted", 2)
        await log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=2, token=second.offset))
        check_move(*await versions_and_stable(log, "main", 2), "promoted", 2)

    asyncio.run(main())


LONG = 4 * LOOK


def test_a_move_and_an_evaluation_read_policies_from_the_newest_summary_and_for_an_old_version_all_of_it() -> None:
    async def main() -> None:
        bus = CountingBus()
        log = Log(bus, "t")
        await log.create_topics(partitions=1, keep_ms=-1)
        for version in range(LONG):
            await log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=version, manifest="m"))
        await log.publish(
            POLICIES, PolicyEvent(event="promoted", policy="main", version=7, channel="stable", owner="ann")
        )
        summarize(log)
        few, all_of_it = LOOK + WINDOW * 8, LONG
        for version, is_old in ((LONG - 1, False), (-1, False), (7, True), (LONG, False)):
            bus.read.clear()
            versions, stable = await versions_and_stable(log, "main", version)
            assert stable.version == 7 and (version in versions) == (0 <= version < LONG)
            assert (bus.read[log.name(POLICIES)] > all_of_it) == is_old
            assert is_old or bus.read[log.name(POLICIES)] <= few
        bus.read.clear()
        assert await request(log, "main", "dev", None) == LONG - 1
        assert bus.read[log.name(POLICIES)] <= few

    asyncio.run(main())
