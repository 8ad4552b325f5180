"""An event loop in virtual time that plays many processes: time jumps to the next timer, nothing waits for anything real.

The same seed runs the same callbacks in the same order: it shuffles ready callbacks of different processes. Callbacks of a dead
process are dropped, those of a stalled process wait. Work for threads runs in this thread, a moment later.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
MAX_THREAD_S = 0.004
START_S = 1_000.0


class Stuck(Exception):
    """A deadlock: no callback is ready and no timer runs."""


class OneThread(asyncio.BaseEventLoop):
    """Refuses callbacks from other threads: virtual time would not wait for their work."""

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        assert self._thread_id in (None, threading.get_ident()), f"a callback from another thread: {callback}"  # type: ignore[attr-defined]
        return self.call_soon(callback, *args, context=context)


class VirtualTime(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self._spent_s = 0.0

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def spend(self, seconds: float) -> None:
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
        """Run the ready callbacks, in asyncio's order."""
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


class Killed(BaseException):
    """The process that runs this is dead; nothing in it may go on."""


class Process:
    """One life of one role. held: callbacks that became ready while it was stalled."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stalled = False
        self.held: list[asyncio.Handle] = []
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class Listening:
    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory
        self.is_open = True

    def close(self) -> None:
        """No new connections."""
        self.is_open = False

    async def wait_closed(self) -> None:
        """Nothing is left open."""


class VirtualLoop(VirtualTime):
    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._tasks: list[asyncio.Task[Any]] = []
        self.servers: dict[Process, Listening] = {}
        self.set_task_factory(self._make_task)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run it in this thread after a moment, in which others go on."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = function(*args)
            except Killed:
                return
            except BaseException as error:
                future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self.call_later(self._random.random() * MAX_THREAD_S, work)
        return future

    async def create_server(self, protocol_factory: Callable[[], Any], *args: Any, **kwargs: Any) -> Listening:  # type: ignore[override]
        """The running process listens; see `wire.py`."""
        process = PROCESS.get()
        assert process is not None
        self.servers[process] = Listening(protocol_factory)
        return self.servers[process]

    def resume(self, process: Process) -> None:
        """Let a stalled process go on."""
        process.is_stalled = False
        self._ready.extend(process.held)
        process.held = []

    def abandon(self) -> None:
        """Close unfinished tasks without a warning: their processes are gone."""
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(BaseException):  # a dead process's coroutine may raise anything when it is closed
                    task.get_coro().close()  # type: ignore[union-attr]
        self._tasks.clear()
        self._ready.clear()
        self._scheduled.clear()

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None) -> Any:
        task = asyncio.Task(coroutine, loop=loop, context=context)
        self._tasks.append(task)
        if len(self._tasks) > 4096:
            self._tasks = [task for task in self._tasks if not task.done()]
        return task

    def _run_ready(self) -> None:
        for handle in self._in_turn():
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None:
                handle._run()
            elif process.is_dead:
                continue
            elif process.is_stalled:
                process.held.append(handle)
            else:
                handle._run()

    def _in_turn(self) -> list[asyncio.Handle]:
        ready = list(self._ready)
        self._ready.clear()
        if len(ready) < 2:
            return ready
        lanes: dict[Process | None, list[asyncio.Handle]] = {}
        for handle in ready:
            lanes.setdefault(handle._context.get(PROCESS), []).append(handle)
        if len(lanes) == 1:
            return ready
        keys = [lane for lane, handles in enumerate(lanes.values()) for _ in handles]
        self._random.shuffle(keys)
        turns = [iter(handles) for handles in lanes.values()]
        return [next(turns[lane]) for lane in keys]

    def _asyncgen_finalizer_hook(self, generator: Any) -> None:
        """A generator left behind belongs to a dead process."""


class OneThreadLoop(OneThread, VirtualLoop):
    """A loop that refuses callbacks from other threads."""


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time, for code that waits for a log in memory and for no socket, thread or process."""
    with asyncio.Runner(loop_factory=lambda: OneThreadLoop(Random(0))) as runner:
        return runner.run(coroutine)
