"""Whether the client of a connection is still there, told to the task that works for it: no task of its own has to listen.

Guarantee: work whose client has gone is cancelled at once, and has let go before anything else is done.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
GONE = "headrace.gone"  # an extension of the scopes of a connection


class Gone:
    """Of one connection, on which one request is answered at a time. listen: has its end be heard of, where reading had to
    pause.
    """

    def __init__(self, listen: Callable[[], None]) -> None:
        self._listen = listen
        self._has_gone = False
        self._working: asyncio.Task[Any] | None = None

    def happen(self) -> None:
        """The client has gone; again is fine."""
        working, self._working = self._working, None
        self._has_gone = True
        if working is not None:
            working.cancel()

    async def unless(self, work: Coroutine[Any, Any, T], error: type[Exception]) -> T:
        """The result of the work, which is done in this task; raises `error` where the client goes first."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._listen()
        self._working = task
        if self._has_gone:
            self.happen()  # the work begins all the same, and counts what it leaves
        try:
            found = await work
            if self._working is task:
                return found
            task.uncancel()
        except BaseException as raised:
            if self._working is task:
                raise
            if task.uncancel() > before and isinstance(raised, asyncio.CancelledError):
                raise  # somebody else cancels it, too
        finally:
            self._working = None
        raise error


def gone_of(scope: Mapping[str, Any]) -> Gone | None:
    """That of the connection on which a request came, None of a server that tells by messages alone."""
    found = scope.get("extensions", {}).get(GONE, {}).get("gone")
    return found if isinstance(found, Gone) else None
