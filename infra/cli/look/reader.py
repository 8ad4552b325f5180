"""The newest records of a topic, and the processes of the last hour."""

from collections import deque
from collections.abc import Mapping
from contextlib import aclosing
from typing import Literal, NamedTuple

from infra.log.bus import Record
from infra.log.log import LATELY_MS, Log, LogMessage, lately
from schemas import Progress, topics
from schemas.topics import REPORTS, Topic

WINDOW_MS = 60_000  # rates, and counters that alarm, are over so long

# The consumer groups of an app, with the topics that each reads: a group's lag is what waits for it.
Group = Literal["tasks", "explore", "verify", "collect"]
READS: Mapping[Group, tuple[Topic, ...]] = {
    "tasks": (topics.TASKSET_RAW,),
    "explore": (topics.TASKS,),
    "verify": (topics.EXPERIENCES, topics.EXPERTS),
    "collect": (topics.VERIFIED,),
}


async def newest(log: Log, topic: Topic, last: int, kind: str = "") -> list[LogMessage]:
    """The `last` newest records, oldest first. kind: only records of this kind; others are not decoded."""
    return (await newest_and_next(log, topic, last, kind))[0]


async def newest_and_next(log: Log, topic: Topic, last: int, kind: str = "") -> tuple[list[LogMessage], dict[int, int]]:
    """The `last` newest records (see `newest`), and by partition the offset behind them."""
    begins, ends = await log.bounds(topic)
    # By position, not by count: compaction leaves holes.
    starts = {index: max(begins[index], end - last) for index, end in ends.items()}
    found: list[Record] = []
    async with aclosing(log.chunks(topic, starts, ends)) as chunks:
        async for records in chunks:
            found += [record for record in records if not kind or ("kind", kind.encode()) in record.headers]
    found.sort(key=lambda record: (record.timestamp_ms, record.partition, record.offset))
    return [await log.decoded(record) for record in (found[-last:] if last else [])], ends


class Spoken(NamedTuple):
    """A process: time of its first report of the last hour, and its reports of its last minute, by the log's clock."""

    first_s: float
    reports: list[tuple[Progress, float]]


class LastHour:
    """Every process that reported in the hour before the newest report. It holds a minute of reports of each.

    The hour is read whole (some 20 MB for 20 processes), and only the last minute is decoded. Not safe for concurrent use.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._nexts: dict[int, int] = {}
        self._first_ms: dict[bytes, int] = {}
        self._records: dict[bytes, deque[Record]] = {}

    async def spoken(self) -> dict[str, Spoken]:
        """Each process by its instance."""
        begins, ends = await self._log.bounds(REPORTS)
        if not self._nexts or any(end < self._nexts.get(index, 0) for index, end in ends.items()):
            self._first_ms, self._records, self._nexts = {}, {}, await lately(self._log)
        starts = {index: max(begins[index], self._nexts.get(index, 0)) for index in ends}
        async with aclosing(self._log.chunks(REPORTS, starts, ends)) as chunks:
            async for records in chunks:
                for record in records:
                    self._take(record)
        self._nexts = dict(ends)
        newest_ms = max((records[-1].timestamp_ms for records in self._records.values()), default=0)
        for key in [key for key, records in self._records.items() if records[-1].timestamp_ms < newest_ms - LATELY_MS]:
            del self._records[key], self._first_ms[key]
        found: dict[str, Spoken] = {}
        for key, held in self._records.items():
            for message in [await self._log.decoded(record) for record in held]:
                if isinstance(message.value, Progress):
                    spoken = found.setdefault(message.value.instance, Spoken(self._first_ms[key] / 1000, []))
                    spoken.reports.append((message.value, message.timestamp_ms / 1000))
        return found

    def _take(self, record: Record) -> None:
        self._first_ms.setdefault(record.key, record.timestamp_ms)
        records = self._records.setdefault(record.key, deque())
        records.append(record)
        while records[0].timestamp_ms < record.timestamp_ms - WINDOW_MS:
            records.popleft()
