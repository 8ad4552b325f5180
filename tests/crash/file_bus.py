"""The in-memory log with a memory of its own: everything stored or committed is in one file before anybody sees it.

So a process may be killed at any instruction and the next one goes on, as with a broker, at a thousandth of its cost.
One process at a time.
"""

import asyncio
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.log.bus import Headers, Partition, Reader, Record, RecordPosition, check_size
from infra.log.memory import MemoryBus, MemoryReader, _Partition
from infra.log.partitioner import partition_for

LENGTH = struct.Struct("<I")


class FileBus(MemoryBus):
    """A MemoryBus that begins with what its file holds."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = -1
        for entry in entries(path):
            self._apply(entry)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def create_topic(self, topic: str, partitions: int, config: Mapping[str, str], replication: int = 0) -> bool:
        """See Bus."""
        made = await super().create_topic(topic, partitions, config)
        if made:
            self._write("topic", topic, partitions)
        return made

    async def send(
        self, topic: str, value: bytes, *, key: bytes, headers: Headers = (), partition: int | None = None
    ) -> RecordPosition:
        """See Bus."""
        check_size(topic, key, value, headers)
        index = partition_for(key, len(self._logs(topic))) if partition is None else partition
        log = self.log(Partition(topic, index))
        time_ms = max(self.clock(), log.records[-1].timestamp_ms if log.records else 0)
        self._write("record", topic, index, time_ms, key, value, headers)
        record = Record(topic, index, log.end, time_ms, key, value, tuple(headers))
        log.records.append(record)
        self.wake()
        await asyncio.sleep(0)
        return RecordPosition(topic, index, record.offset, record.timestamp_ms)

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        """See Bus."""
        return FileReader(self, dict(starts), group=group)

    async def subscribed(self, topics: Sequence[str], *, group: str) -> Reader:
        """See Bus."""
        for topic in topics:
            await self.commit_beginnings(group, topic)
        reader = FileReader(self, {}, group=group, topics=tuple(topics))
        self.join(group, reader)
        return reader

    def committed_to(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Keep what a reader committed."""
        for partition, offset in offsets.items():
            self._write("commit", group, partition.topic, partition.index, offset)

    def _write(self, *entry: object) -> None:
        data = msgspec.msgpack.encode(entry)
        os.write(self._file, LENGTH.pack(len(data)) + data)

    def _apply(self, entry: list[Any]) -> None:
        kind, *rest = entry
        if kind == "topic":
            topic, partitions = rest
            self._topics[topic] = [_Partition() for _ in range(partitions)]
        elif kind == "record":
            topic, index, time_ms, key, value, headers = rest
            log = self.log(Partition(topic, index))
            named = tuple((name, data) for name, data in headers)
            log.records.append(Record(topic, index, log.end, time_ms, key, value, named))
        else:
            group, topic, index, offset = rest
            self.group(group).committed[Partition(topic, index)] = offset


class FileReader(MemoryReader):
    """A MemoryReader whose commits outlive the process."""

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """See Reader."""
        await super().commit(offsets)
        assert isinstance(self._bus, FileBus) and self._group is not None
        self._bus.committed_to(self._group, offsets)


def entries(path: Path) -> Iterator[list[Any]]:
    """What the file holds; an entry that was being written when the process died was never seen by anybody."""
    data = path.read_bytes() if path.exists() else b""
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if at + length > len(data):
            return
        yield msgspec.msgpack.decode(data[at : at + length])
        at += length
