"""Calls of code that may raise or hang: every call ends as a value or as a Failure, within its timeout.

    inline   here and now, for functions that promised to be quick
    thread   one daemon thread per call of `in_thread` works through the arguments; whoever hangs is given up, the rest
             goes on in a new thread
    async    all arguments at once, each under its own timeout

A thread cannot be killed: one that hangs lives until its function returns or the process ends. While MAX_HUNG threads
of a step hang, its calls fail at once. One long C call that holds the interpreter lock stops this process whatever the
thread: such work belongs in a child process, as in `streams.scores.math`.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

MAX_HUNG = 8
MAX_DETAIL_CHARS = 500
Extras = Mapping[str, Any]


class Failure(msgspec.Struct, frozen=True):
    """A call without a value. kind: "failed" or "timed out" (by us, or by its own TimeoutError); detail: in words.

    Example: Failure("failed", "ValueError: no digits")
    """

    kind: str
    detail: str


def describe_error(error: BaseException) -> str:
    """Type and message of an error, cut to what a metric of the day after still wants to read."""
    return f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]


def inline(function: Callable[..., object], arguments: Sequence[object], extras: Extras) -> list[object]:
    """Call in this thread; SystemExit counts as a failure, so that a plugin cannot end a worker."""
    results: list[object] = []
    for argument in arguments:
        try:
            results.append(function(argument, **extras))
        except (Exception, SystemExit) as error:
            results.append(Failure(_kind(error), describe_error(error)))
    return results


async def in_thread(
    function: Callable[..., object],
    arguments: Sequence[object],
    extras: Extras,
    timeout_s: float,
    hung: list[threading.Thread],
) -> list[object]:
    """Call in a thread, one argument after the other; `hung` collects the threads that were given up."""
    results: list[object] = []
    while len(results) < len(arguments):
        hung[:] = [thread for thread in hung if thread.is_alive()]
        if len(hung) >= MAX_HUNG:
            refused = Failure("timed out", f"not called: {MAX_HUNG} earlier calls still hang")
            results.extend([refused] * (len(arguments) - len(results)))
            break
        results.extend(await _one_thread(function, arguments[len(results) :], extras, timeout_s, hung))
    return results


async def as_tasks(
    function: Callable[..., Awaitable[object]], arguments: Sequence[object], extras: Extras, timeout_s: float
) -> list[object]:
    """Await all calls at once, each under its own timeout."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_one_await(function, argument, extras, timeout_s)) for argument in arguments]
    return [task.result() for task in running]


async def _one_await(
    function: Callable[..., Awaitable[object]], argument: object, extras: Extras, timeout_s: float
) -> object:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await function(argument, **extras)
    except (Exception, SystemExit) as error:
        if limit.expired():
            return Failure("timed out", f"no answer within {timeout_s:g} s")
        return Failure(_kind(error), describe_error(error))


def _kind(error: BaseException) -> str:
    return "timed out" if isinstance(error, TimeoutError) else "failed"


async def _one_thread(
    function: Callable[..., object],
    arguments: Sequence[object],
    extras: Extras,
    timeout_s: float,
    hung: list[threading.Thread],
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
            results.extend(inline(function, [argument], extras))
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
                hung.append(thread)
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
