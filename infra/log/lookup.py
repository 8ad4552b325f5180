"""Reads of single records by their offsets, and dead letters of records."""

from collections import deque
from collections.abc import Iterable, Mapping

from infra.log.bus import Bus, Partition, Reader, Record
from schemas import DeadLetter
from schemas.errors import OffsetOutOfRange
from schemas.records import MAX_LETTER_BYTES

# Neighbouring offsets are read in one go where the hole between them costs less than another request.
MAX_HOLE = 64
FETCH_BYTES = 64 * 1024  # of what lies behind a record that is asked for by its offset


async def records_at(bus: Bus, partition: Partition, offsets: Iterable[int]) -> dict[int, Record]:
    """The records at these offsets; what retention or compaction took, or is not written yet, is missing."""
    return (await records_of(bus, {partition: offsets})).get(partition, {})


async def records_of(bus: Bus, offsets: Mapping[Partition, Iterable[int]]) -> dict[Partition, dict[int, Record]]:
    """`records_at` of several partitions, by one reader: to connect costs both sides more than to read some records."""
    begins: dict[Partition, int] = {}
    ends: dict[Partition, int] = {}
    for topic in {at.topic for at in offsets}:
        begins |= await bus.beginning_offsets(topic)
        ends |= await bus.end_offsets(topic)
    kept = {
        at: {place for place in wanted if begins.get(at, 0) <= place < ends.get(at, 0)}
        for at, wanted in offsets.items()
    }
    left = {at: deque(runs(wanted)) for at, wanted in kept.items() if wanted}
    found: dict[Partition, dict[int, Record]] = {at: {} for at in left}
    if not left:
        return found
    reader = await bus.assigned({at: spans[0][0] for at, spans in left.items()}, fetch_bytes=FETCH_BYTES)
    try:
        while left:
            num = sum(stop - start for spans in left.values() for start, stop in list(spans)[:1])
            for record in await reader.get_many(timeout_s=1.0, max_records=num):
                at = Partition(record.topic, record.partition)
                if record.offset in kept[at]:
                    found[at][record.offset] = record
            _go_on(reader, left)
    except OffsetOutOfRange:  # retention went on meanwhile
        again = await records_of(bus, {at: kept[at] - found[at].keys() for at in found})
        return {at: records | again.get(at, {}) for at, records in found.items()}
    finally:
        await reader.close()
    return found


def _go_on(reader: Reader, left: dict[Partition, deque[tuple[int, int]]]) -> None:
    """To the next run, in partitions where one was read; those without any more leave `left`."""
    positions = reader.positions()
    for at, spans in list(left.items()):
        position = positions.get(at, spans[0][0])
        is_between = position >= spans[0][1]
        while spans and position >= spans[0][1]:
            spans.popleft()
        if not spans:
            del left[at]
        elif is_between and position < spans[0][0]:
            reader.seek(at, spans[0][0])


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


def letter_of(record: Record, *, stage: str, reason: str, error: str = "") -> DeadLetter:
    """Dead letter of a record of this app. reason: a short constant phrase. error: the message that names the field."""
    place = record.topic.partition(".")[2], record.partition, record.offset
    return letter_at(place, stage=stage, reason=reason, error=error, value=record.value, key=record.key)


def letter_at(
    place: tuple[str, int, int], *, stage: str, reason: str, error: str = "", value: bytes = b"", key: bytes = b""
) -> DeadLetter:
    """Dead letter of the record at `place`: topic, partition, offset. value: cut at MAX_LETTER_BYTES."""
    topic, partition, offset = place
    return DeadLetter(
        topic=topic,
        partition=partition,
        offset=offset,
        stage=stage,
        reason=reason,
        error=error,
        value=value[:MAX_LETTER_BYTES],
        key=key,
    )
