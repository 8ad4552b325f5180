"""The object store: immutable objects under keys. A folder, or S3 through minio.

Atomic: an object is visible whole or not at all. Durable: `put` returns after the bytes are synced or acknowledged.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from schemas.errors import ConfigError

MAX_KEY_BYTES = 900  # S3 takes 1024, some of it for the store's own prefix
MAX_SEGMENT_BYTES = 255  # of file systems, and of MinIO
PRIVATE = (
    "keys/",
    "gateway/",
)  # what users' data is sealed and tokens are signed with: for the owner of the store alone


class Store(Protocol):
    """Objects by key (`policies/main/17/manifests/12.json`). Blocking calls: run them in a thread."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object, replacing any other. Raises StoreError."""

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


class DividedStore:
    """A store whose secrets lie in another: objects below PRIVATE there, all others in `data`."""

    def __init__(self, data: Store, secrets: Store) -> None:
        self._data = data
        self._secrets = secrets

    def __repr__(self) -> str:
        return f"{self._data!r} with keys in {self._secrets!r}"

    def put(self, key: str, data: bytes) -> None:
        """Store an object, replacing any other. Raises StoreError."""
        self._of(key).put(key, data)

    def get(self, key: str) -> bytes:
        """The whole object. Raises NotInStore, StoreError."""
        return self._of(key).get(key)

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


def open_store(url: str, *, base: Path) -> Store:
    """The store at `url`: a folder (relative ones below `base`), file:///folder, or s3://bucket/prefix.

    S3's endpoint, region and credentials come from the environment: see `infra.store.s3`. Raises ConfigError.
    """
    if not url:
        raise ConfigError("[store] url: got an empty string, expected a folder or s3://bucket/prefix")
    if "://" not in url:
        from infra.store.directory import DirectoryStore

        return DirectoryStore(base / Path(url).expanduser())
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc:
        from infra.store.directory import DirectoryStore

        return DirectoryStore(Path(unquote(parts.path)))
    if parts.scheme != "s3" or not parts.hostname or parts.query or parts.username:
        raise ConfigError(f"[store] url: got {_without_secrets(url)!r}, expected a folder or s3://bucket/prefix")
    from infra.store.s3 import open_s3

    return open_s3(parts.netloc, parts.path.strip("/"))


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


def _without_secrets(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
