"""The file of a version that no process uses any more, kept for the next version: its pages cost a third of new ones.

    <place>/headrace-versions-<user>/spare    what may be written over; there is at most one
    <place>/headrace-versions-<user>/users    locked by each process that has kept one

Guarantees: only a file that no process holds becomes the spare one, and whoever takes it has it alone. It goes with the last
of the processes that have kept one, and where room is short; what killed processes left goes when the next one begins.
"""

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from infra.store.rooms import LEAST_BYTES


class SpareFile:
    """Of one folder, as one process uses it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "spare"
        self._users = folder / "users"
        self._user = -1
        with suppress(OSError):  # no folder, or others use it
            users = os.open(self._users, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.remove()
            finally:
                os.close(users)

    def keep(self, file: int, path: Path) -> bool:
        """Make an open file, whose lock is held, the spare one; whether so. path: its name, which it loses."""
        if os.fstat(file).st_size < LEAST_BYTES:
            return False
        try:
            self._join()
            os.fchmod(file, 0o600)
            path.replace(self._path)
        except OSError:  # the last of the others is leaving, or there is no such file any more
            return False
        return True

    def take(self, path: Path, num_bytes: int) -> int | None:
        """The spare file under another name, open and locked; None where there is none of that size, or the name is taken."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_size == num_bytes and is_at(file, self._path):
                # This file, whatever has its name by now. Without a folder Python would link the link in /proc.
                os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file)
                self.remove()
                return file
        except OSError:  # another takes it, or fills that version
            pass
        os.close(file)
        return None

    def remove(self) -> bool:
        """Give its room back; whether there was one."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True

    def _join(self) -> None:
        """Hold a lock on `users` until this process ends, or this object does. BlockingIOError where the last other process is
        leaving.
        """
        if self._user >= 0:
            return
        user = os.open(self._users, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(user, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(user)
            raise
        self._user = user
        weakref.finalize(self, _leave, user, self._users, self._path, os.getpid())


def is_at(file: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _leave(user: int, users: Path, spare: Path, owner: int) -> None:
    """The last one takes all with it. A forked child shares the lock of its parent, and lets that be."""
    if os.getpid() == owner:
        with suppress(OSError):  # others use it
            fcntl.flock(user, fcntl.LOCK_EX | fcntl.LOCK_NB)
            spare.unlink(missing_ok=True)
            users.unlink(missing_ok=True)
    os.close(user)
