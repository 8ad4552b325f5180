"""Parts of the log: places as a person writes them, and their offsets.

beginning | end | 981 (every partition) | 3:981,4:12 (these partitions only) | 2026-11-21T12:00 (local time, or with Z)
"""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime

import msgspec

from infra.log.bus import Partition
from infra.log.log import Log, LogMessage
from schemas.errors import ConfigError
from schemas.topics import Topic

EXPECTED = (
    'expected "beginning", "end", an offset, partition:offset (several with commas), or a time such as 2026-11-21T12:00'
)
Offsets = dict[Partition, int]


class Range(msgspec.Struct, frozen=True):
    """Records of one partition.

    topic: of the app. partition: index. start: first offset. stop: the offset after the last.
    """

    topic: Topic
    partition: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)


def is_offset(place: str) -> bool:
    return re.fullmatch(r"\s*\d+\s*(:\s*\d+\s*(,\s*\d+\s*:\s*\d+\s*)*)?", place) is not None


async def find_ranges(log: Log, topic: Topic, start: str = "beginning", stop: str = "end") -> list[Range]:
    """The ranges between two places, without records that retention deleted and without partitions that neither place names.

    Raises ConfigError for a place that cannot be read, a partition that does not exist, and offsets the log does not have.
    """
    name = log.name(topic)
    begins, ends = await log.bus.beginning_offsets(name), await log.bus.end_offsets(name)
    starts = await _offsets(log, topic, start.strip(), begins, ends, "--from")
    stops = await _offsets(log, topic, stop.strip(), begins, ends, "--to")
    ranges = []
    for at in sorted(starts.keys() & stops.keys()):
        first, last = starts[at], min(stops[at], ends[at])
        if is_offset(start) and not begins[at] <= first <= ends[at]:
            kept = f"{begins[at]} to {ends[at]}"
            raise ConfigError(f"--from: {topic.name}/{at.index} has no offset {first}; it holds {kept}")
        ranges.append(Range(topic, at.index, max(first, begins[at]), max(first, last)))
    return ranges


async def _offsets(log: Log, topic: Topic, place: str, begins: Offsets, ends: Offsets, option: str) -> Offsets:
    if place in ("beginning", "end"):
        return begins if place == "beginning" else ends
    if place.isdigit():
        return dict.fromkeys(begins, int(place))
    if is_offset(place):
        pairs = [pair.split(":") for pair in place.split(",")]
        named = {Partition(log.name(topic), int(index)): int(offset) for index, offset in pairs}
        if unknown := sorted(named.keys() - begins.keys()):
            highest = max(at.index for at in begins)
            raise ConfigError(f"{option}: {topic.name} has no partition {unknown[0].index}, expected 0 to {highest}")
        return named
    try:
        moment = datetime.fromisoformat(place)
    except ValueError as error:
        raise ConfigError(f"{option}: got {place!r}, {EXPECTED}") from error
    return ends | await log.bus.offsets_at(log.name(topic), int(moment.astimezone().timestamp() * 1000))


async def until_committed(log: Log, group: str, ranges: Sequence[Range]) -> tuple[list[Range], int]:
    """The ranges up to the committed offsets of `group`, and the number of records after them; unchanged without a commit."""
    cut: list[Range] = []
    for part in ranges:
        committed = await log.bus.committed(log.group(group), log.name(part.topic))
        stop = committed.get(Partition(log.name(part.topic), part.partition), part.stop)
        cut.append(msgspec.structs.replace(part, stop=max(part.start, min(part.stop, stop))))
    return cut, sum(part.size for part in ranges) - sum(part.size for part in cut)


async def first_time_ms(log: Log, ranges: Sequence[Range]) -> int:
    times = []
    for part in ranges:
        async with aclosing(messages_in(log, part, max_records=1)) as messages:
            async for message in messages:
                times.append(message.timestamp_ms)
                break
    return min(times, default=0)


def messages_in(log: Log, part: Range, *, max_records: int = 500) -> AsyncGenerator[LogMessage, None]:
    return log.scan(part.topic, {part.partition: part.start}, {part.partition: part.stop}, max_records=max_records)
