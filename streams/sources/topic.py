"""Feedback from any Kafka topic with JSON values.

    read -> user's function -> publish (confirmed) -> commit

Delivery: at least once, shared by all workers as one consumer group; a topic starts at its beginning. Loss: offsets
that retention took before they were read are counted and warned of, then reading goes on at the oldest kept one.
"""

import logging

from infra.log.bus import CommitRefused, Partition, Reader
from infra.log.log import Log
from infra.observe.metrics import Metrics
from schemas.errors import ConfigError, OffsetOutOfRange
from streams.sources.event import Event, EventSource, publish_events
from streams.sources.otel import split_otlp

POLL_S = 1.0
logger = logging.getLogger(__name__)


async def run_topic(source: EventSource, log: Log, metrics: Metrics) -> None:
    """Read the source's topic until cancelled. Raises ConfigError where it does not exist, BrokerUnavailable."""
    try:
        await log.bus.partitions(source.topic)
    except ValueError as error:
        raise ConfigError(f'feedback "{source.name}": no topic "{source.topic}" in the broker') from error
    reader = await log.bus.subscribed([source.topic], group=log.group(f"feedback.{source.name}"))
    try:
        while True:
            await take_once(source, reader, log, metrics)
    finally:
        await reader.close()


async def take_once(source: EventSource, reader: Reader, log: Log, metrics: Metrics) -> int:
    """One round of the loop; returns how many events it took."""
    try:
        records = await reader.get_many(timeout_s=POLL_S)
    except OffsetOutOfRange:
        await _skip_trimmed(source, reader, log, metrics)
        return 0
    if not records:
        return 0
    events = [
        Event(value, record.topic, record.partition, record.offset)
        for record in records
        for value in (split_otlp(record.value) if source.otlp else (record.value,))
    ]
    await publish_events(source, events, log, metrics)
    nexts: dict[Partition, int] = {}
    for record in records:
        nexts[Partition(record.topic, record.partition)] = record.offset + 1
    try:
        await reader.commit(nexts)
    except CommitRefused as error:  # a rebalance came between: whoever has the partition now reads them again
        logger.info("commit_refused source=%s error=%s", source.name, error)
    return len(records)


async def _skip_trimmed(source: EventSource, reader: Reader, log: Log, metrics: Metrics) -> None:
    beginnings = await log.bus.beginning_offsets(source.topic)
    for partition, position in reader.positions().items():
        beginning = beginnings.get(partition, 0)
        if position < beginning:
            metrics.counter("feedback_trimmed", source=source.name).inc(beginning - position)
            logger.warning(
                "feedback_trimmed source=%s partition=%d lost=%d", source.name, partition.index, beginning - position
            )
            reader.seek(partition, beginning)
