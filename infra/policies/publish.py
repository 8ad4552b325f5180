"""Publishes a version to the store: shards, then the manifest; the caller then sends the event.

A version is visible only complete: nothing names it before its manifest, and its manifest is the last object written.
Publishing the same (token, version) again returns the same event; with other content it is refused. Where several processes
have the tensors, each puts its own (`infra.policies.share`), and the one that leads decides and writes the manifest.

The first version of a lease is an anchor, and each that changes too much for a delta. Every other one is a delta from its
parent and a slice: a sixteenth of the tensors, whole. So no version costs much more than another, and a late joiner reads the
slices of sixteen versions and the deltas between them, however old the anchor is.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from infra.observe.failpoint import reach
from infra.policies.adapter import Adapter
from infra.policies.chain import NUM_SLICES, names_of_slice, next_index, read_manifest
from infra.policies.manifest import (
    DeltaPart,
    PolicyManifest,
    Shard,
    Slice,
    TensorEntry,
    WeightSource,
    encode_manifest,
    first_difference,
    folder_of,
    manifest_key,
    other_adapter,
    sha256_hex,
)
from infra.policies.policy import Probe
from infra.policies.share import (
    SHARD_BYTES,
    DeltaSize,
    HashedTensors,
    Share,
    ShareLook,
    StoredShare,
    VersionTensors,
    WantedObjects,
)
from infra.policies.tensors import ITEM_BYTES, Tensor
from infra.store.store import Store, check_key
from schemas.errors import NotInStore, PolicyRefused
from schemas.records import PolicyEvent

log = logging.getLogger(__name__)

DENSE_SHARE = 0.6  # of 32-bit values changed: such a delta weighs more than half an anchor however it is encoded
CHANGED_SHARE = 1 / 8  # of the values or the bytes: where a chain of such deltas would cost more than an anchor


class Parent(msgspec.Struct, frozen=True):
    """The parent as published: the delta's base. manifest: of it. key: of the manifest in the store. sha256: likewise,
    of its bytes.
    """

    manifest: PolicyManifest
    key: str
    sha256: str


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be published.

    policy: its name. token: of the trainer's lease. version: higher than any before. parent: the version it was trained
    from, -1 for none. step: the last one it contains. adapter: of which the tensors are, None for the whole model.

    Example: NewVersion(policy="main", token=17, version=8, parent=7, step=31)
    """

    policy: str
    token: int
    version: int
    parent: int
    step: int
    adapter: Adapter | None = None


class Shares(Protocol):
    """All processes that have tensors of a version, asked for the same at once. Each answer is a list, one of each. Raises what
    the first of them raised.
    """

    def look(self) -> list[ShareLook]:
        """See Share."""

    def encode(self, *, delta: bool) -> list[DeltaSize]:
        """See Share."""

    def put(self, wanted: WantedObjects) -> list[StoredShare]:
        """See Share."""


class OneShare:
    """Shares of a single process."""

    def __init__(self, share: Share) -> None:
        self._share = share

    def look(self) -> list[ShareLook]:
        """See Shares."""
        return [self._share.look()]

    def encode(self, *, delta: bool) -> list[DeltaSize]:
        """See Shares."""
        return [self._share.encode(delta=delta)]

    def put(self, wanted: WantedObjects) -> list[StoredShare]:
        """See Shares."""
        return [self._share.put(wanted)]


def publish(
    store: Store,
    new: NewVersion,
    tensors: Mapping[str, Tensor] | VersionTensors,
    *,
    previous: Mapping[str, Tensor] | VersionTensors | None,
    probe: Probe | None,
    shard_bytes: int = SHARD_BYTES,
) -> PolicyEvent:
    """Store a version that one process has whole: see `publish_shares`.

    previous: the tensors of its parent; None makes an anchor. Those that are VersionTensors are not hashed again.
    """
    share = Share(store, _hashed(tensors), None if previous is None else _hashed(previous), shard_bytes)
    return publish_shares(store, new, OneShare(share), probe)


