"""The processes that reported within the last hour, found by time: of the many reports a few of the hour are read.

The hour is cut into cells, and a running process reports in each. One cell in MARK is read, and for a process that is gone
its last report is found by bisection. So the last report of each process is known, and the time of its first one to MARK
cells. Of records only the last ones of the processes that are gone are decoded.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing

import msgspec

from infra.cli.look.expected import SEEN_S, Heard
from infra.log.bus import Record
from infra.log.follower import Follower
from infra.log.log import Log, LogMessage
from schemas import Progress
from schemas.topics import REPORTS

CELL_MS = 15_000
MARK = 20  # cells: five minutes


class LastHour:
    """The last hour of `reports`, for one look or for many: a cell is read once.

    follower: over `reports`; without one each look connects a reader. Bound: the number of cells in an hour, and one record
    of each process that spoke in it. Not safe for concurrent use.
    """

    def __init__(self, log: Log, follower: Follower | None = None) -> None:
        self._log = log
        self._chunks = log.chunks if follower is None else follower.chunks
        self._read: set[int] = set()
        self._seen: dict[str, _Sighting] = {}

    async def heard(self, newest: Sequence[LogMessage]) -> list[Heard]:
        """Every instance of the last hour. newest: the newest reports without a gap, oldest first; what was before them is
        looked for.
        """
        spoken: dict[str, Heard] = {}
        for message in newest:
            report, at_s = message.value, message.timestamp_ms / 1000
            if isinstance(report, Progress):
                before = spoken.get(report.instance)
                spoken[report.instance] = _heard(report, at_s if before is None else before.first_s, at_s)
        own = [one for one in newest if one.record.topic == self._log.name(REPORTS)]
        if own:
            await self._look_before(own[0].timestamp_ms, own[-1].timestamp_ms, spoken)
        found = []
        for name, sighting in self._seen.items():
            if name in spoken:
                first_s = min(spoken[name].first_s, sighting.first_ms / 1000)
                spoken[name] = msgspec.structs.replace(spoken[name], first_s=first_s)
                continue
            message = await self._log.decoded(sighting.last)
            if isinstance(message.value, Progress):
                found.append(_heard(message.value, sighting.first_ms / 1000, message.timestamp_ms / 1000))
        return [*found, *spoken.values()]

    async def _look_before(self, known_ms: int, now_ms: int, spoken: Mapping[str, object]) -> None:
        """Read what must be read of the hour up to `known_ms`, from where on everything is known."""
        begin, end = (now_ms - int(SEEN_S * 1000)) // CELL_MS, known_ms // CELL_MS
        self._read = {cell for cell in self._read if cell >= begin}
        self._seen = {name: one for name, one in self._seen.items() if one.cell >= begin}
        for cell in range(begin, end + 1):
            if cell % MARK == 0 and cell not in self._read:
                await self._look(cell)
        for name in [name for name in self._seen if name not in spoken]:
            while True:
                last = self._seen[name].cell
                without = min((cell for cell in self._read if cell > last), default=end + 1)
                if without - last < 2:
                    break
                await self._look((last + without) // 2)
        self._read.discard(now_ms // CELL_MS)  # this cell still grows

    async def _look(self, cell: int) -> None:
        starts, stops = [await self._offsets_at(at * CELL_MS) for at in (cell, cell + 1)]
        async with aclosing(self._chunks(REPORTS, starts, stops)) as chunks:
            async for records in chunks:
                for record in records:
                    self._note(record, cell)
        self._read.add(cell)

    def _note(self, record: Record, cell: int) -> None:
        name = record.key.decode(errors="replace")
        seen = self._seen.get(name)
        if seen is None:
            self._seen[name] = _Sighting(record.timestamp_ms, cell, record)
            return
        last = (
            record if (record.timestamp_ms, record.offset) > (seen.last.timestamp_ms, seen.last.offset) else seen.last
        )
        self._seen[name] = _Sighting(min(seen.first_ms, record.timestamp_ms), max(seen.cell, cell), last)

    async def _offsets_at(self, at_ms: int) -> dict[int, int]:
        found = await self._log.bus.offsets_at(self._log.name(REPORTS), at_ms)
        return {partition.index: offset for partition, offset in found.items()}


class _Sighting(msgspec.Struct, frozen=True):
    """first_ms: time of its first report. cell: the newest with a report. last: its last report there."""

    first_ms: int
    cell: int
    last: Record


def _heard(report: Progress, first_s: float, last_s: float) -> Heard:
    return Heard(report.role, report.instance, report.state, first_s, last_s, report.reason)
