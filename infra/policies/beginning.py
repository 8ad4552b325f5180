"""Summaries of `policies` in the store: a start reads the newest and the records after it, and not every record.

    snapshots/<app>/policies/    the KEPT newest summaries, as `infra.store.snapshots` lays them out

Guarantee: a summary counts only where the log still holds, at its place, the record that it was made behind. A summary that is
damaged, of another layout or of another log is logged and passed over; without one, and without a store, every record is read.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from infra.log.bus import digest_of
from infra.log.log import Log, LogMessage
from infra.policies.fold import PoliciesFold, Summary
from infra.store.snapshots import SnapshotDamaged, candidates, prune, read, remove, save
from infra.store.store import Store
from schemas.errors import StoreError
from schemas.topics import POLICIES

LAYOUT = 2  # of a summary, and of the rules by which records count
LOOK = 1024  # a log of no more records is read whole
KEPT = 32  # summaries: a reader that needs an older version begins with an older one
PART = "summary"

logger = logging.getLogger(__name__)

Fits = Callable[[Summary], bool]


def write_summary(store: Store, app: str, summary: Summary) -> None:
    """Store a summary and remove old ones. Blocking. Raises StoreError, SnapshotDamaged."""
    series = _series(app)
    for newer in candidates(store, series, _refuse):
        if newer.position <= summary.below:
            break
        remove(store, newer)  # of a log that went on otherwise, or read further by a trainer since
    save(store, series, summary.below, [(PART, msgspec.msgpack.encode(summary))], {"layout": LAYOUT})
    prune(store, series, KEPT)


async def newest_summary(log: Log, *, stop: int | None = None, fits: Fits = lambda summary: True) -> Summary | None:
    """The newest that fits and lies below `stop` (by default the present end); None where all is to be read.

    Raises BrokerUnavailable.
    """
    begins, ends = await log.bounds(POLICIES)
    begin, end = begins[0], ends[0] if stop is None else stop
    if end - begin <= LOOK or log.store is None:
        return None
    try:
        found = candidates(log.store, _series(log.app), _refuse)
        while (snapshot := await asyncio.to_thread(next, found, None)) is not None:
            if snapshot.position > end or snapshot.about != {"layout": LAYOUT}:
                continue
            try:
                data = await asyncio.to_thread(read, log.store, snapshot.parts[PART])
                summary = msgspec.msgpack.decode(data, type=Summary)
            except (SnapshotDamaged, msgspec.MsgspecError) as error:
                _refuse("damaged", f"snapshot {snapshot.key}: {error}")
                continue
            if await _is_in(log, summary) and fits(summary):
                return summary
    except StoreError as error:
        logger.warning("policies_summary_not_used error=%s", error)
    logger.info("policies_read_whole records=%d: no summary fits", end - begin)
    return None


async def folded(log: Log, *, stop: int | None = None) -> PoliciesFold:
    """The records below `stop`, by default all."""
    fold = PoliciesFold(await newest_summary(log, stop=stop))
    await read_on(log, fold, stop=stop)
    return fold


async def read_on(log: Log, fold: PoliciesFold, *, stop: int | None = None) -> None:
    async for _ in reading(log, fold, stop=stop):
        pass


async def reading(log: Log, fold: PoliciesFold, *, stop: int | None = None) -> AsyncGenerator[LogMessage, None]:
    """Fold the records that came since, and yield each."""
    begins, ends = await log.bounds(POLICIES)
    stops = ends if stop is None else {0: stop}
    async with aclosing(log.scan(POLICIES, {0: max(begins[0], fold.next_offset)}, stops)) as messages:
        async for message in messages:
            fold.take(message)
            yield message


async def _is_in(log: Log, summary: Summary) -> bool:
    """True if the log holds the record that the summary was made behind."""
    before = summary.below - 1
    found = await log.at(POLICIES, 0, [before])
    if before in found and digest_of(found[before]) == summary.last:
        return True
    _refuse("made of another log", f"the record at {before} differs from the summary's")
    return False


def _refuse(reason: str, line: str) -> None:
    logger.warning("policies_summary_not_used reason=%s: %s", reason, line)


def _series(app: str) -> str:
    return f"{app}/policies"
