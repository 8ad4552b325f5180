"""Files that are replaced as a whole: a reader, or a start after a loss of power, sees the old bytes or the new ones."""

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PRIVATE_MODE = 0o600  # for its owner alone
PUBLIC_MODE = 0o666  # as the umask allows


@contextmanager
def replacing(path: Path, *, mode: int = PUBLIC_MODE, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path`, synced, at the end of the block. After an error the old file stays.

    temporary: on the same file system; by default hidden beside `path`. Raises OSError.
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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
