"""The simulated object store: what one process writes may fail, tear or be its last act.

Watched: an object under `policies/` never changes, and a policy manifest is written after everything it names.
"""

from collections.abc import Iterator

from actors.master.snapshot import series
from infra.policies.manifest import decode_manifest
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas.errors import NotInStore, StoreError
from tests.simulator.faults import Fate, Faults
from tests.simulator.hostile import BOMB
from tests.simulator.scenario import APP
from tests.simulator.virtual_loop import Killed, Process
from tests.simulator.watch import RunWatch

SOUND_READS = 12  # behind one that was altered: who fetches again from the anchor is answered, else nobody ever serves


class ClientStore(Store):
    """The shared store as one process sees it."""

    def __init__(self, shared: MemoryStore, process: Process, faults: Faults, watch: RunWatch) -> None:
        self._shared = shared
        self._process = process
        self._faults = faults
        self._watch = watch
        self._sound_reads = 0  # left
        self._is_actor = process.name.startswith(("explore", "serve", "canary"))

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        self._check_alive()
        fate = self._faults.put_fate()
        if fate is Fate.CRASH_BEFORE:
            self._die()
        if fate is Fate.LOST:
            raise StoreError(f"{key}: not stored (simulated)")
        if fate is Fate.TORN:
            self._shared.put(key, data[: len(data) // 2])
            self._die()
        self._check(key, data)
        self._shared.put(key, data)
        if fate is Fate.CRASH_AFTER:
            self._die()
        if fate is Fate.UNCONFIRMED:
            raise StoreError(f"{key}: not confirmed (simulated)")

    def get(self, key: str) -> bytes:
        """See Store."""
        self._check_alive()
        if self._faults.get_fails():
            raise StoreError(f"{key}: not read (simulated)")
        if key.startswith("policies/") and self._is_actor:
            self._sound_reads -= 1
            if self._sound_reads < 0 and self._faults.get_is_altered():
                self._sound_reads = SOUND_READS
                self._watch.altered[self._process] += 1
                self._watch.happened(self._process, "reads what somebody else put there")
                return BOMB
        return self._shared.get(key)

    def read(self, key: str, start: int, length: int) -> bytes:
        """See Store."""
        return self.get(key)[start : start + length]

    def size(self, key: str) -> int:
        """See Store."""
        return len(self.get(key))

    def keys(self, prefix: str) -> Iterator[str]:
        """See Store."""
        self._check_alive()
        yield from list(self._shared.keys(prefix))

    def delete(self, key: str) -> None:
        """See Store."""
        self._check_alive()
        self._shared.delete(key)

    def _check_alive(self) -> None:
        if self._process.is_dead:
            raise Killed

    def _die(self) -> None:
        self._faults.kill(self._process)
        raise Killed

    def _check(self, key: str, data: bytes) -> None:
        if key.startswith(f"snapshots/{series(APP)}/"):
            self._watch.snapshots[key] = data
        if not key.startswith("policies/"):
            return
        try:
            old = self._shared.get(key)
        except NotInStore:
            old = data
        if old != data and data[: len(old)] != old:  # a torn object may be written anew
            self._watch.complain("I3 one content", f"{key} was written before with other bytes")
        if "/manifests/" not in key:
            return
        for source in decode_manifest(data).sources:
            for shard in source.shards:
                try:
                    whole = len(self._shared.get(shard.key)) == shard.num_bytes
                except NotInStore:
                    whole = False
                if not whole:
                    self._watch.complain("I3 complete", f"{key} was written before {shard.key}")
