"""A folder that belongs to one process: several of a role on one machine keep their files apart, and find them again."""

import fcntl
from pathlib import Path
from typing import IO

from schemas.errors import ConfigError

MAX_PROCESSES = 1024


class ClaimedFolder:
    """A folder that belongs to this process until it ends: the first of `<role>-0`, `<role>-1`, … that no process holds.

    A process that restarts finds its own files again; with several on one machine it may find another's.
    """

    def __init__(self, base: Path, role: str = "worker") -> None:
        self.path, self._lock = _claim(base, role)

    def release(self) -> None:
        """Let the next process have it."""
        self._lock.close()


def _claim(base: Path, role: str) -> tuple[Path, IO[str]]:
    for index in range(MAX_PROCESSES):
        path = base / f"{role}-{index}"
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (path / "lock").open("w", encoding="ascii")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written to ({error.strerror}): what {role} keeps lies there"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return path, lock
    raise ConfigError(f"{base}: got {MAX_PROCESSES} processes of {role} on one machine, expected fewer")
