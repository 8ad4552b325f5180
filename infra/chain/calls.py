"""Calls of code that may raise or hang: every call ends as a value or as a Failure, within its timeout.

    inline   here and now, for functions that promised to be quick
    thread   one daemon thread per call of `in_thread` works through the arguments; an argument that hangs is given up, the rest
             continues in a new thread
    async    all arguments at once, each under its own timeout

A thread cannot be killed: one that hangs lives until its function returns or the process ends. After MAX_HUNG calls in a
row that hang, calls fail at once, but for one try every PAUSE_S: as soon as one returns, all are called again. With
MAX_THREADS that still hang a step is called no more until its role is started anew. One long C call that holds the
interpreter lock stops this process whatever the thread: such work belongs in a child process, as in `streams.scores.child`.
"""

import asyncio
import logging
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

MAX_HUNG = 8
MAX_THREADS = 64
PAUSE_S = 30.0
MAX_LOGGED = 64
# What these say is about code; what others say may quote a user's text, which belongs into no log.
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, TypeError)
MAX_DETAIL_CHARS = 500
Extras = Mapping[str, Any]


class Failure(msgspec.Struct, frozen=True):
    """A call without a value. kind: "failed" or "timed out" (by us, or by its own TimeoutError); detail: in words."""

    kind: str
    detail: str


class Trouble:
    """Faults of one function: threads that hang, and errors that were logged. name: of the step, for the log."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.hung: list[threading.Thread] = []
        self._in_a_row = 0
        self._try_at_s = 0.0
        self._logged: set[str] = set()

    def refuses(self) -> str:
        """Why the function is not called now, "" where it is."""
        self.hung = [thread for thread in self.hung if thread.is_alive()]
        if len(self.hung) >= MAX_THREADS:
            return f"not called: {len(self.hung)} earlier calls still hang; restart this role"
        if self._in_a_row >= MAX_HUNG and self.hung and time.monotonic() < self._try_at_s:
            return f"not called: the last {self._in_a_row} calls hung; tried again every {PAUSE_S:g} s"
        return ""

    def returned(self) -> None:
        self._in_a_row = 0

    def hangs(self, thread: threading.Thread) -> None:
        self.hung.append(thread)
        self._in_a_row += 1
        self._try_at_s = time.monotonic() + PAUSE_S
        if self._in_a_row in (1, MAX_HUNG):
            logger.warning("step_hangs step=%s in_a_row=%d threads=%d", self.name, self._in_a_row, len(self.hung))

    def tell(self, error: BaseException) -> None:
        """Log an error with file, line and stack: the first of its type and place, MAX_LOGGED in all."""
        stack = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        at = f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}" if stack else "?"
        kind = f"{type(error).__name__} {at}"
        if kind in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(kind)
        message = ascii(str(error)[:MAX_DETAIL_CHARS]) if isinstance(error, _OF_CODE) else "(not logged)"
        lines = "".join(traceback.format_list(stack)).rstrip()
        logger.warning("step_failed step=%s at=%s error=%s %s\n%s", self.name, at, type(error).__name__, message, lines)


def describe_error(error: BaseException) -> str:
    """Type and message of an error, cut to what a metric of the day after still wants to read."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]
    except BaseException:  # its own __str__ raises
        return type(error).__name__


def inline(
    function: Callable[..., object], arguments: Sequence[object], extras: Extras, trouble: Trouble
) -> list[object]:
    """Call in this thread. Whatever is raised counts as a failure, SystemExit and KeyboardInterrupt too: a plugin cannot
    end a worker. (Ctrl-C raises nothing here: the loop that runs a role takes it.)
    """
    results: list[object] = []
    for argument in arguments:
        try:
            results.append(function(argument, **extras))
        except BaseException as error:
            results.append(_failure(error, trouble))
    return results


async def in_thread(
    function: Callable[..., object],
    arguments: Sequence[object],
    extras: Extras,
    timeout_s: float,
    trouble: Trouble,
) -> list[object]:
    """Call in a thread, one argument after the other; `trouble` holds the threads that were given up."""
    results: list[object] = []
    while len(results) < len(arguments):
        if why := trouble.refuses():
            results.extend([Failure("timed out", why)] * (len(arguments) - len(results)))
            break
        results.extend(await _one_thread(function, arguments[len(results) :], extras, timeout_s, trouble))
    return results


async def as_tasks(
    function: Callable[..., Awaitable[object]],
    arguments: Sequence[object],
    extras: Extras,
    timeout_s: float,
    trouble: Trouble,
) -> list[object]:
    """Await all calls at once, each under its own timeout."""
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(_one_await(function, argument, extras, timeout_s, trouble)) for argument in arguments
        ]
    return [task.result() for task in running]


async def _one_await(
    function: Callable[..., Awaitable[object]], argument: object, extras: Extras, timeout_s: float, trouble: Trouble
) -> object:
    task = asyncio.current_task()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await function(argument, **extras)
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        if limit.expired():
            return Failure("timed out", f"no answer within {timeout_s:g} s")
        return _failure(error, trouble)


def _failure(error: BaseException, trouble: Trouble) -> Failure:
    if isinstance(error, TimeoutError):
        return Failure("timed out", describe_error(error))
    trouble.tell(error)
    return Failure("failed", describe_error(error))


async def _one_thread(
    function: Callable[..., object],
    arguments: Sequence[object],
    extras: Extras,
    timeout_s: float,
    trouble: Trouble,
) -> list[object]:
    """Results of one thread: all of them, or those before the call that hung and a Failure for that one."""
    loop = asyncio.get_running_loop()
    finished = asyncio.Event()
    given_up = threading.Event()
    results: list[object] = []
    started = [time.monotonic()]

    def work() -> None:
        for argument in arguments:
            if given_up.is_set():
                return
            started[0] = time.monotonic()
            results.extend(inline(function, [argument], extras, trouble))
            if not given_up.is_set():
                trouble.returned()
        if not given_up.is_set():
            loop.call_soon_threadsafe(finished.set)

    thread = threading.Thread(target=work, name=f"headrace-{getattr(function, '__name__', 'call')}", daemon=True)
    thread.start()
    try:
        while True:
            remaining_s = started[0] + timeout_s - time.monotonic()
            if remaining_s <= 0:
                num_done = len(results)
                if time.monotonic() - started[0] < timeout_s:  # it moved on between the two looks
                    continue
                given_up.set()
                trouble.hangs(thread)
                return [*results[:num_done], Failure("timed out", f"no answer within {timeout_s:g} s")]
            try:
                async with asyncio.timeout(remaining_s):
                    await finished.wait()
                return results
            except TimeoutError:
                continue
    except asyncio.CancelledError:
        given_up.set()
        raise
