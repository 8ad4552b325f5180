"""The log's time for a stream worker: what the broker stamps on the worker's reports, and between these the machine's clock.

Guarantee: a group that waits on an idle partition is closed when its time has come, however far off the machine's clock is.
"""

import logging
from collections.abc import Awaitable, Callable

from infra.log.bus import RecordPosition
from infra.log.memory import wall_ms

logger = logging.getLogger(__name__)

SLACK_MS = 5_000  # a clock that is off by less changes nothing


class LogTime:
    """wall_ms: the machine's clock."""

    def __init__(self, wall_ms: Callable[[], int] = wall_ms) -> None:
        self._wall_ms = wall_ms
        self._off_ms = 0

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the broker's clock."""
        return self._wall_ms() - self._off_ms

    async def hear(self, storing: Awaitable[RecordPosition]) -> None:
        """Store a record and look when the broker says that it was: between the two moments, where this clock is right."""
        before_ms = self._wall_ms()
        stored_ms = (await storing).timestamp_ms
        off_ms = max(0, before_ms - stored_ms) or min(0, self._wall_ms() - stored_ms)
        off_ms = off_ms if abs(off_ms) > SLACK_MS else 0
        if bool(off_ms) != bool(self._off_ms):
            logger.warning("clock_off seconds=%d: stages go by the broker's clock", off_ms // 1000)
        self._off_ms = off_ms
