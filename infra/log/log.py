"""The log with records instead of bytes: encodes, names topics and keys, and reports records that cannot be decoded.

Delivery: `publish` returns after the broker's confirmation. Loss: a record that does not decode reaches the caller as
`LogMessage.error` (BadFrame) with its bytes, never as silence; a record of a newer major raises UnknownMajor and stops the
reader. If `read` raises, the reader is before the records of that call again. Privacy: a block whose members
name a key is sealed before it is sent or stored (see `infra.store.seal`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import chain, repeat
from typing import Literal

import msgspec

from infra.log.blobs import deposit, is_claim, redeem
from infra.log.bus import Bus, Partition, Reader, Record, RecordPosition
from infra.log.memory import changed_count
from infra.log.retry import retry
from infra.observe.failpoint import reach, send_point
from infra.observe.metrics import Metrics
from infra.store.seal import Keys
from infra.store.store import Store
from schemas import Block, Control, DeadLetter, Feedback, Received, Task, Tick, decode, encode, kafka_headers
from schemas.errors import BadFrame, ConfigError, OffsetOutOfRange, StoreError
from schemas.ids import group_of, partition_key
from schemas.records import MAX_LETTER_BYTES
from schemas.topics import ALL, DEAD_LETTERS, MAX_FRAME_BYTES, REPORTS, Topic, topic_config, topic_name
from schemas.wire.frame import is_sealed

# Above this many tokens encoding takes milliseconds, so it leaves the event loop.
THREAD_TOKENS = 65_536
STORE_PAUSES_S = (0.4, 1.6, 6.4)
MAX_IN_FLIGHT = 512
HELD = {topic.name: topic.holds for topic in ALL}

logger = logging.getLogger(__name__)


class LogMessage(msgspec.Struct, frozen=True):
    """A stored record with what it holds: exactly one of `value` and `error` is set.

    record: bytes and position. value: the decoded record. error: why it cannot be decoded.
    """

    record: Record
    value: Control | Block | None = None
    error: BadFrame | None = None

    @property
    def partition(self) -> int:
        return self.record.partition

    @property
    def offset(self) -> int:
        return self.record.offset

    @property
    def timestamp_ms(self) -> int:
        """The broker's clock when it stored the record."""
        return self.record.timestamp_ms

    @property
    def key(self) -> bytes:
        return self.record.key


