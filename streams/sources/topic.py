"""Feedback from any Kafka topic with JSON values.

    wait for the topic -> read -> user's function -> publish (confirmed) -> commit

Delivery: at least once, shared by all workers as one consumer group; a topic starts at its beginning. Loss: offsets that
retention took before they were read are counted and warned of, then reading continues at the oldest kept one. The reader
begins a recreated topic at its beginning. A topic that is not there is an alarm, and waited for; nothing else waits with it.
"""

import asyncio
import logging

from infra.log.bus import CommitRefused, Partition, Reader
from infra.log.log import Log
from infra.log.retry import doubling
from infra.observe.metrics import Metrics
from schemas.errors import OffsetOutOfRange
from streams.sources.event import Event, EventSource, publish_events
from streams.sources.otel import split_otlp

POLL_S = 1.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0  # between two looks for a topic that is not there
logger = logging.getLogger(__name__)


async def run_topic(source: EventSource, log: Log, metrics: Metrics) -> None:
    """Read the source's topic until cancelled, from when it is there on. Raises BrokerUnavailable."""
    await until_there(source, log, metrics)
    reader = await log.bus.subscribed([source.topic], group=log.group(f"feedback.{source.name}"))
    try:
        while True:
            await take_once(source, reader, log, metrics)
    finally:
        await reader.close()


async def until_there(source: EventSource, log: Log, metrics: Metrics) -> None:
    """Wait until the broker has the source's topic; meanwhile the gauge `feedback_topic_missing` is 1."""
    missing = metrics.gauge("feedback_topic_missing", source=source.name, topic=source.topic)
    for pause_s in doubling(FIRST_WAIT_S, LONGEST_WAIT_S):
        try:
            await log.bus.partitions(source.topic)
        except ValueError:
            if pause_s == FIRST_WAIT_S:
                missing.set(1)
                logger.warning(
                    "feedback_topic_missing source=%s topic=%s: it is not in the broker, or may not be seen, and is waited "
                    "for; headrace check --create makes it", source.name, source.topic,
                )  # fmt: skip
            await asyncio.sleep(pause_s)
        else:
            break
    missing.set(0)
    logger.info("feedback_topic_there source=%s topic=%s", source.name, source.topic)


async def take_once(source: EventSource, reader: Reader, log: Log, metrics: Metrics) -> int:
    try:
        records = await reader.get_many(timeout_s=POLL_S)
    except OffsetOutOfRange:
        await _find_records(source, reader, log, metrics)
        return 0
    if not records:
        return 0
    events = [
        Event(value, record.topic, record.partition, record.offset)
        for record in records
        for value in (split_otlp(record.value) if source.otlp else (record.value,))
    ]
    await publish_events(source, events, log, metrics)
    nexts = {Partition(record.topic, record.partition): record.offset + 1 for record in records}
    try:
        await reader.commit(nexts)
    except CommitRefused as error:  # a rebalance came between: the partition's new reader reads them again
        logger.info("commit_refused source=%s error=%s", source.name, error)
    return len(records)


async def _find_records(source: EventSource, reader: Reader, log: Log, metrics: Metrics) -> None:
    """Seek to the oldest kept record of each partition whose position was trimmed, or belongs to a deleted topic."""
    beginnings = await log.bus.beginning_offsets(source.topic)
    ends = await log.bus.end_offsets(source.topic)
    for partition, position in reader.positions().items():
        beginning = beginnings.get(partition, 0)
        if position < beginning:
            metrics.counter("feedback_trimmed", source=source.name).inc(beginning - position)
            logger.warning(
                "feedback_trimmed source=%s partition=%d lost=%d", source.name, partition.index, beginning - position
            )
        elif position > ends.get(partition, position):
            logger.warning("feedback_topic_made_anew source=%s partition=%d", source.name, partition.index)
        else:
            continue
        reader.seek(partition, beginning)
