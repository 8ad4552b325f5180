"""Removes frames that were too large for the log once no kept record claims them: the `[keep]` of claim checks.

Guarantee: a frame that a kept record claims stays, however old it is, and so does one that is used again while this runs.
Why: a sender deposits a frame under the day of the send (`blobs.deposit`), so a new record never claims a frame of an
earlier day, unless it copies a record of the log: a dead letter, or its redelivery. Dead letters are
read before and after all other topics, so that each copy made meanwhile is found at its source or its destination.
Nothing is removed before the whole log was read; a run that is broken off has removed only frames that no record claims.

Images lie under their hash alone, named by tasks that are never removed, and are not touched.
"""

import asyncio
import logging
from contextlib import aclosing, suppress

from infra.log.blobs import day_of_key, is_claim, read_claim
from infra.log.log import Log
from infra.store.store import BLOBS
from schemas import DeadLetter
from schemas.errors import BadFrame
from schemas.topics import ALL, DEAD_LETTERS

LEEWAY_DAYS = 2  # clocks that disagree, and a sender that stops between deposit and record

logger = logging.getLogger(__name__)


async def prune_frames(log: Log, *, today: int, keep_ms: int) -> int:
    """Remove frames deposited longer than keep_ms ago that nothing claims; how many went.

    today: see `blobs.epoch_day`. Raises StoreError, BrokerUnavailable, UnknownMajor.
    """
    store = log.store
    if store is None:
        return 0
    before = today - -(-keep_ms // 86_400_000) - LEEWAY_DAYS
    keys = await asyncio.to_thread(lambda: list(store.keys(BLOBS)))
    old = [key for key in keys if (day := day_of_key(key)) is not None and day < before]
    if not old:
        return 0
    claimed = await claimed_keys(log)
    doomed = [key for key in old if key not in claimed]
    for key in doomed:
        await asyncio.to_thread(store.delete, key)
    logger.info("frames_pruned removed=%d still_claimed=%d", len(doomed), len(old) - len(doomed))
    return len(doomed)


async def claimed_keys(log: Log) -> set[str]:
    """Keys that the records of the log claim at the time of the call."""
    holding = [topic for topic in ALL if "Block" in topic.holds]
    keys: set[str] = set()
    for topic in (DEAD_LETTERS, *holding, DEAD_LETTERS):
        async with aclosing(log.chunks(topic)) as chunks:
            async for records in chunks:
                for record in records:
                    letter = log.decode(record).value if topic is DEAD_LETTERS and not is_claim(record.value) else None
                    value = letter.value if isinstance(letter, DeadLetter) else record.value
                    with suppress(BadFrame):  # it claims nothing that anybody could redeem
                        keys |= {read_claim(value).key} if is_claim(value) else set()
    return keys
