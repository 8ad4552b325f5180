"""Processes that give way to the others of their machine."""

import contextlib
import os
from pathlib import Path

SMALL_SHARE = 10  # nice


def take_idle_time() -> None:
    """From here on this thread, and what it starts, runs while the roles leave a core idle: SCHED_IDLE, else nice 19.

    Linux shares processors among sessions first (sched(7), "The autogroup feature"), and a SCHED_IDLE process gives way to
    none of another session. So the session is set to nice 19 too, where this process or its watcher leads it.
    """
    with contextlib.suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)
    _set_session(19)


def take_small_share() -> None:
    """From here on this thread, and what it starts, gives way to the roles and is not starved by them: nice 10, a ninth of the
    weight of a thread of theirs. What people wait for needs it: SCHED_IDLE gets next to nothing where many wait for a core.
    """
    with contextlib.suppress(OSError):
        os.nice(SMALL_SHARE)
    _set_session(SMALL_SHARE)


def _set_session(nice: int) -> None:
    with contextlib.suppress(OSError):
        if os.getsid(0) in (os.getpid(), os.getppid()) and not os.isatty(0):  # no shell of a person is in it
            Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")
