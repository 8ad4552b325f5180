"""Keeps the index of `trace` up to date during a run, so that a question finds all but the last seconds in it.

It only reads, no role waits for it, and the index is a cache: it may be stopped, killed or left out at any time.
"""

import asyncio
import logging

from infra.ledger.index import INDEXED, LogIndex
from infra.log.follower import Follower
from infra.log.log import Log
from schemas.errors import BrokerUnavailable, OffsetOutOfRange, StoreError

logger = logging.getLogger(__name__)

EVERY_S = 5.0


async def follow(log: Log, index: LogIndex, stop: asyncio.Event, *, every_s: float = EVERY_S) -> None:
    """Read what has come, every few seconds until `stop`. A log that is away is waited for."""
    follower = Follower(log, INDEXED)
    try:
        while not stop.is_set():
            try:
                await index.refresh(log, follower=follower)
            except (BrokerUnavailable, OffsetOutOfRange, StoreError) as error:
                logger.warning("trace_behind error=%s", error)
            try:
                async with asyncio.timeout(every_s):
                    await stop.wait()
            except TimeoutError:
                continue
    finally:
        await follower.close()
