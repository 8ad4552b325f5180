"""How much is done at once: places for answers, and turns for what takes a processor for long.

Guarantees: never more places are taken than there are; each that is taken is given back once, also where a client goes away
before its first byte, a stream never begins, or a canary answers instead; of those who wait for a turn, each key gets one
after the other, however many a single key waits with; a turn lasts as long as its work, also where its caller has gone.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.gateway.errors import overloaded
from infra.local.http_server import disconnect_guard

T = TypeVar("T")


class TakenPlaces:
    """Some places that were taken."""

    def __init__(self, places: "Places", count: int) -> None:
        self._places = places
        self._count = count

    def release(self) -> None:
        """Give them back; again is fine."""
        self._places.give_back(self._count)
        self._count = 0


class Places:
    """As many as answers may be made at once. idle: set while none is taken."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_taken = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def take(self, count: int) -> TakenPlaces:
        """Take so many. Raises ApiError where there are not."""
        if self.num_taken + count > self._limit:
            raise overloaded(f"{self.num_taken} answers are being made, at most {self._limit}")
        self.num_taken += count
        self.idle.clear()
        return TakenPlaces(self, count)

    def give_back(self, count: int) -> None:
        """Of a place alone."""
        self.num_taken -= count
        if not self.num_taken:
            self.idle.set()


class Rota:
    """Turns for work that takes a processor for long. at_once: how much of it runs. each: may wait per key."""

    def __init__(self, at_once: int, each: int) -> None:
        self._free = at_once
        self._each = each
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait until it is this key's turn. Raises ApiError where too many of its requests wait."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(key)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, key: str) -> None:
        line = self._waiting.setdefault(key, deque())
        if len(line) >= self._each:
            raise overloaded(f"{len(line)} requests of this key wait for their turn, at most {self._each}")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._pass_on()  # it was handed a turn that it does not take
            elif mine in line:
                line.remove(mine)
            if not line and self._waiting.get(key) is line:
                del self._waiting[key]
            raise

    def _pass_on(self) -> None:
        """The next key's turn; it goes to the end of the line with what it still waits for."""
        while self._waiting:
            key, line = self._waiting.popitem(last=False)
            following = line.popleft()
            if line:
                self._waiting[key] = line
            if not following.done():
                following.set_result(None)
                return
        self._free += 1


async def to_its_end(work: Awaitable[T]) -> T:
    """The result of work that cannot be stopped (a thread's): a cancelled caller waits for its end all the same, and
    only then gives back what the work takes.
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
    """A streamed response that holds something, such as a place. release: gives it back; called once the response is over, even
    if it never began.
    """

    def __init__(self, pieces: AsyncIterator[bytes], release: Callable[[], Awaitable[None]]) -> None:
        super().__init__(pieces, media_type="text/event-stream")
        self._releases = [release]

    def then(self, release: Callable[[], Awaitable[None]]) -> None:
        """Give this back, too; the last one added is called first."""
        self._releases.append(release)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard = disconnect_guard(scope)
        try:
            if guard is None:
                await super().__call__(scope, receive, send)
                return
            with suppress(ClientDisconnect):
                await guard.run(self.stream_response(send), ClientDisconnect)
        finally:
            for release in reversed(self._releases):
                await release()
