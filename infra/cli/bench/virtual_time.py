"""An event loop in virtual time: it jumps to the next timer, and nothing waits for anything real.

Work for threads is done in this one, at once, and its result is there as many virtual seconds later as it says that it took
(`spend`): so a loop of processes that sample and learn for hours is played in seconds, and plays the same each time.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any

START_S = 1_000.0


class Stuck(Exception):
    """Nothing is ready and no timer runs: everybody waits for somebody."""


class VirtualTime(asyncio.BaseEventLoop):
    """See the module. For what waits for a log in memory and for no socket, thread or process."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self._spent_s = 0.0

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Work for a thread says, while it is done, that it takes so long."""
        self._spent_s += seconds

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Do it now; its result comes once what it spent has passed."""
        future = self.create_future()
        self._spent_s = 0.0
        try:
            give, found = future.set_result, function(*args)
        except Exception as error:
            give, found = future.set_exception, error
        self.call_later(self._spent_s, lambda: future.done() or give(found))
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        """Time would not wait for the work of another thread."""
        assert self._thread_id in (None, threading.get_ident()), f"a thread of its own in virtual time: {callback}"  # type: ignore[attr-defined]
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not self._ready and not self._stopping:  # type: ignore[attr-defined]
            if not scheduled:
                raise Stuck("nothing is ready and no timer runs")
            self.now_s = max(self.now_s, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self.now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle._cancelled:
                self._ready.append(handle)  # type: ignore[attr-defined]
        self._run_ready()

    def _run_ready(self) -> None:
        """Call back what is ready, in asyncio's order."""
        ready = list(self._ready)  # type: ignore[attr-defined]
        self._ready.clear()  # type: ignore[attr-defined]
        for handle in ready:
            if not handle._cancelled:
                handle._run()

    def _process_events(self, event_list: Any) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""