def publish_shares(store: Store, new: NewVersion, shares: Shares, probe: Probe | None) -> PolicyEvent:
    """Store a version and return the event to send. Blocking: run it in a thread.

    Raises PolicyRefused where a tensor is not finite or the version exists with other content, StoreError, and ValueError
    where the parent's tensors are not what was published.
    """
    folder = check_key(folder_of(new.policy, new.token))
    looks = shares.look()
    entries = _sorted([one.entries for one in looks])
    if "/" in new.policy or not entries:
        raise ValueError(f"publish: got policy {new.policy!r} with {len(entries)} tensors, expected a name without '/'")
    if (existing := _existing(store, new, entries)) is not None:
        return existing
    parent = _parent(store, new, looks, entries)
    num_bytes = {one.name: math.prod(one.shape) * ITEM_BYTES[one.dtype] for one in entries}
    is_dense = sum(one.dense_bytes for one in looks) > DENSE_SHARE * sum(num_bytes.values())
    sizes = shares.encode(delta=parent is not None and not is_dense)
    if wrong := next((one.not_finite for one in sizes if one.not_finite), ""):
        raise PolicyRefused(f"version {new.version}: {wrong} holds values that are not finite")
    has_delta, has_anchor = (False, True) if parent is None or is_dense else _ways(sizes, entries, num_bytes)
    wanted = WantedObjects(
        folder=folder,
        version=new.version,
        parent=new.parent,
        delta=has_delta,
        anchor=has_anchor,
        slice=names_of_slice(num_bytes, next_index(parent.manifest.slice)) if parent and not has_anchor else (),
    )
    manifest = _manifest(new, entries, parent, wanted, shares.put(wanted), sizes, probe)
    data = encode_manifest(manifest)
    reach("weights.before_manifest")
    store.put(manifest_key(new.policy, new.token, new.version), data)
    reach("weights.after_manifest")
    return _event(manifest, sha256_hex(data))


def _hashed(tensors: Mapping[str, Tensor] | VersionTensors) -> VersionTensors:
    if isinstance(tensors, Mapping) and not isinstance(tensors, HashedTensors):
        return HashedTensors(tensors)
    return tensors


def _sorted(parts: Iterable[Iterable[TensorEntry]]) -> tuple[TensorEntry, ...]:
    """The manifest's list of tensors, of those of each process."""
    return tuple(sorted((one for part in parts for one in part), key=lambda one: one.name))


def _existing(store: Store, new: NewVersion, entries: tuple[TensorEntry, ...]) -> PolicyEvent | None:
    """The event of this version where it was published before with this content."""
    try:
        manifest, digest = read_manifest(store, manifest_key(new.policy, new.token, new.version))
    except NotInStore:
        return None
    if difference := other_adapter(new.adapter, manifest) or first_difference(entries, manifest.tensors, values=True):
        raise PolicyRefused(
            f"version {new.version} of {new.policy} is published already, under token {new.token}: {difference}"
        )
    return _event(manifest, digest)


def _parent(store: Store, new: NewVersion, looks: list[ShareLook], entries: tuple[TensorEntry, ...]) -> Parent | None:
    """The base of a delta; None where there is none, as at the first version of a lease."""
    before = [one.parent for one in looks if one.parent is not None]
    if len(before) < len(looks) or new.parent < 0:
        return None
    key = manifest_key(new.policy, new.token, new.parent)
    try:
        manifest, digest = read_manifest(store, key)
    except NotInStore:
        return None
    except PolicyRefused as error:
        log.warning("parent not readable, publishing an anchor: %s", error)
        return None
    if difference := first_difference(_sorted(before), manifest.tensors, values=True):
        raise ValueError(f"previous: not version {new.parent} as published: {difference}")
    if difference := other_adapter(new.adapter, manifest) or first_difference(entries, manifest.tensors, values=False):
        raise ValueError(f"tensors: not those of version {new.parent}: {difference}")
    return Parent(manifest, key, digest)


