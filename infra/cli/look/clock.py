"""What time it is in the log. Ages are by the broker's clock, and the one of this machine may be hours off.

A broker does not answer what time it is; only the timestamps of new records show it. Where the newest report is not of now
by this machine's clock, either that clock is off or no role reports, and the next report shows which.
"""

import asyncio
import math
import time
from collections.abc import Callable

from infra.log.follower import Follower
from infra.log.log import Log
from schemas.errors import OffsetOutOfRange
from schemas.topics import REPORTS

SLACK_S = 5.0  # more than a role lets pass between two reports; a clock that is off by less changes nothing
LISTEN_S = 5.0
POLL_S = 0.25


class LogClock:
    """The log's time, for one look or for many. Not safe for concurrent use.

    follower: over `reports`. silent_s: without a report for so long, no role is running. wall_s: this machine's clock.
    off_s: how far that is ahead of the log's, 0 where it is about right; without reports it is at least so far behind.
    """

    def __init__(
        self, log: Log, follower: Follower, *, silent_s: float, wall_s: Callable[[], float] = time.time
    ) -> None:
        self.off_s = 0.0
        self._log = log
        self._follower = follower
        self._silent_s = silent_s
        self._wall_s = wall_s
        self._glance: tuple[float, float] | None = None  # when it was, and the newest report then
        self._seen: tuple[dict[int, int], float | None] = {}, None  # up to where it read, and the newest there

    async def now_s(self) -> float:
        """Seconds since 1970 by the log's clock. Waits for the next report where the newest is not of now."""
        newest_s = await self._newest_s()
        if newest_s is not None and not self._is_of_now(newest_s):
            is_behind = newest_s > self._wall_s()
            next_s = await self._next_s(newest_s, self._silent_s if is_behind else LISTEN_S)
            if next_s is not None:
                self._arrived(next_s)
            else:
                self.off_s = self._wall_s() - newest_s - self._silent_s - SLACK_S if is_behind else 0.0
        return self._wall_s() - self.off_s

    async def glance_s(self, within_s: float) -> float:
        """`now_s` without waiting. A report that came since a call of at most `within_s` ago is of now."""
        newest_s, wall_s = await self._newest_s(), self._wall_s()
        if newest_s is not None:
            before_s, known_s = self._glance or (-math.inf, newest_s)
            if newest_s > known_s and wall_s - before_s <= within_s and not self._is_of_now(newest_s):
                self._arrived(newest_s)
            self._glance = wall_s, newest_s
        return wall_s - self.off_s

    def _arrived(self, at_s: float) -> None:
        off_s = self._wall_s() - at_s
        self.off_s = off_s if abs(off_s) > SLACK_S else 0.0

    def _is_of_now(self, newest_s: float) -> bool:
        return abs(self._wall_s() - self.off_s - newest_s) <= SLACK_S

    async def _next_s(self, newest_s: float, within_s: float) -> float | None:
        """When the first report after the newest was stored; None where none came in time."""
        for _ in range(round(within_s / POLL_S)):
            await asyncio.sleep(POLL_S)
            later_s = await self._newest_s()
            if later_s is not None and later_s > newest_s:
                return later_s
        return None

    async def _newest_s(self) -> float | None:
        """When the newest report was stored; None where there is none."""
        begins, ends = await self._log.bounds(REPORTS)
        seen, newest_s = self._seen
        if any(end < seen.get(index, 0) for index, end in ends.items()):  # the log began anew
            seen, newest_s = {}, None
        starts = {index: max(begins[index], seen.get(index, end - 1)) for index, end in ends.items()}
        found = [] if newest_s is None else [newest_s]
        try:
            async for records in self._follower.chunks(REPORTS, starts, ends):
                found += [one.timestamp_ms / 1000 for one in records]
        except OffsetOutOfRange:  # retention went on meanwhile
            return None
        self._seen = ends, max(found, default=None)
        return self._seen[1]


def clock_line(off_s: float) -> str:
    """What to say of a clock that is off; "" of one that is not.

    >>> clock_line(7260.0)
    "this machine's clock is 2 h 1 min ahead of the log's; what is said here is by the log's"
    """
    if not off_s:
        return ""
    minutes = round(abs(off_s) / 60)
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    span = f"{hours}{minutes % 60} min" if minutes else f"{abs(off_s):.0f} s"
    side = "ahead of" if off_s > 0 else "behind"
    return f"this machine's clock is {span} {side} the log's; what is said here is by the log's"
