"""Following a topic: every record once, in the order of its partition, until cancelled.

Loss: what does not decode is counted and logged, never passed over in silence; a record of a newer major stops the
role.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Literal

from infra.log.log import Log, LogMessage
from infra.observe.metrics import Metrics
from schemas.topics import Topic

_log = logging.getLogger(__name__)

_POLL_S = 1.0


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
            for message in await log.read(reader, timeout_s=_POLL_S if caught_up.is_set() else 0.05):
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
    _log.warning("bad_frame at=%s error=%s", where, message.error)
    return False
