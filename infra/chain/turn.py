"""Whose turn it is: records of one partition are in the chain at once, but what remembers must see them in log order.

turn 7 ──> turn 8 ──> turn 9      `wait` ends when all before have ended, `end` may come in any order
"""

import asyncio


class ChainTurn:
    """One record's place behind that of the record before it. Not safe across event loops."""

    def __init__(self, before: "ChainTurn | None" = None) -> None:
        self._before = before
        self._after: ChainTurn | None = None
        self._ended = False
        self._over = asyncio.Event()
        self.limit: asyncio.Timeout | None = None  # of handling the record: waiting for others does not count
        if before is not None:
            before._after = self

    @property
    def is_over(self) -> bool:
        """This record and all before it have ended."""
        return self._over.is_set()

    async def wait(self) -> None:
        """Until every record before this one has passed all that remembers, or left the chain."""
        if self._before is None or self._before.is_over:
            return
        before, now = self._before, asyncio.get_running_loop().time
        expires = self.limit.when() if self.limit is not None else None
        if self.limit is None or expires is None:
            await before._over.wait()
            return
        left_s = expires - now()
        self.limit.reschedule(None)
        await before._over.wait()
        self.limit.reschedule(now() + left_s)

    def end(self) -> None:
        """This record meets nothing any more that remembers; a second call changes nothing."""
        self._ended = True
        turn: ChainTurn | None = self
        while turn is not None and turn._ended and (turn._before is None or turn._before.is_over):
            turn._over.set()
            turn._before = None  # what is over is not kept
            turn = turn._after
