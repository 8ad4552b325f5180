"""Keeps the index of `trace` up to date during a run, so that a question finds all but the last seconds in it.

It only reads, no role waits for it, and the index is a cache: it may be stopped, killed or left out at any time. A console
keeps it up, too; then this leaves it to the console.
"""

import asyncio
import logging
from collections.abc import Callable

from infra.ledger.index import INDEXED, LogIndex
from infra.log.follower import Follower
from infra.log.log import Log
from schemas.errors import BrokerUnavailable, OffsetOutOfRange, StoreError

logger = logging.getLogger(__name__)

EVERY_S = 5.0


class Following:
    """Brings an index up to date again and again, and rests while another process does.

    An index that is elsewhere than where this left it was brought there by another; that one goes on, so this disconnects
    and looks again the next time.
    """

    def __init__(self, log: Log, index: LogIndex) -> None:
        self._log = log
        self._index = index
        self._follower = Follower(log, INDEXED)
        self._left: dict[tuple[str, int], int] | None = None  # where the index was when this looked last

    async def read_on(self, on_read: Callable[[str, int], None] = lambda topic, left: None) -> None:
        """What has come, or nothing where another process reads it. on_read: see `LogIndex.refresh`."""
        reads = self._index.reads()
        if self._left in (None, reads):
            await self._index.refresh(self._log, on_read, follower=self._follower)
            reads = self._index.reads()
        else:
            await self._follower.close()
        self._left = reads

    async def close(self) -> None:
        """Disconnect."""
        await self._follower.close()


async def follow(log: Log, index: LogIndex, stop: asyncio.Event, *, every_s: float = EVERY_S) -> None:
    """Read what has come, every few seconds until `stop`. A log that is away is waited for."""
    following = Following(log, index)
    try:
        while not stop.is_set():
            try:
                await following.read_on()
            except (BrokerUnavailable, OffsetOutOfRange, StoreError) as error:
                logger.warning("trace_behind error=%s", error)
            try:
                async with asyncio.timeout(every_s):
                    await stop.wait()
            except TimeoutError:
                continue
    finally:
        await following.close()
