"""A folder as object store, for one machine or a shared file system.

Atomic: bytes go to a temporary name and are renamed into place. Durable: the file and every folder that names it are
synced before `put` returns. A process killed in `put` leaves only a temporary file, which is removed when the folder is
opened an hour later.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from blake3 import blake3

from infra.files import PRIVATE_MODE, PUBLIC_MODE, free_and_usable, replacing, sync_folder
from infra.observe.failpoint import reach
from infra.observe.failpoint import write as write_all
from infra.store.store import PRIVATE, READ_BYTES, Hashed, Pieces, Store, check_key, check_prefix, finished
from schemas.errors import NotInStore, StoreError

INCOMING = ".incoming"
STALE_AFTER_S = 3600.0
T = TypeVar("T")


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
        self.put_pieces(key, (data,))

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        target = self._path(key)
        temporary = self._incoming / uuid.uuid4().hex
        is_private = key.startswith(PRIVATE)

        def write() -> None:
            self._make_folders(target.parent, 0o700 if is_private else 0o777)
            with replacing(target, mode=PRIVATE_MODE if is_private else PUBLIC_MODE, temporary=temporary) as file:
                for piece in pieces:
                    write_all("store.write", piece, file.write)
                file.flush()
                reach("store.before_rename")
            reach("store.after_rename")

        self._guard("put", key, write)

    def get(self, key: str) -> bytes:
        return self._guard("get", key, self._path(key).read_bytes)

    def get_hashed(self, key: str) -> Hashed:
        path = self._path(key)
        return self._guard("get", key, lambda: read_hashed(path))

    def read(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)

        def part() -> bytes:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(length)

        return self._guard("read", key, part)

    def size(self, key: str) -> int:
        path = self._path(key)

        def measure() -> int:
            if not path.is_file():
                raise FileNotFoundError
            return path.stat().st_size

        return self._guard("size", key, measure)

    def keys(self, prefix: str) -> Iterator[str]:
        top = self._root / check_prefix(prefix).rpartition("/")[0]
        yield from sorted(key for key in self._walk(top) if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)

        def remove() -> None:
            reach("store.before_delete")
            path.unlink()
            sync_folder(path.parent)

        try:
            self._guard("delete", key, remove)
        except NotInStore:
            return

    def disk_usage(self) -> tuple[int, int]:
        return self._usage(self._root)

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
        sync_folder(folder.parent)

    def _walk(self, top: Path) -> Iterator[str]:
        def stop(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise StoreError(f"keys in {self!r}: {error.strerror}") from error

        for folder, folders, files in os.walk(top, onerror=stop):
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = Path(folder).relative_to(self._root)
            yield from ((relative / name).as_posix() for name in files if not name.startswith("."))


def read_hashed(path: Path) -> Hashed:
    """The bytes of a file and their digest, in one pass. A copy, not a mapping: a file may be written to after it was read."""
    hasher = blake3()
    with open(path, "rb", buffering=0) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)  # numpy asks for large pages, which bytes do not
        view, start = memoryview(data.data), 0
        while num_read := file.readinto(view[start : start + READ_BYTES]):
            hasher.update(view[start : start + num_read])
            start += num_read
    return view[:start].toreadonly(), finished(hasher)


def _remove_stale(incoming: Path) -> None:
    oldest = time.time() - STALE_AFTER_S
    for path in incoming.iterdir():
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # its writer finished, or another process swept it
            continue
