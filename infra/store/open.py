"""Opening the store that a URL names, and stores around it: one counts its traffic, one keeps secrets elsewhere."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from infra.observe.metrics import Metrics
from infra.store.directory import DirectoryStore
from infra.store.s3 import open_s3
from infra.store.store import PRIVATE, Store, WrappedStore
from schemas.errors import ConfigError, NotInStore, StoreError


def open_store(url: str, *, base: Path) -> Store:
    """The store at `url`: a folder (relative ones below `base`), file:///folder, or s3://bucket/prefix.

    S3's endpoint, region and credentials come from the environment: see `infra.store.s3`. Raises ConfigError.
    """
    if not url:
        raise ConfigError("[store] url: got an empty string, expected a folder or s3://bucket/prefix")
    if "://" not in url:
        return DirectoryStore(base / Path(url).expanduser())
    parts = urlsplit(url)
    more = parts.query or parts.fragment
    if parts.scheme == "file" and not parts.netloc and not more:
        return DirectoryStore(Path(unquote(parts.path)))
    if parts.scheme != "s3" or not parts.hostname or more or parts.username:
        scheme, _, rest = url.partition("://")
        shown = f"{scheme}://{rest.rpartition('@')[2]}"  # without secrets
        raise ConfigError(f"[store] url: got {shown!r}, expected a folder or s3://bucket/prefix")
    return open_s3(parts.netloc, parts.path.strip("/"))


T = TypeVar("T")


class MeasuredStore(WrappedStore):
    """Counts bytes, seconds and failures of puts and gets. Concurrent requests each count their own seconds."""

    def __init__(self, inner: Store, metrics: Metrics) -> None:
        super().__init__(inner)
        self._metrics = metrics

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._counted("put", lambda: self.inner.put(key, data), lambda done: len(data))

    def get(self, key: str) -> bytes:
        return self._counted("get", lambda: self.inner.get(key), len)

    def read(self, key: str, start: int, length: int) -> bytes:
        return self._counted("get", lambda: self.inner.read(key, start, length), len)

    def _counted(self, verb: str, request: Callable[[], T], num_bytes: Callable[[T], int]) -> T:
        began = time.monotonic()
        try:
            answer = request()
        except StoreError as error:
            if not isinstance(error, NotInStore):
                self._metrics.counter("store_failed", verb=verb).inc()
            raise
        self._metrics.counter("store_bytes", verb=verb).inc(num_bytes(answer))
        self._metrics.counter("store_seconds", verb=verb).inc(time.monotonic() - began)
        return answer


class DividedStore(WrappedStore):
    """Objects below PRIVATE in one store, all others in another."""

    def __init__(self, data: Store, secrets: Store) -> None:
        super().__init__(data)
        self._secrets = secrets

    def __repr__(self) -> str:
        return f"{self.inner!r} with keys in {self._secrets!r}"

    def holder(self, key: str) -> Store:
        return self._secrets if key.startswith(PRIVATE) else self.inner

    def keys(self, prefix: str) -> Iterator[str]:
        if prefix.startswith(PRIVATE):
            return self._secrets.keys(prefix)
        public = (key for key in self.inner.keys(prefix) if not key.startswith(PRIVATE))
        secret = [key for folder in PRIVATE if folder.startswith(prefix) for key in self._secrets.keys(folder)]
        return iter(sorted([*public, *secret])) if secret else public