class Log:
    """One app's log. `store` takes frames over MAX_FRAME_BYTES; without it they are sent whole, if they fit.

    It holds the keys of sealed blocks, too: without it sealed blocks stay sealed, and none is written. clock: in seconds, for
    the age of cached keys.
    """

    def __init__(
        self, bus: Bus, app: str, *, store: Store | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bus = bus
        self.app = app
        self.store = store
        self.keys = Keys(store, clock) if store is not None else None
        self.find_seal = self.keys.find if self.keys is not None else None

    def name(self, topic: Topic) -> str:
        return topic_name(self.app, topic)

    async def publish(
        self, topic: Topic, record: Control | Block, *, key: str | None = None, partition: int | None = None
    ) -> RecordPosition:
        """Store one record; returns once confirmed. The key is the record's own unless given.

        Raises ValueError for a record the topic does not hold, RecordTooLarge, BrokerUnavailable, StoreError.
        """
        if type(record).__name__ not in topic.holds:
            raise ValueError(f"{topic.name} holds {', '.join(topic.holds)}; got {type(record).__name__}")
        if isinstance(record, Block) and self.store is None and record.experiences[0].key_id:
            raise ValueError(f"group {record.group}: key_id: names a key, and this log has no store to hold keys")
        if isinstance(record, Block) and _is_slow_to_encode(record):
            value = await asyncio.to_thread(encode, record, self.find_seal)
        else:
            value = encode(record)
        if isinstance(record, Block) and len(value) > MAX_FRAME_BYTES and self.store is not None:
            value = await asyncio.to_thread(deposit, self.store, value)
        if partition is None and isinstance(record, Tick):
            partition = record.partition
        kind = type(record).__name__
        reach(send_point(topic.name, kind, "before"))
        position = await self.bus.send(
            self.name(topic),
            value,
            key=record_key(topic, record) if key is None else key.encode(),
            headers=kafka_headers(record),
            partition=partition,
        )
        reach(send_point(topic.name, kind, "after"))
        return position

    async def publish_all(
        self, topic: Topic, records: Iterable[Control | Block], partitions: Iterable[int | None] = ()
    ) -> list[RecordPosition]:
        """Store many records, a bounded number of them at once; order between them is not kept. partitions: of the records,
        None for that of its key.
        """
        turn = asyncio.Semaphore(MAX_IN_FLIGHT)
        tasks: list[asyncio.Task[RecordPosition]] = []

        async def publish(record: Control | Block, partition: int | None) -> RecordPosition:
            try:
                return await self.publish(topic, record, partition=partition)
            finally:
                turn.release()

        async with asyncio.TaskGroup() as group:
            for record, partition in zip(records, chain(partitions, repeat(None)), strict=False):
                await turn.acquire()
                tasks.append(group.create_task(publish(record, partition)))
        return [task.result() for task in tasks]

    async def read(self, reader: Reader, *, timeout_s: float, max_records: int = 500) -> list[LogMessage]:
        """Records ready now or within timeout_s, decoded, claim checks resolved.

        Raises UnknownMajor, OffsetOutOfRange, BrokerUnavailable, StoreError.
        """
        records = await reader.get_many(timeout_s=timeout_s, max_records=max_records)
        try:
            return [await self.decoded(record) for record in records]
        except BaseException:
            _rewind(reader, records)
            raise

    def decode(self, record: Record) -> LogMessage:
        """The decoded record; raises UnknownMajor and, where it `asks_store` (which blocks), StoreError."""
        try:
            value = record.value
            if is_claim(value):
                if self.store is None:
                    raise BadFrame("claim: the frame is in the object store, and this reader has no store")
                value = redeem(self.store, value)
            found = decode(value, self.find_seal)
            topic, kind = record.topic.removeprefix(f"{self.app}."), type(found).__name__
            if kind not in HELD.get(topic, (kind,)):  # a right to write one topic must not cover another
                raise BadFrame(f"{topic} holds {', '.join(HELD[topic])}; got {kind}")
            return LogMessage(record, value=found)
        except BadFrame as error:
            return LogMessage(record, error=error)

    async def dead_letter(self, source: LogMessage, *, stage: str, reason: str, error: str = "") -> RecordPosition:
        """Put a record that cannot be processed into dead-letters. reason, error: see `letter_of`; the error is by default that
        of the decoder.
        """
        letter = letter_of(source.record, stage=stage, reason=reason, error=error or str(source.error or ""))
        logger.warning("dead_letter topic=%s offset=%d stage=%s reason=%s", letter.topic, letter.offset, stage, reason)
        return await self.publish(DEAD_LETTERS, letter)

    async def assigned(
        self,
        topic: Topic,
        starts: Mapping[int, int] | Literal["beginning", "end"],
        *,
        group: str | None = None,
        fetch_bytes: int = 0,
    ) -> Reader:
        """A reader of the partitions in `starts` (index to offset), or of all of them from one end. fetch_bytes: see
        `Bus.assigned`.
        """
        name = self.name(topic)
        group = self.group(group) if group is not None else None
        if starts == "beginning":
            places = await self.bus.beginning_offsets(name)
        elif starts == "end":
            places = await self.bus.end_offsets(name)
        else:
            assert not isinstance(starts, str)
            places = {Partition(name, index): offset for index, offset in starts.items()}
        return await self.bus.assigned(places, group=group, fetch_bytes=fetch_bytes)

    async def subscribed(self, topic: Topic, *, group: str) -> Reader:
        """A reader that shares the topic with its group, from committed offsets; `group` is a name within the app."""
        return await self.bus.subscribed([self.name(topic)], group=self.group(group))

    def group(self, name: str) -> str:
        return f"{self.app}.{name}"

    async def tail(
        self, topic: Topic, starts: Mapping[int, int] | Literal["beginning", "end"]
    ) -> AsyncGenerator[LogMessage, None]:
        """Records from `starts` on (see `assigned`), without an end."""
        reader = await self.assigned(topic, starts)
        try:
            while True:
                for message in await self.read(reader, timeout_s=1.0):
                    yield message
        finally:
            await reader.close()

    async def scan(
        self,
        topic: Topic,
        starts: Mapping[int, int] | Literal["beginning"] = "beginning",
        stops: Mapping[int, int] | None = None,
        *,
        max_records: int = 500,
        fetch_bytes: int = 0,
    ) -> AsyncGenerator[LogMessage, None]:
        """Records from `starts` up to `stops`, both by partition, by default all that are kept at the call. fetch_bytes: see
        `Bus.assigned`.

        Raises OffsetOutOfRange where retention took the first.
        """
        scanned = self.chunks(topic, starts, stops, max_records=max_records, fetch_bytes=fetch_bytes)
        async with aclosing(scanned) as chunks:
            async for records in chunks:
                for record in records:
                    yield await self.decoded(record)

    async def bounds(self, topic: Topic) -> tuple[dict[int, int], dict[int, int]]:
        """First kept offset and next offset of each partition, now."""
        begins = await self.bus.beginning_offsets(self.name(topic))
        ends = await self.bus.end_offsets(self.name(topic))
        return {at.index: begin for at, begin in begins.items()}, {at.index: end for at, end in ends.items()}

    async def chunks(
        self,
        topic: Topic,
        starts: Mapping[int, int] | Literal["beginning"] = "beginning",
        stops: Mapping[int, int] | None = None,
        *,
        max_records: int = 500,
        fetch_bytes: int = 0,
    ) -> AsyncGenerator[list[Record], None]:
        """Like `scan`, in batches that are not decoded."""
        if stops is None:
            stops = (await self.bounds(topic))[1]
        begun = {index for index, stop in stops.items() if isinstance(starts, str) or starts[index] < stop}
        if not begun:
            return
        places = starts if isinstance(starts, str) else {at: starts[at] for at in begun}
        reader = await self.assigned(topic, places, fetch_bytes=fetch_bytes)
        try:
            reading = [(Partition(self.name(topic), index), stop) for index, stop in stops.items() if index in begun]
            while any(reader.positions().get(at, 0) < stop for at, stop in reading):
                records = await reader.get_many(timeout_s=1.0, max_records=max_records)
                if kept := [record for record in records if record.offset < stops[record.partition]]:
                    yield kept
        finally:
            await reader.close()

    async def at(self, topic: Topic, partition: int, offsets: Iterable[int]) -> dict[int, Record]:
        """Records at these offsets of a partition, not decoded; records that retention or compaction removed are missing."""
        return await records_at(self.bus, Partition(self.name(topic), partition), offsets)

    async def messages_at(self, topic: Topic, partition: int, offsets: Iterable[int]) -> dict[int, LogMessage]:
        """`at`, decoded."""
        records = await self.at(topic, partition, offsets)
        return {offset: await self.decoded(record) for offset, record in records.items()}

    async def holds(self, topic: Topic) -> bool:
        """True if the broker has the topic: an app that was not begun has none."""
        try:
            return bool(await self.bus.partitions(self.name(topic)))
        except ValueError:
            return False

    async def require_topics(self) -> None:
        """Raises ConfigError naming the first topic of the app that is not there, or that has another number of partitions than
        it was made with: stages join topics by partition, and readers have committed to those there were.
        """
        counts: dict[str, int] = {}
        for topic in ALL:
            try:
                counts[self.name(topic)] = len(await self.bus.partitions(self.name(topic)))
            except ValueError as error:
                raise ConfigError(f"app: {error}; `headrace check --create` creates the topics") from error
        shared = min(
            counts[self.name(topic)] for topic in ALL if topic.partitions is None
        )  # they can be added to alone
        for topic in ALL:
            if counts[self.name(topic)] != (topic.partitions or shared):
                raise changed_count(self.name(topic), counts[self.name(topic)], topic.partitions or shared)

    async def create_topics(self, *, partitions: int, keep_ms: int, replication: int = 0) -> list[str]:
        """Create the topics that are missing; returns their names. ConfigError where a partition count has changed, once all
        that can be created are. replication: copies of each, 0 for as many as the brokers make by themselves.
        """
        created, refused = [], []
        for topic in ALL:
            try:
                config = topic_config(topic, keep_ms, replication)
                if await self.bus.create_topic(self.name(topic), topic.partitions or partitions, config, replication):
                    created.append(self.name(topic))
            except ConfigError as error:
                refused.append(error)
        if refused:
            raise refused[0]
        return created

    async def decoded(self, record: Record) -> LogMessage:
        """`decode`, in a thread where it asks the store; a store that fails is asked again a few times."""
        if not asks_store(record):
            return self.decode(record)

        def again(error: Exception) -> bool:
            if isinstance(error, StoreError):
                logger.warning("blob.retry topic=%s offset=%d error=%s", record.topic, record.offset, error)
            return isinstance(error, StoreError)

        return await retry(lambda: asyncio.to_thread(self.decode, record), STORE_PAUSES_S, again)


def asks_store(record: Record) -> bool:
    """True if decoding a record asks the object store: for the frame, or for the key of sealed sections."""
    return is_claim(record.value) or is_sealed(record.value)


def _is_slow_to_encode(block: Block) -> bool:
    """Takes milliseconds, or may ask the object store for a key; so it leaves the event loop."""
    return bool(block.experiences[0].key_id) or sum(member.num_tokens for member in block.experiences) > THREAD_TOKENS


def _rewind(reader: Reader, records: Sequence[Record]) -> None:
    """Go back to before `records`, in every partition that is still the reader's."""
    first = {Partition(record.topic, record.partition): record.offset for record in reversed(records)}
    for partition, offset in first.items():
        with suppress(ValueError):
            reader.seek(partition, offset)


async def follow(
    log: Log,
    topic: Topic,
    apply: Callable[[LogMessage], None],
    *,
    metrics: Metrics,
    caught_up: asyncio.Event,
    changed: Callable[[dict[int, int]], None],
    starts: Mapping[int, int] | Literal["beginning"] = "beginning",
) -> None:
    """Call `apply` for every record and `changed` after every batch, with where the next one begins, by partition.

    caught_up: set once all is read that was there at the call. Ends only by cancellation or an error of the log.
    """
    ends = await log.bus.end_offsets(log.name(topic))
    reader = await log.assigned(topic, starts)
    try:
        while True:
            for message in await log.read(reader, timeout_s=1.0 if caught_up.is_set() else 0.05):
                if readable(message, topic, metrics):
                    apply(message)
            positions = reader.positions()
            if all(positions.get(partition, 0) >= end for partition, end in ends.items()):
                caught_up.set()
            changed({partition.index: offset for partition, offset in positions.items()})
    finally:
        await reader.close()


def readable(message: LogMessage, topic: Topic, metrics: Metrics) -> bool:
    """True if a message holds a record; a message with an error is counted and logged."""
    if message.error is None:
        return True
    metrics.counter("bad_frames", topic=topic.name).inc()
    where = f"{topic.name}/{message.partition}@{message.offset}"
    logger.warning("bad_frame at=%s error=%s", where, message.error)
    return False


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


# Neighbouring offsets are read in one go where the hole between them costs less than another request.
MAX_HOLE = 64
FETCH_BYTES = 64 * 1024  # of a fetch of single records, which also returns the records behind them


async def records_at(bus: Bus, partition: Partition, offsets: Iterable[int]) -> dict[int, Record]:
    """The records at these offsets; records that retention or compaction removed, or that are not written yet, are missing."""
    begin = (await bus.beginning_offsets(partition.topic)).get(partition, 0)
    end = (await bus.end_offsets(partition.topic)).get(partition, 0)
    wanted = {offset for offset in offsets if begin <= offset < end}
    found: dict[int, Record] = {}
    if not wanted:
        return found
    spans = deque(runs(wanted))
    reader = await bus.assigned({partition: spans[0][0]}, fetch_bytes=FETCH_BYTES)
    try:
        while spans:
            start, stop = spans[0]
            for record in await reader.get_many(timeout_s=1.0, max_records=stop - start):
                if record.offset in wanted:
                    found[record.offset] = record
            if reader.positions().get(partition, start) >= stop:
                spans.popleft()
                if spans:
                    reader.seek(partition, spans[0][0])
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


def record_key(topic: Topic, record: Control | Block) -> bytes:
    """The key of a record in a topic: records that must stay in order share it. With one partition any key is right."""
    if isinstance(record, DeadLetter):
        return record.key
    if isinstance(record, Tick):
        return str(record.partition).encode()
    if isinstance(record, Feedback | Received) and record.ref:
        return partition_key(group_of(record.ref)).encode()
    if isinstance(record, Received):
        return record.path.encode()  # a webhook's events stay in order
    if isinstance(record, Task) and topic.key == "group":
        if record.issued is None:
            raise ValueError(f"task {record.id}: {topic.name} accepts only issued tasks")
        return record.issued.group.encode()
    if isinstance(record, Task):
        return record.id.encode()
    if (group := getattr(record, "group", None)) is not None:
        return partition_key(str(group)).encode()
    for name in ("run", "policy", "instance"):
        if (key := getattr(record, name, None)) is not None:
            return str(key).encode()
    return topic.key.encode()
