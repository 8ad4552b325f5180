"""Parts of the log: places as a person writes them, and their offsets.

beginning | end | 981 (every partition) | 3:981,4:12 (these partitions only) | 2026-11-21T12:00 (local time, or with Z)
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Literal

import msgspec

from infra.log.bus import Partition
from infra.log.log import Log, LogMessage
from schemas.errors import ConfigError
from schemas.topics import Topic

EXPECTED = (
    'expected "beginning", "end", an offset, partition:offset (several with commas), or a time such as 2026-11-21T12:00'
)


class LogPlace(msgspec.Struct, frozen=True):
    """A place in a topic; exactly one of the fields is set.

    edge: one end of each partition. offset: the same in every partition. offsets: partition to offset; other partitions are
    left out. time_ms: first record appended then or later.
    """

    edge: Literal["", "beginning", "end"] = ""
    offset: int | None = None
    offsets: dict[int, int] | None = None
    time_ms: int | None = None

    @property
    def is_offset(self) -> bool:
        """True for offsets, which mean something in one topic only."""
        return self.offset is not None or self.offsets is not None


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


def parse_place(text: str, option: str) -> LogPlace:
    """A place as it was written; raises ConfigError that names the option."""
    text = text.strip()
    if text == "beginning":
        return LogPlace(edge="beginning")
    if text == "end":
        return LogPlace(edge="end")
    if text.isdigit():
        return LogPlace(offset=int(text))
    pairs = [pair.partition(":") for pair in text.split(",")]
    if all(index.strip().isdigit() and offset.strip().isdigit() for index, _, offset in pairs):
        return LogPlace(offsets={int(index): int(offset) for index, _, offset in pairs})
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{option}: got {text!r}, {EXPECTED}") from error
    return LogPlace(time_ms=int(moment.astimezone().timestamp() * 1000))


async def find_ranges(log: Log, topic: Topic, start: LogPlace, stop: LogPlace) -> list[Range]:
    """The ranges between two places, without what retention took and without partitions that neither names.

    Raises ConfigError for a partition that does not exist, and for offsets the log does not have.
    """
    name = log.name(topic)
    begins, ends = await log.bus.beginning_offsets(name), await log.bus.end_offsets(name)
    starts = await _offsets(log, topic, start, begins, "--from")
    stops = await _offsets(log, topic, stop, ends, "--to")
    ranges = []
    for at in sorted(begins):
        named = [place.offsets for place in (start, stop) if place.offsets is not None]
        if any(at.index not in offsets for offsets in named):
            continue
        first, last = starts.get(at.index, begins[at]), min(stops.get(at.index, ends[at]), ends[at])
        if start.is_offset and not begins[at] <= first <= ends[at]:
            kept = f"{begins[at]} to {ends[at]}"
            raise ConfigError(f"--from: {topic.name}/{at.index} has no offset {first}; it holds {kept}")
        ranges.append(Range(topic, at.index, max(first, begins[at]), max(first, last)))
    return ranges


async def _offsets(
    log: Log, topic: Topic, place: LogPlace, edges: Mapping[Partition, int], option: str
) -> dict[int, int]:
    if place.time_ms is not None:
        found = await log.bus.offsets_at(log.name(topic), place.time_ms)
        return {at.index: offset for at, offset in found.items()}
    if place.offset is not None:
        return {at.index: place.offset for at in edges}
    if place.offsets is not None:
        known = {at.index for at in edges}
        if unknown := sorted(set(place.offsets) - known):
            raise ConfigError(f"{option}: {topic.name} has no partition {unknown[0]}, expected 0 to {max(known)}")
        return dict(place.offsets)
    if place.edge == "beginning":
        return {at.index: offset for at, offset in (await log.bus.beginning_offsets(log.name(topic))).items()}
    return {at.index: offset for at, offset in (await log.bus.end_offsets(log.name(topic))).items()}


async def until_committed(log: Log, group: str, ranges: Sequence[Range]) -> tuple[list[Range], int]:
    """The ranges up to what `group` has committed, and how many records lie behind that; untouched without a commit."""
    cut: list[Range] = []
    for part in ranges:
        committed = await log.bus.committed(log.group(group), log.name(part.topic))
        stop = committed.get(Partition(log.name(part.topic), part.partition), part.stop)
        cut.append(msgspec.structs.replace(part, stop=max(part.start, min(part.stop, stop))))
    return cut, sum(part.size for part in ranges) - sum(part.size for part in cut)


async def first_time_ms(log: Log, ranges: Sequence[Range]) -> int:
    """Log-append time of the earliest record in the ranges, 0 if they are empty."""
    times = []
    for part in ranges:
        async with aclosing(messages_in(log, part, max_records=1)) as messages:
            async for message in messages:
                times.append(message.timestamp_ms)
                break
    return min(times, default=0)


def messages_in(log: Log, part: Range, *, max_records: int = 500) -> AsyncGenerator[LogMessage, None]:
    return log.scan(part.topic, {part.partition: part.start}, {part.partition: part.stop}, max_records=max_records)
