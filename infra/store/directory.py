"""A folder as object store, for one machine or a shared file system.

Atomic: bytes go to a temporary name and are renamed into place. Durable: the file and every folder that names it are
synced before `put` returns. A process killed in `put` leaves only a temporary file, which is removed when the folder is
opened an hour later. A folder below goes with its last object.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.files import PRIVATE_MODE, PUBLIC_MODE, free_and_usable, replacing, sync_folder
from infra.observe.failpoint import reach
from infra.observe.failpoint import write as write_all
from infra.store.store import PRIVATE, Store, check_key, check_prefix
from schemas.errors import NotInStore, StoreError

INCOMING = ".incoming"
STALE_AFTER_S = 3600.0


class DirectoryStore(Store):
    """Objects as files below one folder, made where it is absent. Any number of processes may share it."""

    def __init__(self, folder: Path, usage: Callable[[Path], tuple[int, int]] = free_and_usable) -> None:
        self._usage = usage
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
        with self._guarded("put", key):
            try:
                self._put(self._path(key), data, is_private=key.startswith(PRIVATE))
            except FileNotFoundError:  # the folder went with its last other object
                self._put(self._path(key), data, is_private=key.startswith(PRIVATE))

    def _put(self, target: Path, data: bytes | memoryview, *, is_private: bool) -> None:
        temporary = self._incoming / uuid.uuid4().hex
        self._make_folders(target.parent, 0o700 if is_private else 0o777)
        with replacing(target, mode=PRIVATE_MODE if is_private else PUBLIC_MODE, temporary=temporary) as file:
            write_all("store.write", data, file.write)
            file.flush()
            reach("store.before_rename")
        reach("store.after_rename")

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._guarded("get", key):
            return path.read_bytes()

    def read(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with self._guarded("read", key), path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def size(self, key: str) -> int:
        path = self._path(key)
        with self._guarded("size", key):
            if not path.is_file():
                raise FileNotFoundError
            return path.stat().st_size

    def keys(self, prefix: str) -> Iterator[str]:
        top = self._root / check_prefix(prefix).rpartition("/")[0]
        yield from sorted(key for key in self._walk(top) if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with suppress(NotInStore), self._guarded("delete", key):
            reach("store.before_delete")
            path.unlink()
            sync_folder(path.parent)
            with suppress(OSError):  # unless it holds others: each listing walks all folders
                path.parent.rmdir()

    def disk_usage(self) -> tuple[int, int]:
        return self._usage(self._root)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextmanager
    def _guarded(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if verb != "put" and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                raise NotInStore(f"{verb} {key}: not in {self!r}") from error
            raise StoreError(f"{verb} {key} in {self!r}: {error.strerror}") from error

    def _make_folders(self, folder: Path, mode: int) -> None:
        if folder.is_dir():
            return
        self._make_folders(folder.parent, mode)
        folder.mkdir(exist_ok=True, mode=mode)
        sync_folder(folder.parent)

    def _walk(self, top: Path) -> Iterator[str]:
        def stop(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise StoreError(f"keys in {self!r}: {error.strerror}") from error

        for folder, folders, files in os.walk(top, onerror=stop):
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = Path(folder).relative_to(self._root)
            yield from ((relative / name).as_posix() for name in files if not name.startswith("."))


def _remove_stale(incoming: Path) -> None:
    oldest = time.time() - STALE_AFTER_S
    for path in incoming.iterdir():
        with suppress(FileNotFoundError):  # its writer finished, or another process swept it
            if path.stat().st_mtime < oldest:
                path.unlink()
