"""Repeated reads of several topics by one reader that stays open.

`Log.chunks` connects a reader for each call, which costs both sides milliseconds. Here one connection serves all calls that go
on where the one before ended. A call that begins elsewhere connects anew: a fetch that waits at the log's end would have to
time out before another begins. Delivery and order are those of `Log.chunks`: the caller says where to begin, so nothing is
skipped, however the call before it ended.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence

from infra.log.bus import Partition, Reader, Record
from infra.log.log import Log
from schemas.topics import Topic


class Follower:
    """Not safe for concurrent use: a call of `chunks` ends, or is closed, before the next begins."""

    def __init__(self, log: Log, topics: Sequence[Topic]) -> None:
        self._log = log
        self._topics = topics
        self._reader: Reader | None = None
        self._nexts: dict[Partition, int] = {}  # the offset that the next chunk begins with
        self._early: dict[Partition, list[Record]] = {}  # read, and behind the end that a caller named

    async def chunks(
        self, topic: Topic, starts: Mapping[int, int], stops: Mapping[int, int], *, max_records: int = 500
    ) -> AsyncGenerator[list[Record], None]:
        """Records from `starts` up to `stops`, both by partition, as they come and not decoded.

        Raises OffsetOutOfRange where retention took the first, BrokerUnavailable; the next call connects anew.
        """
        name = self._log.name(topic)
        ends = {Partition(name, index): stop for index, stop in stops.items() if starts[index] < stop}
        if not ends:
            return
        is_whole = False
        try:
            # Those without news too: retention may have passed where they wait.
            reader = await self._at({Partition(name, index): start for index, start in starts.items()})
            if early := self._taken({at: self._early.pop(at, []) for at in ends}, ends):
                yield early
            while any(self._nexts[at] < stop and reader.positions().get(at, 0) < stop for at, stop in ends.items()):
                found: dict[Partition, list[Record]] = {}
                for record in await reader.get_many(timeout_s=1.0, max_records=max_records, topic=name):
                    found.setdefault(Partition(name, record.partition), []).append(record)
                if kept := self._taken(found, ends):
                    yield kept
            self._nexts |= {
                at: max(self._nexts[at], stop) for at, stop in ends.items()
            }  # compaction may have taken the last
            is_whole = True
        finally:
            if not is_whole:
                await self.close()

    async def close(self) -> None:
        reader, self._reader = self._reader, None
        self._nexts.clear()
        self._early.clear()
        if reader is not None:
            await reader.close()

    async def _at(self, starts: Mapping[Partition, int]) -> Reader:
        """The reader, at `starts` in these partitions and where it was in the others."""
        if self._reader is not None and all(self._nexts[at] == start for at, start in starts.items()):
            return self._reader
        nexts = dict(self._nexts)
        await self.close()
        if not nexts:
            for topic in self._topics:
                nexts |= await self._log.bus.end_offsets(self._log.name(topic))
        nexts |= starts
        self._reader = await self._log.bus.assigned(nexts)
        self._nexts = nexts
        return self._reader

    def _taken(self, found: Mapping[Partition, Sequence[Record]], ends: Mapping[Partition, int]) -> list[Record]:
        """Records before the ends; the others are kept for a later call."""
        taken: list[Record] = []
        for at, records in found.items():
            end = ends.get(at, 0)
            kept = [record for record in records if record.offset < end]
            taken += kept
            if kept:
                self._nexts[at] = kept[-1].offset + 1
            if late := list(records[len(kept) :]):
                self._early.setdefault(at, []).extend(late)
        return taken
