"""Where a reader begins in `policies`: at the newest summary that fits, and else at the first record.

The search goes backwards from the end, in steps that double, over MOST records. What a start reads so depends on how often a
summary is written, and not on how long the app has lived. Guarantee: a summary counts only where the log still holds, at its
place, the record that it was made behind; what is damaged, of another format or of another log is logged and passed over.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from infra.log.bus import Record, digest_of
from infra.log.log import Log, LogMessage
from infra.policies.fold import PoliciesFold
from infra.policies.summary import HEADER, Summary, SummaryRefused, unpacked
from schemas.topics import POLICIES

LOOK = 1024  # records of the first step: a log of no more is read whole
MOST = 16 * LOOK

logger = logging.getLogger(__name__)

Fits = Callable[[Summary], bool]


async def newest_summary(log: Log, *, stop: int | None = None, fits: Fits = lambda one: True) -> Summary | None:
    """The newest that fits and lies below `stop` (by default the present end); None where all is to be read.

    Raises BrokerUnavailable.
    """
    begins, ends = await log.bounds(POLICIES)
    begin, end = begins[0], ends[0] if stop is None else stop
    if end - begin <= LOOK:
        return None
    high, step = end, LOOK
    while begin < high and end - high < MOST:
        low = max(begin, high - step, end - MOST)
        for record in reversed(await _with_summaries(log, low, high)):
            try:
                found = unpacked(dict(record.headers)[HEADER])
                await _require_place(log, found, record)
            except SummaryRefused as error:
                logger.warning("policies_summary_not_used offset=%d reason=%s", record.offset, error)
                continue
            if fits(found):
                return found
        high, step = low, 2 * step
    logger.info("policies_read_whole records=%d: no summary among the newest %d", end - begin, end - high)
    return None


async def folded(log: Log, *, stop: int | None = None) -> PoliciesFold:
    """The records below `stop`, by default all."""
    fold = PoliciesFold(await newest_summary(log, stop=stop))
    await read_on(log, fold, stop=stop)
    return fold


async def read_on(log: Log, fold: PoliciesFold, *, stop: int | None = None) -> None:
    """Fold what has come since."""
    async for _ in reading(log, fold, stop=stop):
        pass


async def reading(log: Log, fold: PoliciesFold, *, stop: int | None = None) -> AsyncGenerator[LogMessage, None]:
    """What has come since, each when it is folded."""
    begins, ends = await log.bounds(POLICIES)
    stops = ends if stop is None else {0: stop}
    async with aclosing(log.scan(POLICIES, {0: max(begins[0], fold.next_offset)}, stops)) as messages:
        async for message in messages:
            fold.take(message)
            yield message


async def _with_summaries(log: Log, low: int, high: int) -> list[Record]:
    return [
        record
        async for records in log.chunks(POLICIES, {0: low}, {0: high})
        for record in records
        if any(name == HEADER for name, _ in record.headers)
    ]


async def _require_place(log: Log, summary: Summary, record: Record) -> None:
    """Raise SummaryRefused where the log is not the one that it was made of."""
    before = summary.below - 1
    found = {} if summary.below > record.offset else await log.at(POLICIES, 0, [before])
    if before not in found:
        raise SummaryRefused(f"of all below {summary.below}, and the log does not hold the record before that")
    if digest_of(found[before]) != summary.last:
        raise SummaryRefused(f"made of another log: the record at {before} is not the one that it names")
