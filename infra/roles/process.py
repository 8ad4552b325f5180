"""Parts of a role's process around its loops: a folder of its own, deadlines, work that ends early, and missing peers."""

import asyncio
import faulthandler
import fcntl
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from schemas.errors import ConfigError

MAX_PROCESSES = 1024


class ClaimedFolder:
    """A folder that belongs to this process until it ends: the first of `<role>-0`, `<role>-1`, … that no process holds.

    A process that restarts finds its own files again; with several on one machine it may find another's.
    """

    def __init__(self, base: Path, role: str = "worker") -> None:
        for index in range(MAX_PROCESSES):
            self.path = base / f"{role}-{index}"
            try:
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._lock = (self.path / "lock").open("w", encoding="ascii")
            except OSError as error:
                raise ConfigError(f"{self.path}: {role} cannot write there: {error.strerror}") from error
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                self._lock.close()
        raise ConfigError(f"{base}: got {MAX_PROCESSES} processes of {role} on one machine, expected fewer")

    def release(self) -> None:
        self._lock.close()


EXIT_STUCK = 75  # EX_TEMPFAIL: the supervisor starts the process again


def exit_stuck(what: str, seconds: float) -> None:
    """Print the name of the late task and the stack of every thread, and end the process at once."""
    print(f"headrace: {what} did not end within {seconds:g} s; the process ends at once", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr)
    os._exit(EXIT_STUCK)


@contextmanager
def ends_within(what: str, seconds: float, expired: Callable[[str, float], None] = exit_stuck) -> Iterator[None]:
    """The block ends in time, or the process does. expired: called in a thread instead of ending the process."""
    timer = threading.Timer(seconds, expired, (what, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


T = TypeVar("T")


async def unless(happens: Coroutine[Any, Any, object], work: Awaitable[T], error: type[Exception]) -> T:
    """The result of the work; raises `error` where `happens` ends first. Then, or cancelled, it waits until the work has ended,
    with a result or an error.
    """
    task, other = asyncio.ensure_future(work), asyncio.create_task(happens)
    try:
        await asyncio.wait((task, other), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise error
        return task.result()
    finally:
        other.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not warn of it


MISSING_S = 30.0  # a role that was started late or again is back sooner


class Absence:
    """Absence of something that is looked for now and then. limit_s: seconds after which it is missing."""

    def __init__(self, limit_s: float = MISSING_S) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None
        self.missing_s = 0.0

    def look(self, now_s: float, *, wanted: bool, there: bool) -> bool:
        """Note the present state; True where the alarm is to be raised. `missing_s` is 0 but while it lasts."""
        sounded = self.missing_s > 0
        if there or not wanted:
            self._since_s, self.missing_s = None, 0.0
            return False
        if self._since_s is None:
            self._since_s = now_s
        away_s = now_s - self._since_s
        self.missing_s = away_s if away_s >= self._limit_s else 0.0
        return self.missing_s > 0 and not sounded
