"""A deadline that holds also where the event loop does not turn any more: a thread ends the process.

Guarantee: a block under `ends_within` has ended after so many seconds, or the process has, whatever its loop, its tasks and
its other threads do. What was not acknowledged by then is delivered again, as after a kill.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_STUCK = 75  # EX_TEMPFAIL: the supervisor starts the process again


def exit_stuck(what: str, seconds: float) -> None:
    """Say what did not end in time, what every thread is doing, and end the process at once."""
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
