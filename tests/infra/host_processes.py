"""What other processes of a machine do in the tests of its cache. Light, since each of them imports it."""

import os
import signal
from pathlib import Path

from infra.observe.metrics import Metrics
from infra.policies.fetch import PolicyFetcher
from infra.store.directory import DirectoryStore
from infra.store.host_cache import CachedStore, HostCache
from infra.store.store import Hashed
from schemas import PolicyEvent


class CountingStore(DirectoryStore):
    """A folder that writes down, for all processes, which object was asked for."""

    def __init__(self, folder: Path, asked: Path) -> None:
        super().__init__(folder)
        self._asked = asked

    def get(self, key: str) -> bytes:
        """The whole object."""
        with self._asked.open("a") as file:
            file.write(f"{key}\n")
        return super().get(key)

    def get_hashed(self, key: str) -> Hashed:
        """The same, hashed."""
        with self._asked.open("a") as file:
            file.write(f"{key}\n")
        return super().get_hashed(key)


def follow(folder: Path, events: list[PolicyEvent]) -> None:
    cache = HostCache(folder / "cache", max_bytes=10_000_000, metrics=Metrics("follower"))
    fetcher = PolicyFetcher(CachedStore(CountingStore(folder / "store", folder / "asked"), cache), "main")
    for event in events:
        fetcher.fetch(event)
    (folder / f"done-{os.getpid()}").write_text(str(fetcher.version))


def fetched_by_a_holder_that_hangs(folder: Path, digest: str) -> None:
    def hang() -> Hashed:
        (folder / "held").touch()
        signal.pause()
        raise AssertionError("it is killed")

    HostCache(folder, max_bytes=1000, metrics=Metrics("holder")).get(digest, hang)
