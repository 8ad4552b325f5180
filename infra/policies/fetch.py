"""Fetches published versions and keeps the newest in memory as the base of the next delta.

Nothing unverified leaves this module: the event's sha256 vouches for the manifest, the manifest for every object and
for the state of every tensor, and all values are finite. What fails is PolicyRefused, naming the tensor or the object,
and the shadow copy stays as it was; where the held copy cannot be moved on, the version is rebuilt from its anchor.
"""

import logging
from collections.abc import Mapping

import msgspec

from infra.observe.failpoint import reach
from infra.policies.adapter import Adapter, described
from infra.policies.delta import decode_tensor
from infra.policies.manifest import (
    DeltaPart,
    PolicyManifest,
    Shard,
    TensorEntry,
    WeightSource,
    decode_manifest,
    entries_of,
    first_difference,
    hash_tensor,
    other_adapter,
    sha256_hex,
)
from infra.policies.policy import Policy
from infra.policies.tensors import Tensor, first_not_finite, load_tensors
from infra.policies.threads import in_threads
from infra.store.store import Store
from schemas.errors import NotInStore, PolicyRefused
from schemas.records import PolicyEvent

log = logging.getLogger(__name__)

MAX_STEPS = 1000  # of a chain of deltas; a longer one cannot be genuine


class HeldWeights(msgspec.Struct, frozen=True):
    """The shadow copy: tensors in host memory, their hashes, and what they are an adapter of."""

    version: int
    tensors: Mapping[str, Tensor]
    entries: tuple[TensorEntry, ...]
    adapter: Adapter | None = None


class PolicyFetcher:
    """Follows one policy. One caller at a time; `fetch` blocks, so run it in a thread."""

    def __init__(self, store: Store, policy: str) -> None:
        self._store = store
        self._policy = policy
        self._held: HeldWeights | None = None
        self._serving: Mapping[str, str] = {}

    @property
    def version(self) -> int:
        """Version of the shadow copy, -1 before the first."""
        return -1 if self._held is None else self._held.version

    def confirm(self, policy: Policy) -> None:
        """The engine now serves `policy`: later `touched` names count from it. Until then, every tensor is touched."""
        if self._held is not None and self._held.tensors is policy.tensors:
            self._serving = _hashes(self._held.entries)
        else:
            self._serving = _hashes(entries_of(policy.tensors))

    def fetch(self, event: PolicyEvent) -> Policy:
        """The version an event names, verified; it becomes the shadow copy.

        Raises PolicyRefused (the shadow copy stays) and StoreError (retriable; nothing changed).
        """
        if event.policy != self._policy or not event.manifest:
            raise ValueError(f"event: got {event.event} of {event.policy!r}, expected a version of {self._policy!r}")
        what = f"version {event.version} of {event.policy}"
        try:
            reach("weights.before_fetch")
            manifest, _ = read_manifest(self._store, event.manifest, event.manifest_sha256)
            if (manifest.policy, manifest.version) != (event.policy, event.version):
                raise PolicyRefused(f"{event.manifest} is version {manifest.version} of {manifest.policy}")
            _check_listing(manifest, self._held)
            tensors = self._obtain(manifest)
            reach("weights.after_fetch")
        except NotInStore as error:
            raise PolicyRefused(f"{what}: incomplete: {error}") from error
        except PolicyRefused as error:
            raise PolicyRefused(f"{what}: {error}") from error
        self._held = HeldWeights(manifest.version, tensors, manifest.tensors, manifest.adapter)
        touched = frozenset(entry.name for entry in manifest.tensors if self._serving.get(entry.name) != entry.xxh3)
        return Policy(
            version=manifest.version,
            tensors=tensors,
            touched=touched,
            probe=manifest.probe,
            adapter=manifest.adapter,
        )

    def _obtain(self, manifest: PolicyManifest) -> dict[str, Tensor]:
        if self._held is not None and self._held.version <= manifest.version:
            try:
                return rebuild(self._store, manifest, self._held)
            except (PolicyRefused, NotInStore) as error:
                log.warning("held copy not usable: version=%d held=%d: %s", manifest.version, self._held.version, error)
        return rebuild(self._store, manifest, None)


def read_manifest(store: Store, key: str, sha256: str | None = None) -> tuple[PolicyManifest, str]:
    """A manifest and its sha256. Raises PolicyRefused where it is not the one expected, NotInStore, StoreError."""
    data = store.get(key)
    digest = sha256_hex(data)
    if sha256 is not None and digest != sha256:
        raise PolicyRefused(f"{key}: sha256 is {digest[:16]}…, expected {sha256[:16]}…")
    try:
        return decode_manifest(data), digest
    except ValueError as error:
        raise PolicyRefused(f"{key}: {error}") from error


def read_anchor(store: Store, manifest: PolicyManifest) -> dict[str, Tensor]:
    """The full tensors of a version that has an anchor, verified. Raises PolicyRefused, NotInStore, StoreError."""
    source = manifest.source("anchor")
    if source is None:
        raise PolicyRefused(f"version {manifest.version} has no anchor")
    tensors: dict[str, Tensor] = {}
    for shard, data in zip(source.shards, read_shards(store, manifest, source), strict=True):
        try:
            tensors |= load_tensors(data)
        except ValueError as error:
            raise PolicyRefused(f"{shard.key}: {error}") from error
    return verified(manifest, tensors)


