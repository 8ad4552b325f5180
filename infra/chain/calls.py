"""Calls of code that may raise or hang: every call ends as a value or as a Failure, within its timeout.

    inline   here and now, for functions that promised to be quick
    thread   each argument in a daemon thread of its own, one after the other; a call that hangs is given up
    async    all arguments at once, each under its own timeout

A thread cannot be killed: one that hangs lives until its function returns or the process ends. While MAX_HUNG calls of a step
hang, it is not called. A long C call that holds the interpreter lock stops this process from any thread: such work
belongs in a child process, as in `streams.scores.child`.
"""

import asyncio
import logging
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

MAX_HUNG = 16
MAX_LOGGED = 64
# Messages of these errors are about code; messages of other errors may quote a user's text, which belongs into no log.
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, TypeError)
MAX_DETAIL_CHARS = 500


class Failure(msgspec.Struct, frozen=True):
    """A call without a value. kind: "failed" or "timed out" (by us, or by its own TimeoutError); detail: in words."""

    kind: str
    detail: str


class Trouble:
    """Faults of one function: threads that hang, and errors that were logged. name: of the step, for the log."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.hung: list[threading.Thread] = []
        self._logged: set[str] = set()

    def refuses(self) -> str:
        """Why the function is not called now, "" where it is."""
        self.hung = [thread for thread in self.hung if thread.is_alive()]
        if len(self.hung) < MAX_HUNG:
            return ""
        return f"not called: {len(self.hung)} earlier calls still hang; restart this role"

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
    """Type and message of an error, cut to MAX_DETAIL_CHARS."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]
    except BaseException:  # its own __str__ raises
        return type(error).__name__


def inline(function: Callable[[Any], object], arguments: Sequence[object], trouble: Trouble) -> list[object]:
    """Call in this thread. Every exception counts as a failure, SystemExit and KeyboardInterrupt too: a plugin cannot
    end a worker. (Ctrl-C raises nothing here: the loop that runs a role takes it.)
    """
    results: list[object] = []
    for argument in arguments:
        try:
            results.append(function(argument))
        except BaseException as error:
            results.append(_failure(error, trouble))
    return results


async def in_thread(
    function: Callable[[Any], object], arguments: Sequence[object], timeout_s: float, trouble: Trouble
) -> list[object]:
    """Call in threads, one argument after the other; `trouble` holds the threads that were given up."""
    return [await _one_thread(function, argument, timeout_s, trouble) for argument in arguments]


async def as_tasks(
    function: Callable[[Any], Awaitable[object]], arguments: Sequence[object], timeout_s: float, trouble: Trouble
) -> list[object]:
    """Await all calls at once, each under its own timeout."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_one_await(function, argument, timeout_s, trouble)) for argument in arguments]
    return [task.result() for task in running]


async def _one_await(
    function: Callable[[Any], Awaitable[object]], argument: object, timeout_s: float, trouble: Trouble
) -> object:
    task = asyncio.current_task()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await function(argument)
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
    function: Callable[[Any], object], argument: object, timeout_s: float, trouble: Trouble
) -> object:
    if why := trouble.refuses():
        return Failure("timed out", why)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[object] = loop.create_future()

    def settle(result: object) -> None:
        if not answer.done():
            answer.set_result(result)

    def work() -> None:
        (result,) = inline(function, [argument], trouble)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result)

    thread = threading.Thread(target=work, name=f"headrace-{getattr(function, '__name__', 'call')}", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        trouble.hung.append(thread)
        logger.warning("step_hangs step=%s threads=%d", trouble.name, len(trouble.hung))
        return Failure("timed out", f"no answer within {timeout_s:g} s")
