"""Reads of the newest reports of roles.

A report is of now, so a reader begins with the last hour of them, however many there are: by the broker's clock, counted from
the newest.
"""

from infra.log.log import Log
from schemas.topics import REPORTS

LATELY_MS = 3_600_000


async def lately(log: Log) -> dict[int, int]:
    """Offsets at which to begin in `reports`, by partition: the first within LATELY_MS of the newest; the end where none is
    kept.
    """
    name = log.name(REPORTS)
    begins, ends = await log.bounds(REPORTS)
    starts = dict(ends)
    for index, end in ends.items():
        newest = await log.at(REPORTS, index, [end - 1])
        if newest:
            since = await log.bus.offsets_at(name, newest[end - 1].timestamp_ms - LATELY_MS)
            starts[index] = max([begins[index], *(offset for at, offset in since.items() if at.index == index)])
    return starts
