"""A folder that one process at a time works in, and who that is."""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from schemas.errors import ConfigError

WAIT_S = 15.0  # for what a process that has just died still holds


def lock_folder(file: Path, what: str) -> IO[str]:
    """Take the lock file, waiting for a process that has just died to go; it is held until the result is closed.

    what: that is locked, for the error. Raises ConfigError naming the process that holds it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = file.open("a+")
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip()
            if _is_alive(owner) or time.monotonic() > deadline:
                lock.close()
                raise ConfigError(
                    f"{what} is in use by process {owner or '(unknown)'}: stop it, or choose another folder"
                ) from None
            time.sleep(0.05)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def is_locked(file: Path) -> bool:
    """True if a process holds the lock file now."""
    if not file.exists():
        return False
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def release_folder(lock: IO[str]) -> None:
    """Let go of it. A child that was killed holds it until the kernel has ended it: the next process waits for that."""
    lock.truncate(0)
    lock.close()


def _is_alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
