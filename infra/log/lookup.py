"""Records by their offsets, of any topic of the broker."""

from collections.abc import Iterable

from infra.log.bus import Bus, Partition, Record
from schemas.errors import OffsetOutOfRange

# Neighbouring offsets are read in one go where the hole between them costs less than another request.
MAX_HOLE = 64
FETCH_BYTES = 64 * 1024  # of what lies behind a record that is asked for by its offset


async def records_at(bus: Bus, partition: Partition, offsets: Iterable[int]) -> dict[int, Record]:
    """The records at these offsets; what retention or compaction took, or is not written yet, is missing."""
    begins, ends = await bus.beginning_offsets(partition.topic), await bus.end_offsets(partition.topic)
    wanted = {offset for offset in offsets if begins.get(partition, 0) <= offset < ends.get(partition, 0)}
    if not wanted:
        return {}
    found: dict[int, Record] = {}
    reader = await bus.assigned({partition: min(wanted)}, fetch_bytes=FETCH_BYTES)
    try:
        for start, stop in runs(wanted):
            reader.seek(partition, start)
            while reader.positions().get(partition, start) < stop:
                records = await reader.get_many(timeout_s=1.0, max_records=stop - start)
                found |= {record.offset: record for record in records if record.offset in wanted}
    except OffsetOutOfRange:  # retention went on meanwhile
        return found | await records_at(bus, partition, wanted - found.keys())
    finally:
        await reader.close()
    return found


def runs(offsets: Iterable[int], max_hole: int = MAX_HOLE) -> list[tuple[int, int]]:
    """Ascending [start, stop) runs that cover all offsets.

    >>> runs([3, 4, 9, 200], max_hole=8)
    [(3, 10), (200, 201)]
    """
    found: list[tuple[int, int]] = []
    for offset in sorted(set(offsets)):
        if found and offset - found[-1][1] < max_hole:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found
