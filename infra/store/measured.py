"""A store whose traffic is counted, of any kind.

Requests that run beside each other count their seconds each: bytes over seconds is the speed of a request.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infra.observe.metrics import Metrics
from infra.store.pieces import Pieces, put_pieces, total_bytes
from infra.store.store import Store
from infra.store.whole import Hashed, get_hashed
from schemas.errors import NotInStore, StoreError


class MeasuredStore:
    """The store, counted. Threads may share it."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    def __repr__(self) -> str:
        return repr(self._store)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object, replacing any other. Raises StoreError."""
        with self._counted("put") as count:
            self._store.put(key, data)
            count(len(data))

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        """See PiecewiseStore."""
        with self._counted("put") as count:
            put_pieces(self._store, key, pieces)
            count(total_bytes(pieces))

    def get(self, key: str) -> bytes:
        """The whole object. Raises NotInStore, StoreError."""
        with self._counted("get") as count:
            data = self._store.get(key)
            count(len(data))
        return data

    def get_hashed(self, key: str, algorithm: str) -> Hashed:
        """See HashingStore."""
        with self._counted("get") as count:
            data, digest = get_hashed(self._store, key, algorithm)
            count(len(data))
        return data, digest

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes of the object from `start` on, fewer where it ends before. Raises NotInStore, StoreError."""
        with self._counted("get") as count:
            data = self._store.read(key, start, length)
            count(len(data))
        return data

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotInStore, StoreError."""
        return self._store.size(key)

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted. Raises StoreError."""
        return self._store.keys(prefix)

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine. Raises StoreError."""
        self._store.delete(key)

    @contextmanager
    def _counted(self, verb: str) -> Iterator[Callable[[int], None]]:
        """Gives what counts the bytes of a request that did its work."""
        began = time.monotonic()

        def count(num_bytes: int) -> None:
            self._metrics.counter("store_bytes", verb=verb).inc(num_bytes)
            self._metrics.counter("store_seconds", verb=verb).inc(time.monotonic() - began)

        try:
            yield count
        except NotInStore:
            raise
        except StoreError:
            self._metrics.counter("store_failed", verb=verb).inc()
            raise
