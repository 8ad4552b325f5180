"""SIGINT and SIGTERM of the console, from its first line on.

While it starts a signal cancels what it waits for. A cancellation can get lost: before Python 3.12 `asyncio.wait_for` drops
one that comes with what it waits for, and clients of a broker wait by it. So the signal is remembered, and asked for between
two steps of the start. Once pages are served the server takes it.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Leaving:
    """Whether a signal came, and what ends by it. Made in the task that is to end."""

    def __init__(self) -> None:
        self.is_asked = False
        task = asyncio.current_task()
        assert task is not None, "made outside of a task"
        self._cancel: Callable[[], object] = task.cancel
        self._end: Callable[[], object] = self._cancel
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.ask)

    def ask(self) -> None:
        """As a signal does."""
        self.is_asked = True
        self._end()

    def check(self) -> None:
        """Between two steps. Raises CancelledError where a signal came."""
        if self.is_asked:
            raise asyncio.CancelledError

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Signals call `end` meanwhile, and do so at once where one came before."""
        self._end = end
        try:
            if self.is_asked:
                end()
            yield
        finally:
            self._end = self._cancel
