"""The log in this process: the contract of Kafka without a broker, for tests, simulations and notebooks.

Deterministic: log-append time comes from the clock given, partitions from the same hash as Kafka's clients, a group's
partitions are dealt round-robin to its readers in the order they joined. One instance is shared by all roles; closing
it does nothing. Nothing outlives the process.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from infra.log.bus import CommitRefused, Headers, Partition, Reader, Record, RecordPosition, check_size, partition_for
from schemas.errors import ConfigError, OffsetOutOfRange


def wall_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class _Partition(msgspec.Struct):
    """Records from offset `beginning` on."""

    beginning: int = 0
    records: list[Record] = []

    @property
    def end(self) -> int:
        return self.beginning + len(self.records)


class _Group(msgspec.Struct):
    """Committed offsets and readers of a group; `generation` grows with each join and leave."""

    committed: dict[Partition, int] = {}
    members: list["MemoryReader"] = []
    generation: int = 0


class MemoryBus:
    """A Bus in memory. `clock` gives log-append milliseconds."""

    def __init__(self, clock: Callable[[], int] = wall_ms) -> None:
        self.clock = clock
        self._topics: dict[str, list[_Partition]] = {}
        self._groups: dict[str, _Group] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to close: other roles may go on with this instance."""

    async def send(
        self, topic: str, value: bytes, *, key: bytes, headers: Headers = (), partition: int | None = None
    ) -> RecordPosition:
        check_size(topic, key, value, headers)
        logs = self._logs(topic)
        index = partition_for(key, len(logs)) if partition is None else partition
        log = self.log(Partition(topic, index))
        record = Record(topic, index, log.end, self.clock(), key, value, tuple(headers))
        log.records.append(record)
        self.wake()
        await asyncio.sleep(0)  # as a network would, let others run
        return RecordPosition(topic, index, record.offset, record.timestamp_ms)

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        for partition in starts:
            self.log(partition)
        return MemoryReader(self, dict(starts), group=group)

    async def subscribed(self, topics: Sequence[str], *, group: str) -> Reader:
        for topic in topics:
            await self.commit_beginnings(group, topic)
        reader = MemoryReader(self, {}, group=group, topics=tuple(topics))
        self.join(group, reader)
        return reader

    async def partitions(self, topic: str) -> tuple[int, ...]:
        return tuple(range(len(self._logs(topic))))

    async def beginning_offsets(self, topic: str) -> dict[Partition, int]:
        return {Partition(topic, index): log.beginning for index, log in enumerate(self._logs(topic))}

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        return {Partition(topic, index): log.end for index, log in enumerate(self._logs(topic))}

    async def offsets_at(self, topic: str, timestamp_ms: int) -> dict[Partition, int]:
        return {
            Partition(topic, index): next(
                (record.offset for record in log.records if record.timestamp_ms >= timestamp_ms), log.end
            )
            for index, log in enumerate(self._logs(topic))
        }

    async def committed(self, group: str, topic: str) -> dict[Partition, int]:
        return {
            partition: offset for partition, offset in self.group(group).committed.items() if partition.topic == topic
        }

    async def commit_beginnings(self, group: str, topic: str) -> None:
        self.group(group).committed = {**await self.beginning_offsets(topic), **self.group(group).committed}

    async def held(self, group: str, topic: str) -> set[int]:
        dealt = [self.share(group, member) for member in self.group(group).members]
        return {partition.index for share in dealt for partition in share if partition.topic == topic}

    async def create_topic(self, topic: str, partitions: int, config: Mapping[str, str], replication: int = 0) -> bool:
        if topic not in self._topics:
            self._topics[topic] = [_Partition() for _ in range(partitions)]
            return True
        if len(self._topics[topic]) != partitions:
            raise changed_count(topic, len(self._topics[topic]), partitions)
        return False

    async def delete_records(self, partition: Partition, before: int) -> None:
        log = self.log(partition)
        if before > log.end:
            raise OffsetOutOfRange(f"{partition}: cannot delete below {before}, expected at most the end {log.end}")
        if before > log.beginning:
            del log.records[: before - log.beginning]
            log.beginning = before

    def restore(self, topic: str, records: Sequence[Record]) -> None:
        """Make a topic of one partition from records as they were read elsewhere, with their offsets and times.

        ValueError names the first offset that does not follow the one before it.
        """
        begins = records[0].offset if records else 0
        for at, record in enumerate(records, begins):
            if record.offset != at:
                raise ValueError(f"{topic}: got offset {record.offset}, expected {at}: a record is missing")
        self._topics[topic] = [_Partition(begins, list(records))]

    def log(self, partition: Partition) -> _Partition:
        """The records of one partition; ValueError for one that does not exist."""
        logs = self._logs(partition.topic)
        if not 0 <= partition.index < len(logs):
            raise ValueError(f"topic {partition.topic}: got partition {partition.index}, expected 0 to {len(logs) - 1}")
        return logs[partition.index]

    def group(self, name: str) -> _Group:
        return self._groups.setdefault(name, _Group())

    def join(self, group: str, reader: "MemoryReader") -> None:
        """Let a reader share its topics with the group."""
        state = self.group(group)
        state.members.append(reader)
        state.generation += 1
        self.wake()

    def leave(self, group: str, reader: "MemoryReader") -> None:
        """Take a reader out; the others take over at the next read."""
        state = self.group(group)
        state.members.remove(reader)
        state.generation += 1
        self.wake()

    def share(self, group: str, reader: "MemoryReader") -> tuple[Partition, ...]:
        """Partitions of the reader: each topic's are dealt in turn to the members that read it."""
        mine = []
        for topic in sorted(reader.topics):
            members = [member for member in self.group(group).members if topic in member.topics]
            mine += [
                Partition(topic, index)
                for index in range(len(self._logs(topic)))
                if members[index % len(members)] is reader
            ]
        return tuple(mine)

    def wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.get_loop().call_soon_threadsafe(_finish, waiting)

    async def wait(self) -> None:
        """Until the next `wake`."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)

    def _logs(self, topic: str) -> list[_Partition]:
        if topic not in self._topics:
            raise ValueError(f"no topic {topic!r}: create it first")
        return self._topics[topic]


def _finish(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def changed_count(topic: str, got: int, expected: int) -> ConfigError:
    """Error for a topic that is there with another number of partitions."""
    return ConfigError(
        f"topic {topic}: got {got} partitions in the log, expected {expected} (kafka.partitions): keys would move to "
        "other partitions, so a count is fixed once the topic exists; set it back, or use another app"
    )


class MemoryReader:
    def __init__(
        self, bus: MemoryBus, starts: dict[Partition, int], *, group: str | None, topics: tuple[str, ...] = ()
    ) -> None:
        self.topics = topics
        self._bus = bus
        self._group = group
        self._positions = starts
        self._generation = 0
        self._next = 0
        self._closed = False

    async def get_many(self, *, timeout_s: float, max_records: int = 500) -> list[Record]:
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(timeout_s):
                while not (records := self._take(max_records)):
                    await self._bus.wait()
                return records
        except TimeoutError:
            return []

    def seek(self, partition: Partition, offset: int) -> None:
        self._follow()
        if partition not in self._positions:
            raise ValueError(f"not assigned to this reader: {partition}")
        self._positions[partition] = offset

    def positions(self) -> dict[Partition, int]:
        self._follow()
        return dict(self._positions)

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        if self._group is None:
            raise ValueError("this reader has no group to commit for")
        mine = self._bus.share(self._group, self) if self.topics else tuple(self._positions)
        if lost := [partition for partition in offsets if partition not in mine]:
            if not self.topics:
                raise ValueError(f"not assigned to this reader: {lost}")
            raise CommitRefused(f"group {self._group}: no longer this reader's: {lost}")
        self._bus.group(self._group).committed.update(offsets)

    async def close(self) -> None:
        if self.topics and self._group is not None and not self._closed:
            self._bus.leave(self._group, self)
        self._closed = True

    def _follow(self) -> None:
        if self._closed:
            raise ValueError("this reader is closed")
        if not self.topics or self._group is None:
            return
        group = self._bus.group(self._group)
        if group.generation != self._generation:
            self._generation = group.generation
            self._positions = {
                partition: group.committed[partition] for partition in self._bus.share(self._group, self)
            }

    def _take(self, max_records: int) -> list[Record]:
        """Up to max_records from the assigned partitions in turn; no partition starves another."""
        self._follow()
        partitions = sorted(self._positions)
        taken: list[Record] = []
        for step in range(len(partitions)):
            partition = partitions[(self._next + step) % len(partitions)]
            taken += self._read(partition, max_records - len(taken), quiet=bool(taken))
        self._next += 1
        return taken

    def _read(self, partition: Partition, num: int, *, quiet: bool) -> list[Record]:
        log = self._bus.log(partition)
        position = self._positions[partition]
        if not log.beginning <= position <= log.end:
            if quiet:  # the records in hand first; the next read raises
                return []
            raise OffsetOutOfRange(
                f"{partition.topic}/{partition.index}: offset {position} is not kept, "
                f"expected {log.beginning} to {log.end}"
            )
        first = position - log.beginning
        records = log.records[first : first + num]
        self._positions[partition] = position + len(records)
        return records
