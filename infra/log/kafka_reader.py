"""Reads Kafka: explicit positions only (`auto_offset_reset=none`), so that trimmed offsets are loud."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
)

from infra.log.access import Access, client_options
from infra.log.bus import Bus, CommitRefused, Partition, Record
from infra.log.retry import DENIED, may_pass, unavailable
from schemas.errors import BrokerUnavailable, OffsetOutOfRange

# aiokafka waits for a broker for ever and says nothing, so a silent reader asks whether it is there.
PROBE_AFTER_S = 5.0
CLOSE_S = 5.0
# Reads that empty the buffer are this far apart: each one is a request to the broker, and they cost more than they carry.
MIN_INTERVAL_S = 0.01
# A broker that has just started does not list all its topics yet, and a group that deals its partitions in that moment
# deals none: it looks again after so long.
METADATA_AGE_MS = 10_000
REQUEST_TIMEOUT_MS = 20_000
RETRY_BACKOFF_MS = 200
SESSION_TIMEOUT_MS = 10_000
HEARTBEAT_MS = 2_000
MAX_POLL_INTERVAL_MS = 600_000

logger = logging.getLogger(__name__)
T = TypeVar("T", AIOKafkaConsumer, AIOKafkaProducer, AIOKafkaAdminClient)


def make_consumer(
    bootstrap_servers: str, client_id: str, access: Access, group: str | None, fetch_bytes: int
) -> AIOKafkaConsumer:
    """A consumer without a position, which commits only what it is asked to. fetch_bytes: at most of a partition at once."""
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap_servers,
        client_id=client_id,
        group_id=group,
        auto_offset_reset="none",
        enable_auto_commit=False,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        retry_backoff_ms=RETRY_BACKOFF_MS,
        metadata_max_age_ms=METADATA_AGE_MS,
        max_partition_fetch_bytes=fetch_bytes,
        session_timeout_ms=SESSION_TIMEOUT_MS,
        heartbeat_interval_ms=HEARTBEAT_MS,
        max_poll_interval_ms=MAX_POLL_INTERVAL_MS,
        **client_options(access),
    )


async def begin(client: T) -> T:
    """Start an aiokafka client; what it opened is closed again if that fails."""
    try:
        await client.start()  # type: ignore[attr-defined]
    except BaseException:
        await stop(client)
        raise
    return client


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaAdminClient) -> None:
    """End an aiokafka client within CLOSE_S, in any state; never raises."""
    await asyncio.sleep(0)  # one that has just started would choke on tasks of its own that have not begun
    if await _ends(client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop()):
        return
    # A consumer whose fetch is waiting for a lost broker lets that fetch's CancelledError out and stops halfway.
    for part in (getattr(client, "_fetcher", None), getattr(client, "_client", None), getattr(client, "client", None)):
        if part is not None:
            await _ends(part.close())


async def _ends(closing: Coroutine[object, object, None]) -> bool:
    """True if `closing` returned in time; its errors, cancellation included, stay its own."""
    task = asyncio.create_task(closing)
    await asyncio.wait([task], timeout=CLOSE_S)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_S)
    if task.done() and not task.cancelled() and task.exception() is None:
        return True
    logger.info("kafka.close.forced error=%r", None if task.cancelled() or not task.done() else task.exception())
    return False


class Cluster(Bus, Protocol):
    """The bus a reader belongs to. deadline_s: how long a broker may be away."""

    bootstrap_servers: str
    deadline_s: float


class KafkaReader:
    """A Reader of KafkaBus. A broker's restart is a pause; an absence longer than the bus's deadline is an error."""

    def __init__(self, bus: Cluster, consumer: AIOKafkaConsumer, *, group: str | None, subscribed: bool) -> None:
        self._bus = bus
        self._consumer = consumer
        self._group = group
        self._subscribed = subscribed
        self._rests = False
        self._heard_s = self._probed_s = self._next_s = time.monotonic()

    async def get_many(self, *, timeout_s: float, max_records: int = 500, topic: str | None = None) -> list[Record]:
        wanted = [at for at in self._consumer.assignment() if at.topic == topic] if topic is not None else []
        if self._rests:
            self._consumer.resume(*self._consumer.assignment())
            self._rests = False
        if timeout_s > 0 and (early_s := self._next_s - time.monotonic()) > 0:
            await asyncio.sleep(min(early_s, timeout_s))
        try:
            # aiokafka waits out a rebalance however long it takes, hence a timeout of our own.
            async with asyncio.timeout(timeout_s + 1.0):
                found = await self._consumer.getmany(*wanted, timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except TimeoutError:
            found = {}
        except OffsetOutOfRangeError as error:
            raise await self._out_of_range(error.args[0]) from error
        except NoOffsetForPartitionError as error:
            await self._first_commit(error.args[0])
            return []
        except DENIED as error:
            raise self._unavailable("read", error) from error
        except KafkaError as error:
            if not may_pass(error):
                raise
            logger.warning("kafka.read address=%s error=%r", self._bus.bootstrap_servers, error)
            await asyncio.sleep(min(timeout_s, 0.2))
            found = {}
        if not found:
            await self._still_there()
            return []
        self._heard_s = time.monotonic()
        records = [_record(record) for records in found.values() for record in records]
        if len(records) < max_records:
            self._next_s = self._heard_s + MIN_INTERVAL_S
        return records

    def rest(self) -> None:
        self._consumer.pause(*self._consumer.assignment())
        self._rests = True

    def seek(self, partition: Partition, offset: int) -> None:
        try:
            self._consumer.seek(TopicPartition(partition.topic, partition.index), offset)
        except IllegalStateError as error:
            raise ValueError(f"not assigned to this reader: {partition}") from error

    def positions(self) -> dict[Partition, int]:
        # Consumer.position() waits for what is not known yet; the state behind it does not.
        subscription = self._consumer._subscription.subscription
        assignment = subscription.assignment if subscription is not None else None
        if assignment is None:
            return {}
        states = {partition: assignment.state_value(partition) for partition in assignment.tps}
        return {
            Partition(partition.topic, partition.partition): state.position
            for partition, state in states.items()
            if state.has_valid_position
        }

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        if self._group is None:
            raise ValueError("this reader has no group to commit for")
        if not offsets:
            return
        wanted = {TopicPartition(partition.topic, partition.index): offset for partition, offset in offsets.items()}
        try:
            async with asyncio.timeout(self._bus.deadline_s):
                await self._consumer.commit(wanted)
        except TimeoutError as error:
            raise self._unavailable(f"commit for {self._group}", error) from error
        except IllegalStateError as error:
            if not self._subscribed:
                raise ValueError(f"not assigned to this reader: {error}") from error
            raise CommitRefused(f"group {self._group}: {error}") from error
        except CommitFailedError as error:
            raise CommitRefused(f"group {self._group}: {error}") from error
        except (KafkaTimeoutError, *DENIED) as error:
            raise self._unavailable(f"commit for {self._group}", error) from error

    async def close(self) -> None:
        await stop(self._consumer)
        if (fetcher := getattr(self._consumer, "_fetcher", None)) is not None:
            _let_go(fetcher)

    async def _out_of_range(self, offsets: Mapping[TopicPartition, int]) -> OffsetOutOfRange:
        ((partition, offset),) = offsets.items()
        kept = Partition(partition.topic, partition.partition)
        begin = (await self._bus.beginning_offsets(partition.topic))[kept]
        end = (await self._bus.end_offsets(partition.topic))[kept]
        return OffsetOutOfRange(
            f"{partition.topic}/{partition.partition}: offset {offset} is not kept, expected {begin} to {end}"
        )

    async def _first_commit(self, partition: TopicPartition) -> None:
        assert self._group is not None
        ours = Partition(partition.topic, partition.partition)
        # aiokafka also reports "none" where the coordinator only was not ready: ask again before believing it.
        offset = (await self._bus.committed(self._group, partition.topic)).get(ours)
        first = offset is None
        if offset is None:
            offset = (await self._bus.beginning_offsets(partition.topic))[ours]
        if partition in self._consumer.assignment():
            self._consumer.seek(partition, offset)
            if first:
                await self.commit({ours: offset})

    def _unavailable(self, what: str, last: Exception) -> BrokerUnavailable:
        return unavailable(self._bus.bootstrap_servers, what, self._bus.deadline_s, last)

    async def _still_there(self) -> None:
        """Raise BrokerUnavailable when neither records nor answers have come for the deadline, or a topic is denied."""
        # Of a topic that it may not see aiokafka knows no leader, and so fetches nothing and raises nothing.
        denied = {at.topic for at in self._consumer.assignment()} & self._consumer._client.cluster.unauthorized_topics
        if denied:
            raise self._unavailable("read", TopicAuthorizationFailedError(", ".join(sorted(denied))))
        fetching = self._consumer._fetcher.error_future
        if fetching.done():
            try:
                fetching.result()  # the task that fetches has died: say why instead of reading nothing for ever
            except DENIED as error:
                raise self._unavailable("read", error) from error
        now_s = time.monotonic()
        if now_s - max(self._heard_s, self._probed_s) < PROBE_AFTER_S:
            return
        self._probed_s = now_s
        try:
            async with asyncio.timeout(PROBE_AFTER_S):
                await self._consumer.topics()
            self._heard_s = time.monotonic()
        except (KafkaError, OSError) as error:
            if time.monotonic() - self._heard_s > self._bus.deadline_s:
                raise self._unavailable("read", error) from error


def _let_go(fetcher: Fetcher) -> None:
    for fetched in fetcher._records.values():
        ahead = getattr(fetched, "_partition_records", None)
        if ahead is not None:
            ahead._records_iterator = None
    fetcher._records.clear()


def _record(record: ConsumerRecord) -> Record:
    return Record(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key or b"",
        record.value or b"",
        tuple(record.headers),
    )