def rebuild(store: Store, manifest: PolicyManifest, held: HeldWeights | None) -> dict[str, Tensor]:
    """The tensors of `manifest`: from the held copy where its deltas lead there, else from the nearest anchor."""
    chain: list[tuple[PolicyManifest, WeightSource]] = []
    current = manifest
    while True:
        if held is not None and current.version <= held.version:
            if difference := first_difference(held.entries, current.tensors, values=True):
                raise PolicyRefused(f"held version {held.version} does not lead to {current.version}: {difference}")
            tensors = dict(held.tensors)
            break
        source = _choose(current, held)
        if source is None:
            tensors = read_anchor(store, current)
            break
        if source.base >= current.version or len(chain) >= MAX_STEPS:
            raise PolicyRefused(f"the chain of deltas does not end: version {current.version} has base {source.base}")
        chain.append((current, source))
        current, _ = read_manifest(store, source.base_manifest, source.base_sha256)
        _check_base(current, source, manifest)
    for step, source in reversed(chain):
        tensors = _apply(store, step, source, tensors)
    return verified(manifest, tensors)


def verified(manifest: PolicyManifest, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, if they are exactly the manifest's and finite. Raises PolicyRefused naming the first that is not."""
    if difference := first_difference(entries_of(tensors), manifest.tensors, values=True):
        raise PolicyRefused(difference)
    if wrong := first_not_finite(tensors):
        raise PolicyRefused(f"{wrong} holds values that are not finite")
    return tensors


def _choose(manifest: PolicyManifest, held: HeldWeights | None) -> WeightSource | None:
    """The delta that leads closest to the held version without passing it; None for the anchor."""
    deltas = [source for source in manifest.sources if source.kind == "delta"]
    within = [source for source in deltas if held is not None and source.base >= held.version]
    if within:
        return min(within, key=lambda source: source.base)
    if manifest.source("anchor") is not None:
        return None
    return min(deltas, key=lambda source: source.base, default=None)


def _apply(
    store: Store, manifest: PolicyManifest, source: WeightSource, old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One step of the chain, its changed tensors verified."""
    shards = read_shards(store, manifest, source)
    expected = {entry.name: entry for entry in manifest.tensors}

    def moved(part: DeltaPart) -> Tensor:
        if part.tensor not in old or part.tensor not in expected:
            raise PolicyRefused(f"{part.tensor} changes in version {manifest.version}, which does not have it")
        try:
            tensor = decode_tensor(part.encoder, slice_of(shards, part), old[part.tensor])
        except ValueError as error:
            raise PolicyRefused(f"{part.tensor} in version {manifest.version}: {error}") from error
        if hash_tensor(tensor) != expected[part.tensor].xxh3:
            raise PolicyRefused(f"{part.tensor} has another hash than version {manifest.version} says")
        return tensor

    if len(names := {part.tensor for part in source.parts}) != len(source.parts):
        raise PolicyRefused(
            f"version {manifest.version}: a tensor changes twice ({len(source.parts)} parts, {len(names)} names)"
        )
    return dict(old) | dict(zip((part.tensor for part in source.parts), in_threads(moved, source.parts), strict=True))


def read_shards(store: Store, manifest: PolicyManifest, source: WeightSource) -> list[memoryview]:
    """The objects of one source, verified. Raises PolicyRefused, NotInStore, StoreError."""
    return [memoryview(one) for one in in_threads(lambda shard: _read_shard(store, manifest, shard), source.shards)]


def slice_of(shards: list[memoryview], part: DeltaPart) -> memoryview:
    """The payload of one tensor. ValueError where the objects do not hold it."""
    if not 0 <= part.shard < len(shards) or min(part.offset, part.num_bytes) < 0:
        raise ValueError(f"shard {part.shard} of {len(shards)}")
    payload = shards[part.shard][part.offset : part.offset + part.num_bytes]
    if len(payload) != part.num_bytes:
        raise ValueError(f"{len(payload)} bytes at {part.offset}, expected {part.num_bytes}")
    return payload


def _read_shard(store: Store, manifest: PolicyManifest, shard: Shard) -> bytes:
    _check_within(manifest, shard.key)
    data = store.get(shard.key)
    if len(data) != shard.num_bytes or sha256_hex(data) != shard.sha256:
        raise PolicyRefused(f"{shard.key}: {len(data)} bytes with another sha256 than its manifest says")
    return data


def _check_base(base: PolicyManifest, source: WeightSource, manifest: PolicyManifest) -> None:
    _check_within(manifest, source.base_manifest)
    if base.version != source.base or base.policy != manifest.policy:
        raise PolicyRefused(f"{source.base_manifest} is version {base.version}, expected {source.base}")
    if difference := other_adapter(base.adapter, manifest) or first_difference(
        base.tensors, manifest.tensors, values=False
    ):
        raise PolicyRefused(f"{source.base_manifest}: {difference}")


def _check_within(manifest: PolicyManifest, key: str) -> None:
    if not key.startswith(f"policies/{manifest.policy}/"):
        raise PolicyRefused(f"{key} is not an object of {manifest.policy}")


def _check_listing(manifest: PolicyManifest, held: HeldWeights | None) -> None:
    """A policy keeps its tensors for life: their names, dtypes and shapes never change, nor the adapter they are of."""
    if not manifest.tensors or len({entry.name for entry in manifest.tensors}) != len(manifest.tensors):
        raise PolicyRefused("its list of tensors is empty, or names one twice")
    if held is None:
        return
    if held.adapter != manifest.adapter:
        raise PolicyRefused(
            f"it is {described(manifest.adapter)}, expected {described(held.adapter)} as in version {held.version}, held now"
        )
    if difference := first_difference(manifest.tensors, held.entries, values=False):
        raise PolicyRefused(f"{difference} (as in version {held.version}, held now)")


def _hashes(entries: tuple[TensorEntry, ...]) -> dict[str, str]:
    return {entry.name: entry.xxh3 for entry in entries}
