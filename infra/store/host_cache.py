"""Objects that are named by their content, kept in a folder of one machine for all processes there.

    <folder>/objects/<name>          an object; its name says how its digest begins: see `infra.store.store.name_of`
    <folder>/objects/<name>.part     one that is being written, or that a killed process left
    <folder>/locks/<00 to ff>        who fetches the objects whose digest's letters begin so
    <folder>/locks/room              who makes room

Guarantees: what comes out has the digest that was asked for, or is what was fetched just now. Each byte is hashed once, in the
pass that reads it, and the digest comes out with the bytes, to be compared with a manifest. A caller that asks while another
fetches waits for it, at most `wait_s`; a process that dies lets go at once, since the kernel holds its locks, and what it left
unfinished goes when the next one begins, or adds an object. What the folder holds, unfinished objects included, stays within
`max_bytes`, MAX_OBJECTS and what the disk can spare: the longest unused goes first. Where the folder cannot be used, or its
disk is full, everything works without it: counted, and logged once. Nothing is synced: what a machine loses with its power has
another digest then.
"""

import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from infra.files import free_and_usable, locked
from infra.observe.metrics import Metrics
from infra.store.directory import read_hashed
from infra.store.store import DIGEST_LETTERS, Hashed, Store, WrappedStore, check_key, name_of

log = logging.getLogger(__name__)

_NAMED_BY_CONTENT = re.compile(
    rf"policies/.+/(?:anchors|deltas|slices)/[^/]+/(blake3-[0-9a-f]{{{DIGEST_LETTERS}}})\.[a-z]+"
)
MAX_OBJECTS = 10_000  # each is looked at when one is added
LEFT_FREE = 0.05  # of the disk, for others who write there
WAIT_S = 120.0


class HostCache:
    """The folder, as one process uses it. Threads may share it. Made by the first that keeps something.

    wait_s: how long another may take to fetch an object before it is fetched here too. left_free: share of the disk.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, metrics: Metrics, wait_s: float = WAIT_S, left_free: float = LEFT_FREE
    ) -> None:
        self._objects = folder / "objects"
        self._locks = folder / "locks"
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._wait_s = wait_s
        self._left_free = left_free
        self._warned = threading.Event()
        self._remove_unfinished()
        metrics.gauge("host_cache_max_bytes").set(max_bytes)
        self._measure()

    def __repr__(self) -> str:
        return f"HostCache({str(self._objects.parent)!r})"

    def get(self, name: str, fetch: Callable[[], Hashed]) -> Hashed:
        """The object of this name and its digest, fetched where it is not here. Raises what `fetch` raises."""
        if (found := self._read(name)) is not None:
            return found
        with ExitStack() as lock:
            try:
                self._objects.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._locks.mkdir(exist_ok=True, mode=0o700)
                lock.enter_context(locked(self._lock(name), self._wait_s))
            except OSError as error:  # TimeoutError, too: another process fetches it for too long
                self._go_without(str(error))
                self._metrics.counter("host_cache_misses").inc()
                return fetch()
            if (found := self._read(name)) is not None:
                return found
            data, digest = fetch()
            self._metrics.counter("host_cache_misses").inc()
            if name_of(digest) == name:
                self._keep(name, data)
            return data, digest

    def drop(self, name: str) -> None:
        with suppress(OSError):
            (self._objects / name).unlink()

    def _read(self, name: str) -> Hashed | None:
        path = self._objects / name
        try:
            data, digest = read_hashed(path)
        except OSError:
            return None
        if name_of(digest) != name:
            self._metrics.counter("host_cache_damaged").inc()
            log.warning("host_cache_damaged object=%s bytes=%d: it is fetched again", path, len(data))
            self.drop(name)
            return None
        self._metrics.counter("host_cache_hits").inc()
        self._measure()
        with suppress(OSError):
            os.utime(path)  # used now: it goes last
        return data, digest

    def _keep(self, name: str, data: bytes | memoryview) -> None:
        """Write the object, room made for it before. Its lock is held."""
        part = self._objects / f"{name}.part"
        try:
            with locked(self._locks / "room", self._wait_s):
                self._make_room(len(data))
                with open(part, "wb") as file:
                    file.truncate(len(data))
            with open(part, "r+b") as file:
                file.write(data)
            os.replace(part, self._objects / name)
            self._measure()
        except OSError as error:
            part.unlink(missing_ok=True)
            self._go_without(str(error))

    def _make_room(self, num_bytes: int) -> None:
        """Remove the longest unused objects. Raises OSError where the bounds allow no object of this size."""
        self._remove_unfinished()
        held = sorted(self._held())
        free, usable = free_and_usable(self._objects)
        total = sum(size for _, size, _ in held)
        most = min(self._max_bytes, int(total + free - self._left_free * usable))
        if num_bytes > most:
            raise OSError(f"an object has {num_bytes:,} bytes, and store.cache_gb and the disk allow {most:,} in all")
        for gone, (_, size, path) in enumerate(held):
            if total + num_bytes <= most and len(held) - gone < MAX_OBJECTS:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _remove_unfinished(self) -> None:
        """Remove unfinished files that no process writes any more: a writer holds their lock."""
        for part in self._objects.glob("*.part"):
            with suppress(OSError), locked(self._lock(part.stem), 0.0):
                part.unlink()

    def _measure(self) -> None:
        self._metrics.gauge("host_cache_bytes").set(sum(size for _, size, _ in self._held()))

    def _held(self) -> list[tuple[float, int, Path]]:
        held = []
        with suppress(OSError):
            for entry in os.scandir(self._objects):
                with suppress(FileNotFoundError):  # another process made room
                    found = entry.stat(follow_symlinks=False)
                    held.append((found.st_mtime, found.st_size, Path(entry.path)))
        return held

    def _lock(self, name: str) -> Path:
        return self._locks / name.rpartition("-")[2][:2]

    def _go_without(self, reason: str) -> None:
        self._metrics.counter("host_cache_skipped").inc()
        if not self._warned.is_set():
            self._warned.set()
            log.warning("host_cache_skipped cache=%r: weights are read from the store instead: %s", self, reason)


class CachedStore(WrappedStore):
    """A store whose weights are also kept on this machine, so that each object crosses the network once for all engines here.

    Only objects that are named by their content are kept: the anchors, slices and deltas of policies. Such a name means the
    same bytes in every store and for every version. Everything else is read from the store each time, manifests too, and
    so are parts of objects, since a part has no digest.
    """

    def __init__(self, inner: Store, cache: HostCache) -> None:
        super().__init__(inner)
        self._cache = cache

    def __repr__(self) -> str:
        return f"{self.inner!r} with {self._cache!r}"

    def get(self, key: str) -> bytes:
        return bytes(self.get_hashed(key)[0]) if _NAMED_BY_CONTENT.fullmatch(check_key(key)) else self.inner.get(key)

    def get_hashed(self, key: str) -> Hashed:
        named = _NAMED_BY_CONTENT.fullmatch(check_key(key))
        if named is None:
            return self.inner.get_hashed(key)
        return self._cache.get(named[1], lambda: self.inner.get_hashed(key))

    def delete(self, key: str) -> None:
        self.inner.delete(key)
        if named := _NAMED_BY_CONTENT.fullmatch(key):
            self._cache.drop(named[1])
