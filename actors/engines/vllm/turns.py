"""Work that takes turns with whoever asks for it: it has a thread of its own, and the two never run at once.

For what cannot be left in the middle otherwise, and may not run beside the rest: kernels of vLLM share memory, and one that is
made or asked beside a step may end the process.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

TURN_S = 0.02  # with what is begun in it about as long as a pause may be

Turn = tuple[bool, float]  # of a worker: whether all is done, and the turn's milliseconds
Item = TypeVar("Item")
Made = TypeVar("Made")
Turns = Callable[[Iterable[Item]], Iterator[Item]]
"""The items of something, one after the other: between two of them the work waits for its next turn, once this one is over."""


class _Left(Exception):
    """The work is not wanted any more."""


class InTurns(Generic[Made]):
    """work: goes through Turns where it may wait. Nothing is done before the first turn."""

    def __init__(self, work: Callable[[Turns[Any]], Made]) -> None:
        self._made: Future[Made] = Future()
        self._begin, self._end = Semaphore(0), Semaphore(0)
        self._until_s = 0.0
        self._is_left = False
        self._thread = Thread(target=self._run, args=(work,), name="in-turns", daemon=True)
        self._thread.start()

    def take(self) -> bool:
        """One turn, of TURN_S and what was begun then; whether the work is done."""
        if not self._made.done():
            self._until_s = time.perf_counter() + TURN_S
            self._begin.release()
            self._end.acquire()
        return self._made.done()

    def result(self) -> Made:
        """What was made; raises what the work raised. It is done."""
        return self._made.result(timeout=0)

    def leave(self) -> None:
        """End it, wherever it is."""
        self._is_left = True
        self._begin.release()
        self._thread.join()

    def _run(self, work: Callable[[Turns[Any]], Made]) -> None:
        self._begin.acquire()
        try:
            if self._is_left:
                raise _Left
            self._made.set_result(work(self._turns))
        except BaseException as error:
            self._made.set_exception(error)
        finally:
            self._end.release()

    def _turns(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            if time.perf_counter() > self._until_s:
                self._end.release()
                self._begin.acquire()
                if self._is_left:
                    raise _Left
            yield item
