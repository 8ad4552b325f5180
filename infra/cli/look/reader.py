"""The newest records of a topic, the processes of the last hour, and the expected roles of which too few run.

Expected are the roles of the settings, as many as [expect] says, or one of each. An app whose master is done expects nothing.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

from infra.cli.settings import Expect
from infra.log.bus import Record
from infra.log.log import LATELY_MS, Log, LogMessage, lately
from schemas import Progress, topics
from schemas.topics import REPORTS, Topic

WINDOW_MS = 60_000  # rates, and counters that alarm, are over so long
GONE_S = 15.0  # a role that has not reported for so long is silent
STARTING_S = 60.0  # of the app's first report: a role that neither reported nor failed may still load a model
OVER = ("stopped", "done", "failed")  # states of a role's last report

# The consumer groups of an app, with the topics that each reads: a group's lag is the number of records that wait for it.
Group = Literal["tasks", "explore", "verify", "collect", "feedback"]
READS: Mapping[Group, tuple[Topic, ...]] = {
    "tasks": (topics.TASKSET_RAW,),
    "explore": (topics.TASKS,),
    "verify": (topics.EXPERIENCES, topics.EXPERTS),
    "collect": (topics.VERIFIED,),
    "feedback": (topics.FEEDBACK,),
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

    @property
    def last(self) -> Progress:
        return self.reports[-1][0]

    @property
    def last_s(self) -> float:
        return self.reports[-1][1]


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


def expected_roles(expect: Expect, *, serves: bool) -> dict[str, int]:
    """Role to the number the settings ask for; a role that is not there is not expected."""
    wanted = {"master": 1, "train": 1, "explore": expect.explore or 1, "process": expect.process or 1}
    return wanted | ({"serve": expect.serve or 1} if serves else {})


def missing(wanted: Mapping[str, int], processes: Sequence[Spoken], now_s: float) -> list[str]:
    """One line for each role of which too few run. processes: every process of the last hour."""
    running = [process for process in processes if now_s - process.last_s < GONE_S and process.last.state not in OVER]
    if not running and any(process.last.role == "master" and process.last.state == "done" for process in processes):
        return []
    began_s = min((process.first_s for process in running), default=0.0)
    found = []
    for role, number in wanted.items():
        own = [process for process in processes if process.last.role == role and not process.last.is_canary]
        here = [process for process in own if process in running]
        gone = [process for process in own if process not in here]
        is_loading = now_s - began_s < STARTING_S and all(process.last_s < began_s for process in gone)
        if len(here) < number and not is_loading:
            count = f"no {role} runs" if not here else f"{len(here)} of {number} {role} run"
            found.append(f"{count}: {_last_words(gone, now_s)}")
    return found


def _last_words(gone: Sequence[Spoken], now_s: float) -> str:
    if not gone:
        return "no report was received; see its log"
    process = max(gone, key=lambda process: process.last_s)
    age_s, last = max(0.0, now_s - process.last_s), process.last
    if last.state == "failed":
        return f"{last.instance} ended {age_s:.0f} s ago: {last.reason}"
    return f"{last.instance} {last.state if last.state in OVER else 'last reported'} {age_s:.0f} s ago"
