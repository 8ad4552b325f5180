"""The log as the roles see it: bytes in, bytes out, positions. Kafka and memory implement it under one contract.

Delivery: `send` returns only after the broker has confirmed the record (acks=all); a failed send may still have
been stored, so every record carries an id and readers absorb duplicates. Order: per partition. Loss: a reader never
skips an offset that retention has removed; it raises OffsetOutOfRange.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from aiokafka.partitioner import murmur2

from schemas.errors import HeadraceError, RecordTooLarge
from schemas.topics import MAX_RECORD_BYTES

# Largest overhead of Kafka's record batch: 61 bytes of batch, 21 of record, five for each length.
BATCH_BYTES = 96
HEADER_BYTES = 10

Headers = tuple[tuple[str, bytes], ...]


class CommitRefused(HeadraceError):
    """The group has rebalanced: another reader has a partition to commit now, and reads its uncommitted records again."""


class Partition(msgspec.Struct, frozen=True, order=True):
    """One partition of one topic (full topic name)."""

    topic: str
    index: int


class RecordPosition(msgspec.Struct, frozen=True):
    """Position of a stored record. topic: full name. timestamp_ms: by the broker's clock."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class Record(msgspec.Struct, frozen=True):
    """One stored record, as bytes. topic: full name. timestamp_ms: by the broker's clock. key: that placed it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes
    headers: Headers = ()


def digest_of(record: Record) -> str:
    """By which a record is known: its time and its bytes."""
    return hashlib.blake2b(b"%d:" % record.timestamp_ms + record.value, digest_size=16).hexdigest()


def partition_for(key: bytes, num_partitions: int) -> int:
    """Partition of `key` among `num_partitions`, as Java's clients choose it."""
    return 0 if num_partitions == 1 else (murmur2(key) & 0x7FFFFFFF) % num_partitions


class Reader(Protocol):
    """Reads assigned partitions in offset order. Not safe for concurrent use."""

    async def get_many(self, *, timeout_s: float, max_records: int = 500) -> list[Record]:
        """Records ready now, or within timeout_s; empty on timeout.

        Raises OffsetOutOfRange, BrokerUnavailable.
        """

    def seek(self, partition: Partition, offset: int) -> None:
        """Next read of `partition` starts at `offset`."""

    def positions(self) -> dict[Partition, int]:
        """Next offset to be returned, per assigned partition; right after a rebalance some may be absent."""

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit next-to-read offsets for the reader's group; ValueError without a group.

        Raises CommitRefused where a subscribed reader has lost one of the partitions; reading on is fine.
        """

    async def close(self) -> None:
        """Release the connection; pending commits are not implied."""


class Bus(Protocol):
    async def start(self) -> None:
        """Connect, retrying with backoff until the deadline; raises BrokerUnavailable naming the address."""

    async def close(self) -> None:
        """Flush pending records and disconnect."""

    async def send(
        self, topic: str, value: bytes, *, key: bytes, headers: Headers = (), partition: int | None = None
    ) -> RecordPosition:
        """Store one record; returns once confirmed. The key picks the partition (murmur2, as in Java) unless given.

        Raises RecordTooLarge before sending, BrokerUnavailable after the deadline, ValueError for a topic or partition
        that does not exist. Concurrent sends are batched.
        """

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        """A reader of exactly these partitions from exactly these offsets; `group` only lets it commit.

        fetch_bytes: of a partition in one answer of the broker, or one batch where that is more; 0: as many as a record may
        have. For a reader of few records, which would otherwise be sent all that lies between and behind them.
        """

    async def subscribed(self, topics: Sequence[str], *, group: str) -> Reader:
        """A reader that shares the topics with its group, from committed offsets.

        A partition the group never committed starts at its beginning, by an explicit commit before the first read.
        """

    async def partitions(self, topic: str) -> tuple[int, ...]:
        """Partition indexes of a topic; ValueError if it does not exist."""

    async def beginning_offsets(self, topic: str) -> dict[Partition, int]:
        """Oldest kept offset of each partition."""

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        """Next offset of each partition."""

    async def offsets_at(self, topic: str, timestamp_ms: int) -> dict[Partition, int]:
        """First offset of each partition appended at `timestamp_ms` or later; its end without such a record."""

    async def committed(self, group: str, topic: str) -> dict[Partition, int]:
        """Committed next-to-read offsets; partitions without one are absent."""

    async def commit_beginnings(self, group: str, topic: str) -> None:
        """Commit the oldest kept offset of each partition for which `group` has committed nothing; others stay."""

    async def held(self, group: str, topic: str) -> set[int]:
        """Partitions of a topic that the group's subscribed readers were given; none during a rebalance."""

    async def create_topic(self, topic: str, partitions: int, config: Mapping[str, str], replication: int = 0) -> bool:
        """Create a topic; False if it was there. ConfigError if it is there with another partition count.

        replication: copies of each partition, 0 for as many as the brokers make by themselves.
        """

    async def delete_records(self, partition: Partition, before: int) -> None:
        """Remove all records below `before`; OffsetOutOfRange if that is past the end."""


def check_size(topic: str, key: bytes, value: bytes, headers: Headers) -> None:
    """Raise RecordTooLarge for a record that a broker configured as in `schemas.topics` would refuse."""
    size = len(key) + len(value) + sum(len(name) + len(data) + HEADER_BYTES for name, data in headers) + BATCH_BYTES
    if size > MAX_RECORD_BYTES:
        raise RecordTooLarge(f"record for {topic}: got {size} bytes, expected at most {MAX_RECORD_BYTES}")
