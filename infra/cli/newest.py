"""The newest records of a topic over all its partitions, and where to read on without a gap."""

from infra.log.log import Log, LogMessage
from schemas.topics import Topic


async def newest(log: Log, topic: Topic, last: int) -> list[LogMessage]:
    """The `last` newest records, oldest first."""
    return (await newest_and_next(log, topic, last))[0]


async def newest_and_next(log: Log, topic: Topic, last: int) -> tuple[list[LogMessage], dict[int, int]]:
    """The `last` newest records, oldest first, and by partition the offset behind them."""
    begins, ends = await log.bounds(topic)
    # By position, not by count: compaction leaves holes.
    starts = {index: max(begins[index], end - last) for index, end in ends.items()}
    found = [message async for message in log.scan(topic, starts, ends)]
    found.sort(key=lambda message: (message.timestamp_ms, message.partition, message.offset))
    return found[-last:] if last else [], ends
