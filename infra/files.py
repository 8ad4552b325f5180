"""Files that are replaced as a whole, so that a reader sees the old bytes or the new ones; locks that the kernel releases."""

import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from schemas.errors import ConfigError

PRIVATE_MODE = 0o600  # for its owner alone
PUBLIC_MODE = 0o666  # as the umask allows


@contextmanager
def replacing(path: Path, *, mode: int = PUBLIC_MODE, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path`, synced, at the end of the block. After an error the old file stays.

    temporary: path on the same file system; by default a hidden name next to `path`. Raises OSError.
    """
    temporary = temporary or path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes | memoryview, *, mode: int = PUBLIC_MODE) -> None:
    """Replace a file by one of these bytes, or leave the old one. Raises OSError."""
    with replacing(path, mode=mode) as file:
        file.write(content)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_and_usable(folder: Path) -> tuple[int, int]:
    """Free and usable bytes of the disk of a folder. As in `df`, blocks that only root may take are not usable."""
    found = shutil.disk_usage(folder)
    return found.free, found.used + found.free


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


POLL_S = 0.02
WAIT_S = 15.0  # a process that has just died may still hold the lock


def lock_folder(file: Path, what: str) -> IO[str]:
    """Take the lock file, waiting for a process that has just died to go; it is held until the result is closed.

    what: that is locked, for the error. Raises ConfigError naming the process that holds it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, deadline = file.open("a+"), time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip()
            if _is_alive(owner) or time.monotonic() >= deadline:
                lock.close()
                what = f"{what} is in use by process {owner or '(unknown)'}"
                raise ConfigError(f"{what}: stop it, or choose another folder") from None
        time.sleep(POLL_S)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def is_locked(file: Path) -> bool:
    if not file.exists():
        return False
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def release_folder(lock: IO[str]) -> None:
    """Release the lock. A killed child holds it until the kernel has ended the child: the next process waits for that."""
    lock.truncate(0)
    lock.close()


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
