"""A store whose weights are kept on this machine too, so that each object comes over the network once for all engines here.

Only objects that are named by their content are kept: the anchors, slices and deltas of policies (`infra.policies.manifest`).
Such a name means the same bytes in every store and for every version. All else goes to the store each time, manifests too.
"""

import re
from collections.abc import Iterator

from infra.store.digests import LETTERS, algorithm_of, begins_with
from infra.store.host_cache import HostCache
from infra.store.pieces import Pieces, put_pieces
from infra.store.store import Store, check_key
from infra.store.whole import Hashed, get_hashed

_NAMED_BY_CONTENT = re.compile(
    rf"policies/.+/(?:anchors|deltas|slices)/[^/]+/((?:blake3-)?[0-9a-f]{{{LETTERS}}})\.[a-z]+"
)


class CachedStore:
    """The store, with a cache before it. Threads may share it."""

    def __init__(self, store: Store, cache: HostCache) -> None:
        self._store = store
        self._cache = cache

    def __repr__(self) -> str:
        return f"{self._store!r} with {self._cache!r}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object, replacing any other. Raises StoreError."""
        self._store.put(key, data)

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        """See PiecewiseStore."""
        put_pieces(self._store, key, pieces)

    def get(self, key: str) -> bytes:
        """The whole object. One that is kept here comes without asking the store. Raises NotInStore, StoreError."""
        named = _NAMED_BY_CONTENT.fullmatch(check_key(key))
        if named is None:
            return self._store.get(key)
        return bytes(self.get_hashed(key, algorithm_of(begins_with(named[1])))[0])

    def get_hashed(self, key: str, algorithm: str) -> Hashed:
        """See HashingStore. One that is kept here comes without asking the store."""
        named = _NAMED_BY_CONTENT.fullmatch(check_key(key))
        if named is None or algorithm_of(begins_with(named[1])) != algorithm:
            return get_hashed(self._store, key, algorithm)
        return self._cache.get(named[1], lambda: get_hashed(self._store, key, algorithm))

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes of the object from `start` on, fewer where it ends before; always of the store, since a part has no
        digest to be checked by. Raises NotInStore, StoreError.
        """
        return self._store.read(key, start, length)

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotInStore, StoreError."""
        return self._store.size(key)

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted. Raises StoreError."""
        return self._store.keys(prefix)

    def delete(self, key: str) -> None:
        """Remove an object, here and in the store; absent is fine. Raises StoreError."""
        self._store.delete(key)
        if named := _NAMED_BY_CONTENT.fullmatch(key):
            self._cache.drop(named[1])
