"""A feedback topic whose partitions change hands: what was read and not committed is read again by the other worker."""

import asyncio
from collections.abc import Mapping

from infra.bus.bus import CommitRefused, Partition
from infra.metrics import Metrics
from schemas import Feedback
from schemas.topics import VERIFIED
from streams.source import EventSource
from streams.sources.topic import take_once
from tests.streams.deliveries import memory_log, values
from tests.streams.test_source import csat, ticket


class LosingReader:
    """A reader whose group rebalances between each read and its commit."""

    def __init__(self, inner) -> None:  # type: ignore[no-untyped-def]
        self.get_many = inner.get_many

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        raise CommitRefused("the group has rebalanced")


def test_a_rebalance_between_reading_and_committing_ends_nothing() -> None:
    async def main() -> None:
        async with memory_log() as log:
            await log.bus.create_topic("tickets", 1, {})
            await log.bus.send("tickets", ticket(), key=b"k")
            reader = await log.bus.assigned({Partition("tickets", 0): 0}, group="g")
            listening = EventSource(name="csat", function=csat, topic="tickets")
            assert await take_once(listening, LosingReader(reader), log, Metrics("process")) == 1  # type: ignore[arg-type]
            assert [type(one) for one in await values(log, VERIFIED)] == [Feedback]

    asyncio.run(main())
