"""Cancels the task that works for a client when the client disconnects. No second task has to listen for that.

Guarantee: work whose client has gone is cancelled at once, and releases what it holds before the connection does anything else.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
GONE = "headrace.gone"  # an extension of the scopes of a connection


class Gone:
    """One connection, which answers one request at a time. listen: resumes reading, which may be paused, so that a disconnect
    is noticed.
    """

    def __init__(self, listen: Callable[[], None]) -> None:
        self._listen = listen
        self._has_gone = False
        self._working: asyncio.Task[Any] | None = None

    def happen(self) -> None:
        """The client has gone. May be called twice."""
        working, self._working = self._working, None
        self._has_gone = True
        if working is not None:
            working.cancel()

    async def unless(self, work: Coroutine[Any, Any, T], error: type[Exception]) -> T:
        """The result of the work, which runs in this task. Raises `error` if the client goes first."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._listen()
        self._working = task
        if self._has_gone:
            self.happen()  # the work still begins, so that it counts what it leaves
        try:
            found = await work
            if self._working is task:
                return found
            task.uncancel()
        except BaseException as raised:
            if self._working is task:
                raise
            if task.uncancel() > before and isinstance(raised, asyncio.CancelledError):
                raise  # another task cancels it, too
        finally:
            self._working = None
        raise error


def gone_of(scope: Mapping[str, Any]) -> Gone | None:
    """The one of the connection that a request came on; None of a server that reports a disconnect by a message only."""
    found = scope.get("extensions", {}).get(GONE, {}).get("gone")
    return found if isinstance(found, Gone) else None
