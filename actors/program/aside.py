"""An event loop beside the explorer's, in a thread of its own, where the functions of programs run.

Guarantees: what a function computes, a client that it makes for instance, holds up no loop but this one, where the requests of
other episodes, reloads and the log's heartbeat would wait for it; a function that is cancelled is cancelled there; whatever it
raises is raised here as an Exception.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any


class Aside:
    """Begins with the first function, and lasts as long as the process: a program may keep its clients from one to the next."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """What `work` returns there."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="programs", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_guarded(work), self._loop))


async def _guarded(work: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await work()
    except asyncio.CancelledError as error:
        own = asyncio.current_task()
        if own is not None and own.cancelling():
            raise
        raise RuntimeError("it was cancelled by itself") from error
    except (
        SystemExit,
        KeyboardInterrupt,
    ) as error:  # they would end the loop, and with it all functions that run in it
        raise RuntimeError(repr(error)) from error
