"""Processes that give way to the others of their machine."""

import contextlib
import os
from pathlib import Path

SESSION, TERMINAL = 3, 4  # of /proc/PID/stat, counted behind the name (proc(5)); no terminal is 0
SMALL_SHARE = 10  # nice


def take_idle_time() -> None:
    """From here on this thread, and what it starts, runs while the roles leave a core idle: SCHED_IDLE, else nice 19.

    Linux shares processors among sessions first (sched(7), "The autogroup feature"), and a SCHED_IDLE process gives way to
    none of another session. So the session is set to nice 19 too, where it is this process's alone.
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
        if has_session_alone():
            Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")


def has_session_alone() -> bool:
    """Whether this process, with the one that waits for it, has a session without a terminal for itself. False where /proc does
    not say. Raises OSError.
    """
    mine, with_me = Path("/proc/self/stat"), {os.getpid(), os.getppid()}
    if not mine.exists() or int(_after_name(mine)[TERMINAL]):
        return False
    session = os.getsid(0)
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(_after_name(process)[SESSION]) == session and int(process.parent.name) not in with_me:
                return False
    return True


def _after_name(stat: Path) -> list[str]:
    return stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