def _ways(sizes: list[DeltaSize], entries: tuple[TensorEntry, ...], num_bytes: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether a delta leads to the version, and whether an anchor does."""
    full_bytes, delta_bytes = sum(num_bytes.values()), sum(one.num_bytes for one in sizes)
    if delta_bytes > full_bytes // 2:
        return False, True
    num_values = sum(math.prod(one.shape) for one in entries)
    changed = sum(one.num_changed for one in sizes) / max(num_values, 1)
    return True, max(changed, delta_bytes / max(full_bytes, 1)) > CHANGED_SHARE


def _manifest(
    new: NewVersion,
    entries: tuple[TensorEntry, ...],
    parent: Parent | None,
    wanted: WantedObjects,
    puts: list[StoredShare],
    sizes: list[DeltaSize],
    probe: Probe | None,
) -> PolicyManifest:
    sources = _sources(parent, wanted, puts, sum(one.num_changed for one in sizes))
    since = None if parent is None or wanted.anchor else parent.manifest
    sliced = None
    if since is not None:
        shards = tuple(one for put in puts for one in put.slice)
        sliced = Slice(index=next_index(since.slice), count=NUM_SLICES, names=wanted.slice, shards=shards)
    return PolicyManifest(
        policy=new.policy,
        token=new.token,
        version=new.version,
        parent=new.parent,
        step=new.step,
        anchor=new.version if since is None else since.anchor,
        chain_bytes=0 if since is None else since.chain_bytes + sources[0].num_bytes,
        tensors=entries,
        sources=sources,
        probe=probe,
        adapter=new.adapter,
        slice=sliced,
    )


def _sources(
    parent: Parent | None, wanted: WantedObjects, puts: list[StoredShare], num_changed: int
) -> tuple[WeightSource, ...]:
    """The ways that lead to a version, the delta from its parent first."""
    found = []
    if wanted.delta and parent is not None:
        parts: list[DeltaPart] = []
        shards: list[Shard] = []
        for put in puts:
            parts += [msgspec.structs.replace(one, shard=len(shards) + one.shard) for one in put.parts]
            shards += put.delta
        found.append(
            WeightSource(
                kind="delta",
                shards=tuple(shards),
                base=parent.manifest.version,
                base_manifest=parent.key,
                base_sha256=parent.sha256,
                parts=tuple(parts),
                num_changed=num_changed,
            )
        )
    if wanted.anchor:
        found.append(WeightSource(kind="anchor", shards=tuple(one for put in puts for one in put.anchor)))
    return tuple(found)


def _event(manifest: PolicyManifest, digest: str) -> PolicyEvent:
    """The same event for the same manifest.

    stats: bytes a follower of the parent has to read, bytes of all tensors, 1 where there is an anchor, and the share
    of values that changed where that was counted.
    """
    delta = manifest.source("delta", manifest.parent)
    source = delta or manifest.sources[0]
    num_values = {entry.name: math.prod(entry.shape) for entry in manifest.tensors}
    full_bytes = sum(num_values[entry.name] * ITEM_BYTES[entry.dtype] for entry in manifest.tensors)
    stats = {
        "bytes": float(source.num_bytes),
        "full_bytes": float(full_bytes),
        "anchor": float(manifest.anchor == manifest.version),
    }
    if delta is not None:
        stats["changed_share"] = delta.num_changed / max(sum(num_values.values()), 1)
    return PolicyEvent(
        event="published",
        policy=manifest.policy,
        version=manifest.version,
        parent=manifest.parent,
        token=manifest.token,
        manifest=manifest_key(manifest.policy, manifest.token, manifest.version),
        manifest_sha256=digest,
        step=manifest.step,
        stats=stats,
    )
