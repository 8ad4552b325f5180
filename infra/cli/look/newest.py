"""The newest records of a topic over all its partitions, and where to read on without a gap."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from infra.log.bus import Record
from infra.log.follower import Follower
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
    return await _decoded(log, _last(await _of_kind(log.chunks, topic, starts, ends, kind), last)), ends


class HeldNewest:
    """`newest` for a caller that asks again and again: what was read is held, and a call reads what has come since.

    follower: over the topics that are asked for; without one each call connects a reader. Bound: `last` records of each
    topic and kind that is asked for.
    """

    def __init__(self, log: Log, follower: Follower | None = None) -> None:
        self._log = log
        self._read = log.chunks if follower is None else follower.chunks
        self._held: dict[tuple[str, str], _Held] = {}

    async def newest(self, topic: Topic, last: int, kind: str = "") -> list[LogMessage]:
        """See `newest`. Not safe for concurrent use."""
        held = self._held.pop((topic.name, kind), None) or _Held()
        begins, ends = await self._log.bounds(topic)
        if any(end < held.nexts.get(index, 0) for index, end in ends.items()):  # the log began anew
            held = _Held()
        first = {index: max(begins[index], end - last) for index, end in ends.items()}
        starts = {index: max(at, held.nexts.get(index, 0)) for index, at in first.items()}
        kept = [one for one in held.messages if one.offset >= first.get(one.partition, 0)]
        found = await _decoded(self._log, _last([*kept, *await _of_kind(self._read, topic, starts, ends, kind)], last))
        self._held[topic.name, kind] = _Held(found, ends)
        return found


class _Held(msgspec.Struct, frozen=True):
    messages: list[LogMessage] = []
    nexts: dict[int, int] = {}


def _last(found: Sequence[Record | LogMessage], last: int) -> list[Record | LogMessage]:
    ordered = sorted(found, key=lambda one: (one.timestamp_ms, one.partition, one.offset))
    return ordered[-last:] if last else []


async def _decoded(log: Log, found: Sequence[Record | LogMessage]) -> list[LogMessage]:
    """Only what is shown is decoded: of many partitions most of what was read is not among the newest."""
    return [await log.decoded(one) if isinstance(one, Record) else one for one in found]


async def _of_kind(
    read: Callable[..., AsyncGenerator[list[Record], None]],
    topic: Topic,
    starts: Mapping[int, int],
    stops: Mapping[int, int],
    kind: str,
) -> list[Record]:
    wanted = ("kind", kind.encode())
    async with aclosing(read(topic, starts, stops)) as chunks:
        return [one async for records in chunks for one in records if not kind or wanted in one.headers]
