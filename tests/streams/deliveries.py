"""Records as a driver gets them, in memory: what was acknowledged and what was given up can be read afterwards."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.log.bus import Record
from infra.log.log import Log, LogMessage
from infra.log.memory import MemoryBus
from schemas import Block, Control
from schemas.topics import Topic

START_MS = 1_763_715_600_000


class Clock:
    """Log-append milliseconds, set by hand."""

    now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


class KeptDelivery:
    """A Delivery of a stored record."""

    def __init__(self, record: Record, generation: int = 1) -> None:
        self.record = record
        self.generation = generation
        self.is_acknowledged = False
        self.is_abandoned = False

    def acknowledge(self) -> None:
        self.is_acknowledged = True

    def abandon(self) -> None:
        self.is_abandoned = True


@asynccontextmanager
async def memory_log(partitions: int = 1) -> AsyncIterator[Log]:
    """A log of one app in memory, its topics created."""
    log = Log(MemoryBus(), "app")
    await log.bus.start()
    await log.create_topics(partitions=partitions, keep_ms=24 * 3600 * 1000)
    yield log
    await log.bus.close()


async def stored(log: Log, topic: Topic) -> list[LogMessage]:
    """Everything in a topic."""
    return [message async for message in log.scan(topic)]


async def values(log: Log, topic: Topic) -> list[Block | Control | None]:
    return [message.value for message in await stored(log, topic)]


async def until_stored(log: Log, topic: Topic, count: int, within_s: float = 60.0) -> None:
    """Wait until a topic holds so many records."""
    found = 0
    async with asyncio.timeout(within_s):
        async for _ in log.tail(topic, "beginning"):
            found += 1
            if found >= count:
                return
