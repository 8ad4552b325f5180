"""Publishes a version to the store: shards, then the manifest; the caller then sends the event.

A version is visible only complete: nothing names it before its manifest, and its manifest is the last object written.
Publishing the same (token, version) again returns the same event; with other content it is refused.

The first version of a lease is an anchor, as is each that changes too much for a delta, and each sixteenth in a row. Every
other version is a delta from its parent; anchors have one too, unless nearly all of it changed. So a late joiner reads an
anchor and at most fifteen deltas.
"""

import logging
import math
from collections.abc import Mapping

import msgspec

from infra.observe.failpoint import reach
from infra.policies.chain import ANCHOR_EVERY, read_manifest
from infra.policies.manifest import (
    PolicyManifest,
    TensorEntry,
    WeightSource,
    encode_manifest,
    first_difference,
    folder_of,
    manifest_key,
    other_adapter,
    sha256_hex,
)
from infra.policies.objects import (
    SHARD_BYTES,
    EncodedTensors,
    HashedTensors,
    StoredObjects,
    VersionObjects,
    WantedObjects,
)
from infra.policies.policy import Adapter, Probe
from infra.policies.tensors import ITEM_BYTES, Tensor
from infra.store.store import Store, check_key
from schemas.errors import NotInStore, PolicyRefused
from schemas.records import PolicyEvent

log = logging.getLogger(__name__)

CHANGED_SHARE = 1 / 8  # of the values or the bytes: a chain of larger deltas would cost more than an anchor


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version to publish. policy: its name. token: of the lease. version: higher than any before. parent: -1 for none.

    step: the last one it contains. adapter: of which the tensors are, None for the whole model.
    """

    policy: str
    token: int
    version: int
    parent: int
    step: int
    adapter: Adapter | None = None


def publish(
    store: Store,
    new: NewVersion,
    tensors: Mapping[str, Tensor],
    *,
    previous: Mapping[str, Tensor] | None,
    probe: Probe | None,
    shard_bytes: int = SHARD_BYTES,
) -> PolicyEvent:
    """Store a version and return the event to send. Blocking: run it in a thread.

    previous: the tensors of its parent; None makes an anchor. HashedTensors are not hashed again.
    Raises PolicyRefused where a tensor is not finite or the version exists with other content, StoreError, and ValueError
    where the parent's tensors are not what was published.
    """
    folder = check_key(folder_of(new.policy, new.token))
    objects = VersionObjects(store, _hashed(tensors), None if previous is None else _hashed(previous), shard_bytes)
    encoded = objects.encode()
    entries = encoded.entries
    if "/" in new.policy or not entries:
        raise ValueError(f"publish: got policy {new.policy!r} with {len(entries)} tensors, expected a name without '/'")
    if (existing := _existing(store, new, entries)) is not None:
        return existing
    parent, parent_sha256 = _parent(store, new, encoded)
    if encoded.not_finite:
        raise PolicyRefused(f"version {new.version}: {encoded.not_finite} holds values that are not finite")
    has_delta, has_anchor = (False, True) if parent is None else _ways(parent, encoded)
    wanted = WantedObjects(
        folder=folder,
        version=new.version,
        parent=new.parent,
        delta=has_delta,
        anchor=has_anchor,
    )
    since = None if has_anchor else parent
    manifest = PolicyManifest(
        policy=new.policy,
        token=new.token,
        version=new.version,
        parent=new.parent,
        step=new.step,
        anchor=new.version if since is None else since.anchor,
        num_deltas=0 if since is None else since.num_deltas + 1,
        tensors=entries,
        sources=_sources(wanted, objects.put(wanted), new, parent_sha256, encoded.num_changed),
        probe=probe,
        adapter=new.adapter,
    )
    data = encode_manifest(manifest)
    reach("weights.before_manifest")
    store.put(manifest_key(new.policy, new.token, new.version), data)
    reach("weights.after_manifest")
    return _event(manifest, sha256_hex(data))


def _hashed(tensors: Mapping[str, Tensor]) -> HashedTensors:
    return tensors if isinstance(tensors, HashedTensors) else HashedTensors(tensors)


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


def _parent(store: Store, new: NewVersion, encoded: EncodedTensors) -> tuple[PolicyManifest | None, str]:
    """The base of a delta and the sha256 of its manifest; None where there is none, as at the first version of a lease."""
    if encoded.parent is None or new.parent < 0:
        return None, ""
    try:
        manifest, digest = read_manifest(store, manifest_key(new.policy, new.token, new.parent))
    except NotInStore:
        return None, ""
    except PolicyRefused as error:
        log.warning("parent not readable, publishing an anchor: %s", error)
        return None, ""
    if difference := first_difference(encoded.parent, manifest.tensors, values=True):
        raise ValueError(f"previous: not version {new.parent} as published: {difference}")
    difference = other_adapter(new.adapter, manifest)
    if difference := difference or first_difference(encoded.entries, manifest.tensors, values=False):
        raise ValueError(f"tensors: not those of version {new.parent}: {difference}")
    return manifest, digest


def _ways(parent: PolicyManifest, encoded: EncodedTensors) -> tuple[bool, bool]:
    """True for each of a delta and an anchor that the version has."""
    num_values = {entry.name: math.prod(entry.shape) for entry in encoded.entries}
    full_bytes = sum(num_values[entry.name] * ITEM_BYTES[entry.dtype] for entry in encoded.entries)
    if encoded.delta_bytes > full_bytes // 2:
        return False, True
    changed = encoded.num_changed / max(sum(num_values.values()), 1)
    is_large = max(changed, encoded.delta_bytes / max(full_bytes, 1)) > CHANGED_SHARE
    return True, is_large or parent.num_deltas + 1 >= ANCHOR_EVERY


def _sources(
    wanted: WantedObjects, stored: StoredObjects, new: NewVersion, parent_sha256: str, num_changed: int
) -> tuple[WeightSource, ...]:
    found = []
    if wanted.delta:
        found.append(
            WeightSource(
                kind="delta",
                shards=stored.delta,
                base=new.parent,
                base_manifest=manifest_key(new.policy, new.token, new.parent),
                base_sha256=parent_sha256,
                parts=stored.parts,
                num_changed=num_changed,
            )
        )
    if wanted.anchor:
        found.append(WeightSource(kind="anchor", shards=stored.anchor))
    return tuple(found)


def _event(manifest: PolicyManifest, digest: str) -> PolicyEvent:
    """Event of a manifest. stats: bytes for a follower of the parent, bytes of all tensors, 1 for an anchor, share of changed
    values.
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
