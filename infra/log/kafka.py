"""The log on Kafka, through aiokafka.

Delivery: acks=all, not idempotent (one refused record would fail all that follow), so a retry may store a record twice
and ids absorb it. Order: per partition, for sends that wait for each other. The client waits for a broker that restarts,
with backoff; after `deadline_s` without it BrokerUnavailable names the address. A denied request is BrokerDenies at once.

Readers have explicit positions only (`auto_offset_reset=none`), so that trimmed offsets are loud.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from aiokafka import AIOKafkaClient, AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)

from infra.log.access import PLAINTEXT, Access, client_options, refusal
from infra.log.bus import CommitRefused, Headers, Partition, Reader, Record, RecordPosition, check_size, partition_for
from infra.log.memory import changed_count
from infra.log.retry import DENIED, begin, doubling, may_pass, retry, stop, unavailable
from schemas.errors import BrokerUnavailable, ConfigError, OffsetOutOfRange, RecordTooLarge
from schemas.topics import MAX_RECORD_BYTES

LINGER_MS = 5
BATCH_BYTES = 1024 * 1024
# More at once only make aiokafka wake each of them for every batch that leaves.
MAX_IN_FLIGHT = 1024
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _TryAgain(Exception):
    """An error that waiting mends, though aiokafka does not say so."""


async def answers(bootstrap_servers: str, *, timeout_s: float, access: Access = PLAINTEXT) -> bool:
    """True if a broker answers that takes records. Raises ConfigError if it refuses this client."""
    timeout_ms = int(timeout_s * 1000)
    client = AIOKafkaClient(
        bootstrap_servers=bootstrap_servers, request_timeout_ms=timeout_ms, **client_options(access)
    )
    try:
        async with asyncio.timeout(timeout_s):
            await client.bootstrap()
            return bool(client.cluster.brokers())
    except (KafkaError, OSError) as error:
        logger.debug("kafka.no_answer address=%s error=%r", bootstrap_servers, error)
        if refused := await refusal(bootstrap_servers, access, timeout_s):
            raise refused from error
        return False
    finally:
        await client.close()


class KafkaBus:
    """A Bus on a Kafka cluster: one producer, one admin connection, one connection per reader (two in a group).

    bootstrap_servers: `host:port`, comma-separated. deadline_s: how long a broker may be away before BrokerUnavailable.
    access: TLS and credentials; a broker that refuses them is a ConfigError at the start. Belongs to the event loop in
    which it was started.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        deadline_s: float = 60.0,
        client_id: str = "headrace",
        linger_ms: int = LINGER_MS,
        access: Access = PLAINTEXT,
    ) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.deadline_s = deadline_s
        self._linger_ms = linger_ms
        self._access = access
        self._options = {
            "bootstrap_servers": bootstrap_servers,
            "client_id": client_id,
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            "retry_backoff_ms": RETRY_BACKOFF_MS,
            **client_options(access),
        }
        self._producer: AIOKafkaProducer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._offsets: AIOKafkaConsumer | None = None
        self._opening = asyncio.Lock()
        self._counts: dict[str, int] = {}
        self._denied: set[str] = set()  # operations whose denial is in the log
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def start(self) -> None:
        await self._retried("connect", self._connect)

    async def close(self) -> None:
        for client in (self._producer, self._offsets, self._admin):
            if client is not None:
                await stop(client)
        self._producer = self._offsets = self._admin = None

    async def send(
        self, topic: str, value: bytes, *, key: bytes, headers: Headers = (), partition: int | None = None
    ) -> RecordPosition:
        check_size(topic, key, value, headers)
        count = self._counts.get(topic) or len(await self.partitions(topic))
        index = partition_for(key, count) if partition is None else partition
        if not 0 <= index < count:
            raise ValueError(f"topic {topic}: got partition {index}, expected 0 to {count - 1}")
        producer = self._producer
        assert producer is not None, "start() comes first"

        async def attempt() -> RecordPosition:
            async with self._in_flight:
                stored = await producer.send_and_wait(topic, value, key=key, partition=index, headers=list(headers))
            return RecordPosition(topic, index, stored.offset, stored.timestamp)

        try:
            return await self._retried(f"send to {topic}", attempt)
        except MessageSizeTooLargeError as error:
            raise RecordTooLarge(
                f"record for {topic}: {len(value)} bytes are more than the broker takes; expected max.message.bytes = "
                f"{MAX_RECORD_BYTES} on the topic"
            ) from error

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        for topic in {partition.topic for partition in starts}:
            count = len(await self.partitions(topic))
            if wrong := [p.index for p in starts if p.topic == topic and not 0 <= p.index < count]:
                raise ValueError(f"topic {topic}: got partitions {wrong}, expected 0 to {count - 1}")
        consumer = await self._consumer(group, fetch_bytes or MAX_RECORD_BYTES)
        # Nothing awaits between the two, so no fetch begins anywhere else.
        consumer.assign([_kafka(partition) for partition in starts])
        for partition, offset in starts.items():
            consumer.seek(_kafka(partition), offset)
        return KafkaReader(self, consumer, group=group, subscribed=False)

    async def subscribed(self, topics: Sequence[str], *, group: str) -> Reader:
        for topic in topics:
            await self.commit_beginnings(group, topic)
        consumer = await self._consumer(group)
        # Only now: a consumer that starts with topics waits for its first assignment, and a group waits for the members
        # that were killed, one session timeout after the other. The broker is not away meanwhile.
        consumer.subscribe(topics)
        return KafkaReader(self, consumer, group=group, subscribed=True)

    async def partitions(self, topic: str) -> tuple[int, ...]:
        if topic not in self._counts:
            self._counts = {name: len(leaders) for name, leaders in (await self._topics()).items()}
        if topic not in self._counts:
            raise ValueError(f"no topic {topic!r} at {self.bootstrap_servers}")
        return tuple(range(self._counts[topic]))

    async def beginning_offsets(self, topic: str) -> dict[Partition, int]:
        return await self._edges(topic, lambda consumer, partitions: consumer.beginning_offsets(partitions))

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        return await self._edges(topic, lambda consumer, partitions: consumer.end_offsets(partitions))

    async def offsets_at(self, topic: str, timestamp_ms: int) -> dict[Partition, int]:
        async def ask(consumer: AIOKafkaConsumer, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
            found = await consumer.offsets_for_times(dict.fromkeys(partitions, timestamp_ms))
            return {partition: at.offset for partition, at in found.items() if at is not None and at.offset >= 0}

        return await self.end_offsets(topic) | await self._edges(topic, ask)

    async def committed(self, group: str, topic: str) -> dict[Partition, int]:
        partitions = [TopicPartition(topic, index) for index in await self.partitions(topic)]

        async def attempt() -> dict[Partition, int]:
            found = await self._admin_client().list_consumer_group_offsets(group, partitions=partitions)
            if len(found) < len(partitions):
                # aiokafka drops the group's own error (loading, after a restart): no answer is not "nothing committed".
                raise _TryAgain(f"group {group}: the coordinator is not ready")
            return {_ours(partition): stored.offset for partition, stored in found.items() if stored.offset >= 0}

        return await self._retried(f"committed offsets of {group}", attempt)

    async def commit_beginnings(self, group: str, topic: str) -> None:
        async def attempt() -> None:
            committed = await self.committed(group, topic)
            beginnings = await self.beginning_offsets(topic)
            missing = {
                _kafka(partition): offset for partition, offset in beginnings.items() if partition not in committed
            }
            if missing:
                consumer = await self._consumer(group)
                try:
                    consumer.assign(list(missing))
                    await consumer.commit(missing)
                except CommitFailedError as error:
                    # The group has members, which committed beginnings before they joined: look again.
                    raise _TryAgain(f"group {group} has members") from error
                finally:
                    await stop(consumer)

        await self._retried(f"first commit of {group}", attempt)

    async def held(self, group: str, topic: str) -> set[int]:
        async def attempt() -> set[int]:
            (answer,) = await self._admin_client().describe_consumer_groups([group])
            ((code, _, _, _, _, members, *_),) = answer.groups
            if code:
                raise for_code(code)(group)
            given = [ConsumerProtocol.ASSIGNMENT.decode(assignment) for *_, assignment in members if assignment]
            return {at.partition for share in given for at in share.partitions() if at.topic == topic}

        return await self._retried(f"who holds {topic} in {group}", attempt)

    async def create_topic(self, topic: str, partitions: int, config: Mapping[str, str], replication: int = 0) -> bool:
        async def attempt() -> bool:
            if (leaders := (await self._topics()).get(topic)) is not None:
                if len(leaders) != partitions:
                    raise changed_count(topic, len(leaders), partitions)
                return False
            new = NewTopic(topic, partitions, replication or -1, None if replication else {}, dict(config))
            response = await self._admin_client().create_topics([new], timeout_ms=REQUEST_TIMEOUT_MS)
            for name, code, *message in response.topic_errors:
                error = for_code(code)
                # A broker that was not heard for a while is fenced until it is heard again.
                if code and (error.retriable or error is TopicAlreadyExistsError or "fenced" in str(message)):
                    raise _TryAgain(f"topic {name}: {error.__name__}")
                if code:
                    raise ConfigError(
                        f"topic {name} was refused by {self.bootstrap_servers}: {error.__name__} {message}"
                    )
            return True

        created = await self._retried(f"create topic {topic}", attempt)
        await self._retried(f"leaders of {topic}", lambda: self._led(topic))
        self._counts[topic] = partitions
        return created

    async def delete_records(self, partition: Partition, before: int) -> None:
        request = {_kafka(partition): RecordsToDelete(before)}
        try:
            await self._retried(
                f"delete records of {partition.topic}", lambda: self._admin_client().delete_records(request)
            )
        except OffsetOutOfRangeError as error:
            raise OffsetOutOfRange(f"{partition}: cannot delete below {before}, which is past its end") from error

    async def _connect(self) -> None:
        if self._admin is None:
            try:
                self._admin = await begin(AIOKafkaAdminClient(**self._options))
            except (KafkaError, OSError) as error:
                if refused := await refusal(self.bootstrap_servers, self._access):
                    raise refused from error
                raise
        if self._producer is None:
            self._producer = await begin(
                AIOKafkaProducer(
                    **self._options,
                    acks="all",
                    enable_idempotence=False,
                    linger_ms=self._linger_ms,
                    max_batch_size=BATCH_BYTES,
                    max_request_size=MAX_RECORD_BYTES,
                )
            )

    async def _consumer(self, group: str | None, fetch_bytes: int = MAX_RECORD_BYTES) -> AIOKafkaConsumer:
        """A consumer without a position, which commits only the offsets it is given. fetch_bytes: of a partition at once."""

        def make() -> AIOKafkaConsumer:
            return AIOKafkaConsumer(
                **self._options,
                group_id=group,
                auto_offset_reset="none",
                enable_auto_commit=False,
                metadata_max_age_ms=METADATA_AGE_MS,
                max_partition_fetch_bytes=fetch_bytes,
                session_timeout_ms=SESSION_TIMEOUT_MS,
                heartbeat_interval_ms=HEARTBEAT_MS,
                max_poll_interval_ms=MAX_POLL_INTERVAL_MS,
            )

        return await self._retried("start a reader", lambda: begin(make()))

    def _admin_client(self) -> AIOKafkaAdminClient:
        assert self._admin is not None, "start() comes first"
        return self._admin

    async def _topics(self) -> dict[str, list[int]]:
        """All topics: the leader of each partition. Asking for all never creates one."""
        described = await self._retried("list topics", lambda: self._admin_client().describe_topics())
        return {
            topic["topic"]: [partition["leader"] for partition in topic["partitions"]]
            for topic in described
            if topic["partitions"]
        }

    async def _led(self, topic: str) -> None:
        leaders = (await self._topics()).get(topic, [-1])
        if min(leaders) < 0:
            raise _TryAgain(f"topic {topic} has no leader yet")

    async def _edges(
        self, topic: str, ask: Callable[[AIOKafkaConsumer, list[TopicPartition]], Awaitable[dict[TopicPartition, int]]]
    ) -> dict[Partition, int]:
        async with self._opening:  # else the first calls at once would each open a consumer, and all but one leak
            if self._offsets is None:
                self._offsets = await self._consumer(None)
        consumer, partitions = self._offsets, [TopicPartition(topic, index) for index in await self.partitions(topic)]

        async def attempt() -> dict[TopicPartition, int]:
            # aiokafka finds a topic that is new to this consumer without a leader, and sleeps before it looks again.
            await consumer._client.add_topic(topic)
            return await ask(consumer, partitions)

        offsets = await self._retried(f"offsets of {topic}", attempt)
        return {_ours(partition): offset for partition, offset in offsets.items()}

    async def _retried(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        last: Exception | None = None

        def again(error: Exception) -> bool:
            nonlocal last
            passes = isinstance(error, KafkaError | OSError | _TryAgain) and may_pass(error)
            if passes and last is None:
                logger.info("kafka.retry what=%s at=%s error=%r", what, self.bootstrap_servers, error)
            last = error
            return passes

        try:
            async with asyncio.timeout(self.deadline_s):
                return await retry(attempt, doubling(FIRST_BACKOFF_S, MAX_BACKOFF_S), again)
        except TimeoutError:
            raise unavailable(self.bootstrap_servers, what, self.deadline_s, last) from last
        except DENIED as error:
            denied = unavailable(self.bootstrap_servers, what, self.deadline_s, error)
            if what not in self._denied:
                logger.warning("kafka.denied %s", denied)
            self._denied.add(what)
            raise denied from error


def _kafka(partition: Partition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.index)


def _ours(partition: TopicPartition) -> Partition:
    return Partition(partition.topic, partition.partition)


# aiokafka waits for a broker for ever and says nothing, so a silent reader asks whether it is there.
PROBE_AFTER_S = 5.0
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


class KafkaReader:
    """A Reader of KafkaBus. A broker's restart is a pause; an absence longer than the bus's deadline is an error."""

    def __init__(self, bus: "KafkaBus", consumer: AIOKafkaConsumer, *, group: str | None, subscribed: bool) -> None:
        self._bus = bus
        self._consumer = consumer
        self._group = group
        self._subscribed = subscribed
        self._heard_s = self._probed_s = self._next_s = time.monotonic()

    async def get_many(self, *, timeout_s: float, max_records: int = 500) -> list[Record]:
        if timeout_s > 0 and (early_s := self._next_s - time.monotonic()) > 0:
            await asyncio.sleep(min(early_s, timeout_s))
        try:
            # aiokafka waits out a rebalance however long it takes, hence a timeout of our own.
            async with asyncio.timeout(timeout_s + 1.0):
                found = await self._consumer.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
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

    def seek(self, partition: Partition, offset: int) -> None:
        try:
            self._consumer.seek(_kafka(partition), offset)
        except IllegalStateError as error:
            raise ValueError(f"not assigned to this reader: {partition}") from error

    def positions(self) -> dict[Partition, int]:
        # Consumer.position() waits for a position that is not known yet; the state behind it does not.
        subscription = self._consumer._subscription.subscription
        assignment = subscription.assignment if subscription is not None else None
        if assignment is None:
            return {}
        states = {partition: assignment.state_value(partition) for partition in assignment.tps}
        return {_ours(partition): state.position for partition, state in states.items() if state.has_valid_position}

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        if self._group is None:
            raise ValueError("this reader has no group to commit for")
        if not offsets:
            return
        wanted = {_kafka(partition): offset for partition, offset in offsets.items()}
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

    async def _out_of_range(self, offsets: Mapping[TopicPartition, int]) -> OffsetOutOfRange:
        ((partition, offset),) = offsets.items()
        kept = _ours(partition)
        begin = (await self._bus.beginning_offsets(partition.topic))[kept]
        end = (await self._bus.end_offsets(partition.topic))[kept]
        return OffsetOutOfRange(
            f"{partition.topic}/{partition.partition}: offset {offset} is not kept, expected {begin} to {end}"
        )

    async def _first_commit(self, partition: TopicPartition) -> None:
        assert self._group is not None
        ours = _ours(partition)
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
        # aiokafka knows no leader of a topic that it may not see, so it fetches nothing and raises nothing.
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
