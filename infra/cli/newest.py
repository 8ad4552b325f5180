"""The newest records of a topic over all its partitions, and where to read on without a gap."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

import msgspec

from infra.log.log import Log, LogMessage
from schemas import Progress
from schemas.topics import PROGRESS, REPORTS, Topic

# A topic, how many of its newest records, and their kind ("" for any) → those of the kind, oldest first.
Newest = Callable[[Topic, int, str], Awaitable[list[LogMessage]]]


async def newest(log: Log, topic: Topic, last: int, kind: str = "") -> list[LogMessage]:
    """The `last` newest records, oldest first; kind: those of one kind among them, the others are not decoded."""
    return (await newest_and_next(log, topic, last, kind))[0]


async def newest_reports(look: Newest, last: int) -> list[LogMessage]:
    """The `last` newest of `reports`, and the reports among the `last` newest of `progress`, where older writers put them."""
    old = [one for one in await look(PROGRESS, last, "progress") if isinstance(one.value, Progress)]
    return sorted([*old, *await look(REPORTS, last, "")], key=lambda message: message.timestamp_ms)


async def newest_and_next(log: Log, topic: Topic, last: int, kind: str = "") -> tuple[list[LogMessage], dict[int, int]]:
    """The `last` newest records, oldest first (see `newest`), and by partition the offset behind them."""
    begins, ends = await log.bounds(topic)
    # By position, not by count: compaction leaves holes.
    starts = {index: max(begins[index], end - last) for index, end in ends.items()}
    found = [message async for message in _of_kind(log, topic, starts, ends, kind)]
    return _last(found, last), ends


class HeldNewest:
    """`newest` for a caller that asks again and again: what was read is held, and a call reads what has come since.

    Bound: `last` records of each topic and kind that is asked for.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._held: dict[tuple[str, str], _Held] = {}

    async def newest(self, topic: Topic, last: int, kind: str = "") -> list[LogMessage]:
        """See `newest`. Not safe for concurrent use."""
        held = self._held.pop((topic.name, kind), None) or _Held()
        begins, ends = await self._log.bounds(topic)
        if any(end < held.nexts.get(index, 0) for index, end in ends.items()):  # the log began anew
            held = _Held()
        first = {index: max(begins[index], end - last) for index, end in ends.items()}
        starts = {index: max(at, held.nexts.get(index, 0)) for index, at in first.items()}
        found = [one for one in held.messages if one.offset >= first.get(one.partition, 0)]
        async with aclosing(_of_kind(self._log, topic, starts, ends, kind)) as messages:
            found += [message async for message in messages]
        found = _last(found, last)
        self._held[topic.name, kind] = _Held(found, ends)
        return found


class _Held(msgspec.Struct, frozen=True):
    messages: list[LogMessage] = []
    nexts: dict[int, int] = {}


def _last(found: list[LogMessage], last: int) -> list[LogMessage]:
    found.sort(key=lambda message: (message.timestamp_ms, message.partition, message.offset))
    return found[-last:] if last else []


async def _of_kind(
    log: Log, topic: Topic, starts: Mapping[int, int], stops: Mapping[int, int], kind: str
) -> AsyncGenerator[LogMessage, None]:
    wanted = ("kind", kind.encode())
    async with aclosing(log.chunks(topic, starts, stops)) as chunks:
        async for records in chunks:
            for record in records:
                if not kind or wanted in record.headers:
                    yield await log.decoded(record)
