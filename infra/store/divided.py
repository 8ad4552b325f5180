"""A store in two places: users' keys and tokens in one, all else in another."""

from collections.abc import Iterator

from infra.store.pieces import Pieces, put_pieces
from infra.store.store import PRIVATE, Store
from infra.store.whole import Hashed, get_hashed


class DividedStore:
    """A store whose secrets lie in another: objects below PRIVATE there, all others in `data`."""

    def __init__(self, data: Store, secrets: Store) -> None:
        self._data = data
        self._secrets = secrets

    def __repr__(self) -> str:
        return f"{self._data!r} with keys in {self._secrets!r}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object, replacing any other. Raises StoreError."""
        self._of(key).put(key, data)

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        """See PiecewiseStore."""
        put_pieces(self._of(key), key, pieces)

    def get(self, key: str) -> bytes:
        """The whole object. Raises NotInStore, StoreError."""
        return self._of(key).get(key)

    def get_hashed(self, key: str, algorithm: str) -> Hashed:
        """See HashingStore."""
        return get_hashed(self._of(key), key, algorithm)

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes of the object from `start` on, fewer where it ends before. Raises NotInStore, StoreError."""
        return self._of(key).read(key, start, length)

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotInStore, StoreError."""
        return self._of(key).size(key)

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted. Raises StoreError."""
        if prefix.startswith(PRIVATE):
            yield from self._secrets.keys(prefix)
            return
        others = (key for key in self._data.keys(prefix) if not key.startswith(PRIVATE))
        secret = [key for one in PRIVATE if one.startswith(prefix) for key in self._secrets.keys(one)]
        yield from sorted([*others, *secret]) if secret else others

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine. Raises StoreError."""
        self._of(key).delete(key)

    def _of(self, key: str) -> Store:
        return self._secrets if key.startswith(PRIVATE) else self._data
