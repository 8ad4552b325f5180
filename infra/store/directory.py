"""A folder as object store, for one machine or a shared file system.

Atomic: bytes go to a temporary name and are renamed into place. Durable: the file and every folder that names it are
synced before `put` returns. A process killed in `put` leaves only a temporary file, removed when the folder is opened
an hour later.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from infra.observe.failpoint import reach
from infra.observe.failpoint import write as write_all
from infra.store.pieces import Pieces
from infra.store.store import PRIVATE, check_key, check_prefix
from infra.store.whole import Hashed, read_hashed
from schemas.errors import NotInStore, StoreError

INCOMING = ".incoming"
STALE_AFTER_S = 3600.0
T = TypeVar("T")


class DirectoryStore:
    """Objects as files below one folder, made where it is absent. Any number of processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._root = folder.absolute()
        self._incoming = self._root / INCOMING
        try:
            self._incoming.mkdir(parents=True, exist_ok=True)
            _remove_stale(self._incoming)
        except OSError as error:
            raise StoreError(f"store folder {self._root} cannot be used: {error.strerror}") from error

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self._root)!r})"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object, replacing any other. Raises StoreError."""
        self.put_pieces(key, (data,))

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        """See PiecewiseStore."""
        target = self._path(key)
        temporary = self._incoming / uuid.uuid4().hex

        def write() -> None:
            with open(temporary, "wb", opener=_owners_alone if key.startswith(PRIVATE) else None) as file:
                for piece in pieces:
                    write_all("store.write", piece, file.write)
                file.flush()
                reach("store.before_fsync")
                os.fsync(file.fileno())
            self._make_folders(target.parent, 0o700 if key.startswith(PRIVATE) else 0o777)
            reach("store.before_rename")
            os.replace(temporary, target)
            reach("store.after_rename")
            _sync_folder(target.parent)

        try:
            self._guard("put", key, write)
        except StoreError:
            temporary.unlink(missing_ok=True)
            raise

    def get(self, key: str) -> bytes:
        """The whole object. Raises NotInStore, StoreError."""
        return self._guard("get", key, self._path(key).read_bytes)

    def get_hashed(self, key: str, algorithm: str) -> Hashed:
        """See HashingStore."""
        path = self._path(key)
        return self._guard("get", key, lambda: read_hashed(path, algorithm))

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes of the object from `start` on, fewer where it ends before. Raises NotInStore, StoreError."""
        path = self._path(key)

        def part() -> bytes:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(length)

        return self._guard("read", key, part)

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotInStore, StoreError."""
        path = self._path(key)

        def measure() -> int:
            if not path.is_file():
                raise FileNotFoundError
            return path.stat().st_size

        return self._guard("size", key, measure)

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted. Raises StoreError."""
        top = self._root / check_prefix(prefix).rpartition("/")[0]
        yield from sorted(key for key in self._walk(top) if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine. Raises StoreError."""
        path = self._path(key)

        def remove() -> None:
            reach("store.before_delete")
            path.unlink()
            _sync_folder(path.parent)

        try:
            self._guard("delete", key, remove)
        except NotInStore:
            return

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _guard(self, verb: str, key: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as error:
            if verb != "put" and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                raise NotInStore(f"{verb} {key}: not in {self!r}") from error
            raise StoreError(f"{verb} {key} in {self!r}: {error.strerror}") from error

    def _make_folders(self, folder: Path, mode: int) -> None:
        if folder.is_dir():
            return
        self._make_folders(folder.parent, mode)
        folder.mkdir(exist_ok=True, mode=mode)
        _sync_folder(folder.parent)

    def _walk(self, top: Path) -> Iterator[str]:
        def stop(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise StoreError(f"keys in {self!r}: {error.strerror}") from error

        for folder, folders, files in os.walk(top, onerror=stop):
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = Path(folder).relative_to(self._root)
            yield from ((relative / name).as_posix() for name in files if not name.startswith("."))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(incoming: Path) -> None:
    oldest = time.time() - STALE_AFTER_S
    for path in incoming.iterdir():
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # its writer finished, or another process swept it
            continue


def _owners_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
