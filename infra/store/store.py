"""The object store: immutable objects under keys, in a folder or in S3.

Atomic: an object is visible whole or not at all. Durable: `put` returns after the bytes are synced or acknowledged.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from blake3 import blake3

MAX_KEY_BYTES = 900  # S3 takes 1024, some of it for the store's own prefix
MAX_SEGMENT_BYTES = 255  # of file systems, and of MinIO
PRIVATE = ("keys/", "gateway/")  # encryption keys, API keys and signing secrets: for the owner of the store alone
API_KEYS = "gateway/keys/"  # of clients of the gateway
BLOBS = "blobs/"  # images, and frames too large for the log
DIGEST_LETTERS = 32  # of a digest in an object's name: 128 bits

Pieces = Sequence[bytes | memoryview]


class Store(ABC):
    """Objects by key (`policies/main/17/manifests/12.json`). Calls block: run them in a thread. Threads may share a store."""

    @abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object, replacing an existing one. Do not change `data` meanwhile. Raises StoreError."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the whole object. Raises NotInStore, StoreError."""

    @abstractmethod
    def read(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes of the object from `start` on, fewer at its end. Raises NotInStore, StoreError."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the size of the object in bytes. Raises NotInStore, StoreError."""

    @abstractmethod
    def keys(self, prefix: str) -> Iterator[str]:
        """Return all keys that begin with `prefix`, sorted. Raises StoreError."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; an absent object is no error. Raises StoreError."""

    def disk_usage(self) -> tuple[int, int] | None:
        """Free and usable bytes of the disk that holds the objects; None where no disk of this machine bounds the store."""
        return None


class WrappedStore(Store):
    """Passes every call to the store that `holder` names; a subclass overrides the calls that it changes."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return repr(self.inner)

    def holder(self, key: str) -> Store:
        """The store of a key."""
        return self.inner

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.holder(key).put(key, data)

    def get(self, key: str) -> bytes:
        return self.holder(key).get(key)

    def read(self, key: str, start: int, length: int) -> bytes:
        return self.holder(key).read(key, start, length)

    def size(self, key: str) -> int:
        return self.holder(key).size(key)

    def keys(self, prefix: str) -> Iterator[str]:
        return self.inner.keys(prefix)

    def delete(self, key: str) -> None:
        self.holder(key).delete(key)

    def disk_usage(self) -> tuple[int, int] | None:
        return self.inner.disk_usage()


def check_key(key: str) -> str:
    """Return the key if every store can hold it. Raises ValueError.

    "/" separates segments. A segment is not empty and does not start with "." (names of temporary files).
    """
    if not key or len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise ValueError(f"key: got {len(key)} characters, expected 1 to {MAX_KEY_BYTES} bytes")
    if not key.isprintable() or "\\" in key:
        raise ValueError(f"key: got {key!r}, expected printable characters without a backslash")
    for segment in key.split("/"):
        if not segment or segment.startswith(".") or len(segment.encode()) > MAX_SEGMENT_BYTES:
            raise ValueError(
                f"key: got {key!r}, expected segments that are not empty, not over {MAX_SEGMENT_BYTES} bytes, "
                "and do not start with '.'"
            )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix if it can begin a key; "" and "folder/" can. Raises ValueError."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def digest_of(pieces: Pieces) -> str:
    """BLAKE3 of the pieces in order, as "blake3:<64 letters>".

    >>> digest_of([b"some ", b"bytes"]) == digest_of([b"some bytes"])
    True
    """
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return f"blake3:{hasher.hexdigest()}"


def name_of(digest: str) -> str:
    """The name of an object with this digest.

    >>> name_of("blake3:" + 64 * "9")
    'blake3-99999999999999999999999999999999'
    """
    algorithm, _, letters = digest.partition(":")
    return f"{algorithm}-{letters[:DIGEST_LETTERS]}"


def joined(pieces: Pieces) -> memoryview:
    """The bytes of all pieces, read-only. Other threads run meanwhile, unlike in `b"".join`."""
    room, start = np.empty(sum(map(len, pieces)), np.uint8), 0
    for piece in pieces:
        if piece:
            np.copyto(room[start : start + len(piece)], np.frombuffer(piece, np.uint8))
        start += len(piece)
    room.flags.writeable = False
    return room.data
