"""Putting records back at the offsets and times they had, into topics that are new. For `headrace restore` alone.

Guarantee: a record lies at its offset, or OffsetOutOfRange says where it came to lie. Offsets of records that the
broker had removed are filled: ahead of the oldest record with empty records, which are deleted again; in a hole that compaction
left with the record behind the hole, once more, as at-least-once delivery may do.

During a restore a topic takes the times it is given and removes nothing; `settle` gives it the settings of `schemas.topics`.
"""

import asyncio
from collections.abc import Iterable, Mapping

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from infra.log.access import PLAINTEXT, Access, client_options
from infra.log.bus import Headers, Partition
from infra.log.retry import stop
from schemas.errors import BrokerUnavailable, ConfigError, OffsetOutOfRange
from schemas.topics import MAX_RECORD_BYTES

BATCH_BYTES = 512 * 1024
BATCH_RECORDS = 50_000
LOG_APPEND = 1  # of Kafka, a record's time is the broker's
OPEN = {
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": str(2**63 - 1),
    "cleanup.policy": "delete",
    "retention.ms": "-1",
}

Placed = tuple[int, bytes, bytes, Headers]  # time, key, value, headers


class PlacingConnection:
    """A connection that places records. bootstrap_servers, access: as of `KafkaBus`."""

    def __init__(self, bootstrap_servers: str, *, access: Access = PLAINTEXT) -> None:
        self._address = bootstrap_servers
        self._options = {"bootstrap_servers": bootstrap_servers, **client_options(access)}

    async def __aenter__(self) -> "PlacingConnection":
        # Idempotent: a batch that is sent again does not move those behind it.
        self._producer = AIOKafkaProducer(
            **self._options, enable_idempotence=True, max_batch_size=MAX_RECORD_BYTES, max_request_size=MAX_RECORD_BYTES
        )
        self._admin = AIOKafkaAdminClient(**self._options)
        try:
            await self._producer.start()
            await self._admin.start()
        except (KafkaError, OSError) as error:
            await self.__aexit__()
            raise BrokerUnavailable(f"no broker at {self._address}: {error!r}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._producer)
        await stop(self._admin)

    async def groups(self, prefix: str) -> list[str]:
        """Names of the consumer groups that begin so."""
        return sorted({name for name, *_ in await self._admin.list_consumer_groups() if name.startswith(prefix)})

    async def place(self, partition: Partition, at: int, records: Iterable[Placed]) -> int:
        """Append records, the first of them at offset `at`; the next offset. Raises OffsetOutOfRange, BrokerUnavailable."""
        batch, count, size = self._producer.create_batch(), 0, 0
        for time_ms, key, value, headers in records:
            length = len(key) + len(value)
            if count == BATCH_RECORDS or (count and size + length > BATCH_BYTES):
                at = await self._sent(partition, at, batch, count)
                batch, count, size = self._producer.create_batch(), 0, 0
            if batch.append(timestamp=time_ms, key=key, value=value, headers=list(headers)) is None:
                raise ConfigError(
                    f"{partition.topic}/{partition.index}: the record for offset {at + count} is too large"
                )
            count, size = count + 1, size + length
        return await self._sent(partition, at, batch, count) if count else at

    async def settle(self, topic: str, config: Mapping[str, str]) -> None:
        """Give a topic the settings it is to have. Raises ConfigError where the broker refuses."""
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, dict(config))
        for answer in await self._admin.alter_configs([resource]):
            for code, message, *_ in answer.resources:
                if code:
                    raise ConfigError(
                        f"topic {topic}: {self._address} refused its settings: error {code} {message or ''}"
                    )

    async def _sent(self, partition: Partition, at: int, batch: object, count: int) -> int:
        try:
            sending = await self._producer.send_batch(batch, partition.topic, partition=partition.index)
            stored = await asyncio.wait_for(sending, 60.0)
        except (KafkaError, TimeoutError) as error:
            raise BrokerUnavailable(f"{self._address}: {partition.topic}/{partition.index}: {error!r}") from error
        if stored.offset != at:
            raise OffsetOutOfRange(
                f"{partition.topic}/{partition.index}: a record came to lie at {stored.offset}, expected {at}: something "
                "else writes there; stop it, delete the app's topics and begin again"
            )
        if stored.timestamp_type == LOG_APPEND:
            raise ConfigError(
                f"topic {partition.topic} was made by something else and gives records its own time: delete the app's topics "
                "and begin again with an empty store"
            )
        return at + count
