"""An event loop in virtual time: it jumps to the next timer, and nothing waits for real time.

Work for threads runs in the thread of the loop, at once. Its result arrives after the virtual seconds that it reports
(`spend`). So processes that sample and learn for hours are simulated in seconds, with the same result each time.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any

START_S = 1_000.0


class Stuck(Exception):
    """A deadlock: no callback is ready and no timer runs."""


class OneThread(asyncio.BaseEventLoop):
    """Refuses callbacks from other threads: virtual time would not wait for their work."""

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        """As `call_soon`, from the thread of the loop only."""
        assert self._thread_id in (None, threading.get_ident()), f"a callback from another thread: {callback}"  # type: ignore[attr-defined]
        return self.call_soon(callback, *args, context=context)


class VirtualTime(asyncio.BaseEventLoop):
    """See the module. For code that waits for a log in memory, and for no socket, thread or process."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self._spent_s = 0.0

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Called by work for a thread, while it runs: it takes this long."""
        self._spent_s += seconds

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run it now; its result arrives after the virtual time that it spent."""
        future = self.create_future()
        self._spent_s = 0.0
        try:
            give, found = future.set_result, function(*args)
        except Exception as error:
            give, found = future.set_exception, error
        self.call_later(self._spent_s, lambda: future.done() or give(found))
        return future

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
        """There is no selector to wake up."""


class OneThreadTime(OneThread, VirtualTime):
    """Virtual time for code that must not start threads."""
