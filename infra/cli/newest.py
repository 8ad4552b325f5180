"""The newest records of a topic over all its partitions, and reading on from there without a gap."""

from infra.log.bus import Partition, Reader
from infra.log.log import Log, LogMessage
from schemas.topics import Topic


async def newest(log: Log, topic: Topic, last: int) -> list[LogMessage]:
    """The `last` newest records, oldest first."""
    messages, reader = await newest_and_reader(log, topic, last)
    await reader.close()
    return messages


async def newest_and_reader(log: Log, topic: Topic, last: int) -> tuple[list[LogMessage], Reader]:
    """The `last` newest records, oldest first, and a reader that goes on behind them."""
    name = log.name(topic)
    beginnings = await log.bus.beginning_offsets(name)
    ends = await log.bus.end_offsets(name)
    reader = await log.assigned(topic, {one.index: max(beginnings[one], end - last) for one, end in ends.items()})
    found: list[LogMessage] = []
    try:
        # By position, not by count: compaction leaves holes.
        while any(reader.positions().get(partition, 0) < end for partition, end in ends.items()):
            found += await log.read(reader, timeout_s=1.0)
        # What came meanwhile is read once more, in its turn.
        for message in found:
            partition = Partition(name, message.partition)
            if message.offset >= ends[partition]:
                reader.seek(partition, ends[partition])
    except BaseException:
        await reader.close()
        raise
    found = [message for message in found if message.offset < ends[Partition(name, message.partition)]]
    found.sort(key=lambda message: (message.timestamp_ms, message.partition, message.offset))
    return found[-last:] if last else [], reader
