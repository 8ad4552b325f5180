"""Limits of concurrent work: slots for answers, and turns for work that takes a processor for long.

Guarantees: requests never hold more slots than the limit, and one key never holds all. A request releases its slots once, also
if its client disconnects before the first byte, its stream never begins, or a canary answers. Waiting keys take turns, however
many requests of a single key wait. A turn lasts as long as its work, also if its caller is cancelled.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.gateway.errors import overloaded

LONG_AT_ONCE = 2  # long prompts that are tokenized
T = TypeVar("T")


class TakenSlots:
    """Slots that one request holds."""

    def __init__(self, limiter: "ConcurrencyLimiter", count: int, key: str) -> None:
        self._limiter = limiter
        self._count = count
        self._key = key

    def release(self) -> None:
        """Release the slots. Idempotent."""
        self._limiter.give_back(self._count, self._key)
        self._count = 0


class ConcurrencyLimiter:
    """Limits how many answers the engine makes at once. idle: set while it makes none.

    reserved: slots for keys that then hold at most this many, so that one key never holds all slots.
    """

    def __init__(self, limit: int, reserved: int = 0) -> None:
        self._limit = limit
        self._reserved = reserved
        self._held: Counter[str] = Counter()
        self.num_taken = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def take(self, count: int, key: str = "") -> TakenSlots:
        """Take `count` slots. Raises ApiError if fewer are free."""
        limit = self._limit if self._held[key] + count <= self._reserved else self._limit - self._reserved
        if self.num_taken + count > limit:
            raise overloaded(f"too many answers at once ({self.num_taken} of {limit} for this key); retry after 1 s")
        self.num_taken += count
        self._held[key] += count
        self.idle.clear()
        return TakenSlots(self, count, key)

    def give_back(self, count: int, key: str) -> None:
        self.num_taken -= count
        self._held[key] -= count
        if not self._held[key]:
            del self._held[key]
        if not self.num_taken:
            self.idle.set()


class FairQueue:
    """Grants turns for work that takes a processor for long. at_once: concurrent turns, one per key at most. each: requests
    of a key that may wait. Locks and semaphores wake waiters in order of arrival, so keys take turns.
    """

    def __init__(self, at_once: int, each: int = 16) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._each = each
        self._locks: dict[str, asyncio.Lock] = {}
        self._asking: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait until it is this key's turn. Raises ApiError where too many of its requests wait."""
        if self._asking[key] > self._each:
            raise overloaded(f"{self._each} requests of this key wait for their turn, expected no more")
        self._asking[key] += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()), self._free:
                yield
        finally:
            self._asking[key] -= 1
            if not self._asking[key]:
                del self._asking[key], self._locks[key]


async def to_its_end(work: Awaitable[T]) -> T:
    """Return the result of work that cannot be cancelled (a thread's): a cancelled caller waits until the work ends, and
    only then releases its resources.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        if not task.done():
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not warn of it


class ReleasingStream(StreamingResponse):
    """A streamed response. at_end: runs callbacks once the response is over, even if it never began."""

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        super().__init__(pieces, media_type="text/event-stream")
        self._pieces = pieces
        self.at_end = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.at_end, aclosing(self._pieces):
            await super().__call__(scope, receive, send)
