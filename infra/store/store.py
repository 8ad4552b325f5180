"""The object store: immutable objects under keys. A folder, or S3 through minio.

Atomic: an object is visible whole or not at all. Durable: `put` returns after the bytes are synced or acknowledged.
"""

from collections.abc import Iterator
from typing import Protocol

MAX_KEY_BYTES = 900  # S3 takes 1024, some of it for the store's own prefix
MAX_SEGMENT_BYTES = 255  # of file systems, and of MinIO
# What users' data is sealed and tokens are signed with: for the owner of the store alone.
PRIVATE = ("keys/", "gateway/")
BLOBS = "blobs/"  # images, and frames too large for the log


class Store(Protocol):
    """Objects by key (`policies/main/17/manifests/12.json`). Blocking calls: run them in a thread."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object, replacing any other. data: must not change meanwhile. Raises StoreError."""

    def get(self, key: str) -> bytes:
        """The whole object. Raises NotInStore, StoreError."""

    def read(self, key: str, start: int, length: int) -> bytes:
        """So many bytes of the object from `start` on, fewer where it ends before. Raises NotInStore, StoreError."""

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotInStore, StoreError."""

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys that begin with `prefix`, sorted. Raises StoreError."""

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine. Raises StoreError."""


def check_key(key: str) -> str:
    """The key, if every store can hold it; ValueError says what is wrong with it.

    Segments are parted by "/", are not empty, and do not start with "." (kept for temporary files).
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
    """The prefix, if it can begin a key; "" and "folder/" can."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix
