"""An object store in this process's memory, for tests and runs that keep nothing."""

import threading
from collections.abc import Iterator

from infra.store.store import Store, check_key, check_prefix
from schemas.errors import NotInStore


class MemoryStore(Store):
    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._lock:
            self._objects[check_key(key)] = bytes(data)

    def get(self, key: str) -> bytes:
        with self._lock:
            found = self._objects.get(check_key(key))
        if found is None:
            raise NotInStore(f"get {key}: not in memory")
        return found

    def read(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def keys(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        with self._lock:
            found = sorted(key for key in self._objects if key.startswith(prefix))
        yield from found

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)
