"""Recall: the memory of a stage for a partition, rebuilt by reading back what was handled before.

Guarantee: behind it the stage remembers as if it had handled the last `reach` inputs itself, and nothing was published.
Where retention took some of them, it remembers what is kept.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from infra.log.bus import Partition
from infra.log.log import Log, LogMessage
from schemas import Block
from schemas.errors import OffsetOutOfRange
from schemas.topics import by_name

CHUNK_RECORDS = 512
FETCH_BYTES = 512 * 1024  # a chunk is about so much: more would be sent, and held, of what lies behind it
YIELD_EVERY = 32  # records between two looks at everything else: heartbeats must not wait
logger = logging.getLogger(__name__)


class Remembers(Protocol):
    """A stage that remembers. reach: inputs that its memory goes back, 0 for none."""

    @property
    def reach(self) -> int: ...

    async def recall(self, message: LogMessage) -> None:
        """Remember a record that was handled before."""


async def recall(log: Log, stage: Remembers, topic: str, partition: int, before: int) -> None:
    """Have `stage` remember the inputs below offset `before` of a topic (full name) of this app."""
    if not stage.reach:
        return
    begin = (await log.bus.beginning_offsets(topic))[Partition(topic, partition)]
    start = await _start(log, stage.reach, topic, partition, begin, before)
    if start >= before:
        return
    count = 0
    async with aclosing(_kept(log, topic, partition, start, before)) as messages:
        async for message in messages:
            await stage.recall(message)
            count += 1
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)
    logger.info("recalled topic=%s partition=%d from=%d to=%d", topic, partition, start, before)


async def _start(log: Log, reach: int, topic: str, partition: int, begin: int, before: int) -> int:
    start, found = before, 0
    while start > begin and found < reach:
        stop, start = start, max(begin, start - CHUNK_RECORDS)
        sizes: list[tuple[int, int]] = []
        async with aclosing(_kept(log, topic, partition, start, stop)) as messages:
            async for message in messages:
                sizes.append(
                    (message.offset, len(message.value.experiences) if isinstance(message.value, Block) else 1)
                )
        for offset, size in reversed(sizes):
            found += size
            if found >= reach:
                return offset
    return start


async def _kept(log: Log, topic: str, partition: int, start: int, stop: int) -> AsyncGenerator[LogMessage, None]:
    known = by_name(topic.removeprefix(f"{log.app}."))
    while True:
        scanned = log.scan(known, {partition: start}, {partition: stop}, fetch_bytes=FETCH_BYTES)
        try:
            async with aclosing(scanned) as messages:
                async for message in messages:
                    yield message
            return
        except OffsetOutOfRange:
            begin = (await log.bus.beginning_offsets(topic))[Partition(topic, partition)]
            logger.warning("recall_trimmed topic=%s partition=%d from=%d to=%d", topic, partition, start, begin)
            start = begin
