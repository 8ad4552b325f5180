"""Between two looks a follower asks its broker for nothing, and the next look reads on without a gap."""

import asyncio
from contextlib import aclosing

import pytest

from infra.log.follower import Follower
from infra.log.kafka import KafkaBus
from infra.log.kafka_reader import KafkaReader
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import topics

PARTS = 2


async def looked(log: Log) -> None:
    """Looks and rests in turn; each look finds what came since the one before."""
    follower = Follower(log, (topics.EXPERIENCES,))
    nexts = dict.fromkeys(range(PARTS), 0)
    for look in range(4):
        for number in range(10):
            await log.bus.send(
                log.name(topics.EXPERIENCES), b"%d.%d" % (look, number), key=b"", partition=number % PARTS
            )
        ends = (await log.bounds(topics.EXPERIENCES))[1]
        found = []
        async with aclosing(follower.chunks(topics.EXPERIENCES, nexts, ends)) as chunks:
            async for records in chunks:
                found += [record.value for record in records]
        assert sorted(found) == [b"%d.%d" % (look, number) for number in range(10)]
        nexts = ends
        if look % 2:
            await rested(follower)
    await follower.close()


async def rested(follower: Follower) -> None:
    """Until it rests, as a broker sees it."""
    reader = follower._reader
    assert reader is not None
    if isinstance(reader, KafkaReader):
        async with asyncio.timeout(30):
            while reader._consumer.paused() != reader._consumer.assignment():  # noqa: ASYNC110 (it tells no one)
                await asyncio.sleep(0.01)


def test_a_follower_that_rested_reads_on() -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t")
        await log.create_topics(partitions=PARTS, keep_ms=-1)
        await looked(log)

    asyncio.run(main())


@pytest.mark.slow
def test_over_kafka_a_follower_rests_and_reads_on(kafka: str, app_name: str) -> None:
    async def main() -> None:
        bus = KafkaBus(kafka, deadline_s=20)
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=PARTS, keep_ms=-1)
        await looked(log)
        await bus.close()

    asyncio.run(main())
