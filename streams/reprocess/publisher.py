"""Another app's topics as the place where a counterfactual is written: `verified`, or `buffer` and `progress`.

Guarantee: it is never the app that is read, and what is written to was empty; records of a partition keep the order they are
given in. Each carries its log time in a header, since the broker stamps them all with today's.
"""

import asyncio
from collections.abc import Sequence

from infra.log.log import Log
from schemas import Block, Control
from schemas.errors import ConfigError
from schemas.topics import Topic

TIME_HEADER = "log_time_ms"
MAX_IN_FLIGHT = 256


class ReprocessPublisher:
    """Sends in order, many at once. Not safe for concurrent use."""

    def __init__(self, target: Log) -> None:
        self.target = target
        self.count = 0
        self._sending: set[asyncio.Task[object]] = set()

    async def send(self, topic: Topic, record: Block | Control, time_ms: int) -> None:
        """Send a record; what the broker refuses is raised here or by `finish`."""
        while len(self._sending) >= MAX_IN_FLIGHT:
            done, _ = await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        # The first step of a send puts it in its batch, so tasks that start in order are stored in order.
        sending: asyncio.Task[object] = asyncio.create_task(self._send(topic, record, time_ms))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        self.count += 1

    async def finish(self) -> None:
        """Until everything is confirmed."""
        await asyncio.gather(*self._sending)

    async def _send(self, topic: Topic, record: Block | Control, time_ms: int) -> None:
        await self.target.publish(topic, record, headers=((TIME_HEADER, str(time_ms).encode()),))


async def check_target(source: Log, target: Log, topics: Sequence[Topic], *, partitions: int, keep_ms: int) -> None:
    """Create the target's topics where they are missing; raises ConfigError for an app or topic that must not be written to."""
    if source.app == target.app:
        raise ConfigError(f"--publish: got {target.app!r}, the app that is read; expected another name")
    await target.create_topics(partitions=partitions, keep_ms=keep_ms)
    for topic in topics:
        ends = await target.bus.end_offsets(target.name(topic))
        if count := sum(ends.values()):
            raise ConfigError(
                f"--publish: {target.name(topic)} is not empty ({count} records were written to it); choose another app"
            )
