"""Feedback whose partitions change hands: what was read and not committed is read again by the other worker."""

import asyncio
from collections.abc import Mapping

from infra.log.bus import CommitRefused, Partition
from infra.observe.metrics import Metrics
from schemas import Feedback, Received
from schemas.topics import FEEDBACK, VERIFIED
from streams.config import FEEDBACK_PATH
from streams.sources.event import EventSource
from streams.sources.received import take_once as received_once
from streams.sources.topic import take_once
from tests.streams.deliveries import memory_log, values
from tests.streams.test_source import csat, ticket


class LosingReader:
    """A reader whose group rebalances between each read and its commit."""

    def __init__(self, inner) -> None:  # type: ignore[no-untyped-def]
        self.get_many = inner.get_many
        self.seek = inner.seek

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


def test_a_rebalance_while_clients_feedback_is_published_ends_nothing() -> None:
    async def main() -> None:
        async with memory_log() as log:
            received = Received(path=FEEDBACK_PATH, body=ticket(), id="f", ref="hr-a.0-0-0")
            at = await log.publish(FEEDBACK, received)
            reader = await log.assigned(FEEDBACK, {at.partition: at.offset}, group="g")
            by_path = {FEEDBACK_PATH: EventSource(name="user", function=csat, webhook=FEEDBACK_PATH)}
            assert await received_once(by_path, LosingReader(reader), log, Metrics("process")) == 1  # type: ignore[arg-type]
            assert [type(one) for one in await values(log, VERIFIED)] == [Feedback]

    asyncio.run(main())
