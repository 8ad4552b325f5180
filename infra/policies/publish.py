"""Publishes a version to the store: shards, then the manifest; the caller then sends the event.

A version is visible only complete: nothing names it before its manifest, and its manifest is the last object written.
Publishing the same (token, version) again returns the same event; with other content it is refused.

The first version of a lease is an anchor, as is each that changes too much for a delta, and each sixteenth in a row. Every
other version is a delta from its parent; anchors have one too, unless nearly all of it changed. So a late joiner reads an
anchor and at most fifteen deltas.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from infra.observe.failpoint import reach
from infra.policies.chain import ANCHOR_EVERY, read_manifest
from infra.policies.delta import Encoded, encode_tensor
from infra.policies.manifest import (
    DeltaPart,
    HashedTensors,
    PolicyManifest,
    Shard,
    TensorEntry,
    WeightSource,
    differing,
    first_difference,
    folder_of,
    manifest_key,
    other_version,
    sha256_hex,
)
from infra.policies.policy import Adapter, Probe
from infra.policies.tensors import ITEM_BYTES, Tensor, in_threads, pieces_of
from infra.store.store import Pieces, Store, check_key, digest_of, joined, name_of
from schemas.errors import NotInStore, PolicyRefused
from schemas.records import PolicyEvent

log = logging.getLogger(__name__)

CHANGED_SHARE = 1 / 8  # of the values or the bytes: a chain of larger deltas would cost more than an anchor
SHARD_BYTES = 128 * 1024 * 1024  # as much as one connection should be asked to begin again
PUT_AT_ONCE = 4  # each over several connections
LEAST_BYTES = 16 * 1024 * 1024  # of whole tensors: less is not worth an object of its own


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
    where `previous` differs from the published parent.
    """
    folder = check_key(folder_of(new.policy, new.token))
    weights, old = _hashed(tensors), None if previous is None else _hashed(previous)
    if "/" in new.policy or not weights:
        raise ValueError(f"publish: got policy {new.policy!r} with {len(weights)} tensors, expected a name without '/'")
    if (existing := _existing(store, new, weights.entries)) is not None:
        return existing
    parent, parent_sha256 = (None, "") if old is None else _parent(store, new, weights, old)
    if weights.not_finite:
        raise PolicyRefused(f"version {new.version}: {weights.not_finite} holds values that are not finite")
    changes = _encoded(weights, old) if parent is not None and old is not None else {}
    has_delta, has_anchor = (False, True) if parent is None else _ways(parent, weights, changes)
    sources: list[WeightSource] = []
    if has_delta:
        shards, parts = _delta_shards(f"{folder}/deltas/{new.parent}-{new.version}", changes, shard_bytes)
        delta = WeightSource(
            kind="delta",
            shards=_put(store, shards),
            base=new.parent,
            base_manifest=manifest_key(new.policy, new.token, new.parent),
            base_sha256=parent_sha256,
            parts=parts,
            num_changed=sum(part.changed for part in changes.values()),
        )
        sources.append(delta)
    if has_anchor:
        anchor = _anchor_shards(f"{folder}/anchors/{new.version}", weights, shard_bytes)
        sources.append(WeightSource(kind="anchor", shards=_put(store, anchor)))
    since = None if has_anchor else parent
    manifest = PolicyManifest(
        policy=new.policy,
        token=new.token,
        version=new.version,
        parent=new.parent,
        step=new.step,
        anchor=new.version if since is None else since.anchor,
        num_deltas=0 if since is None else since.num_deltas + 1,
        tensors=weights.entries,
        sources=tuple(sources),
        probe=probe,
        adapter=new.adapter,
    )
    return _written(store, manifest)


def _written(store: Store, manifest: PolicyManifest) -> PolicyEvent:
    data = msgspec.json.encode(manifest)
    reach("weights.before_manifest")
    store.put(manifest_key(manifest.policy, manifest.token, manifest.version), data)
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
    if difference := other_version(new.adapter, entries, manifest, values=True):
        raise PolicyRefused(
            f"version {new.version} of {new.policy} is published already, under token {new.token}: {difference}"
        )
    return _event(manifest, digest)


def _parent(
    store: Store, new: NewVersion, weights: HashedTensors, old: HashedTensors
) -> tuple[PolicyManifest | None, str]:
    """The base of a delta and the sha256 of its manifest; None where there is none, as at the first version of a lease."""
    if new.parent < 0:
        return None, ""
    try:
        manifest, digest = read_manifest(store, manifest_key(new.policy, new.token, new.parent))
    except NotInStore:
        return None, ""
    except PolicyRefused as error:
        log.warning("parent not readable, publishing an anchor: %s", error)
        return None, ""
    if difference := first_difference(old.entries, manifest.tensors, values=True):
        raise ValueError(f"previous: not version {new.parent} as published: {difference}")
    if difference := other_version(new.adapter, weights.entries, manifest, values=False):
        raise ValueError(f"tensors: they differ from version {new.parent}: {difference}")
    return manifest, digest


def _encoded(weights: HashedTensors, old: HashedTensors) -> dict[str, Encoded]:
    """The tensors that changed. Wider values than 16 bits nearly all change in every step: those are whole."""

    def encode(name: str) -> Encoded:
        new = weights[name]
        if ITEM_BYTES[new.dtype] == 2:
            return encode_tensor(old[name], new)
        return Encoded("raw", new.data, math.prod(new.shape))

    names = differing(weights.entries, old.entries)
    found = in_threads(encode, names, size=lambda name: weights[name].num_bytes)
    return dict(zip(names, found, strict=True))


def _ways(parent: PolicyManifest, weights: HashedTensors, changes: Mapping[str, Encoded]) -> tuple[bool, bool]:
    """True for each of a delta and an anchor that the version has."""
    full_bytes = sum(tensor.num_bytes for tensor in weights.values())
    num_values = sum(math.prod(tensor.shape) for tensor in weights.values())
    delta_bytes = sum(len(part.payload) for part in changes.values())
    if delta_bytes > full_bytes // 2:
        return False, True
    changed = sum(part.changed for part in changes.values()) / max(num_values, 1)
    is_large = max(changed, delta_bytes / max(full_bytes, 1)) > CHANGED_SHARE
    return True, is_large or parent.num_deltas + 1 >= ANCHOR_EVERY


class _NewShard(NamedTuple):
    folder: str
    suffix: Literal["safetensors", "delta"]
    pieces: Pieces


def _anchor_shards(folder: str, weights: HashedTensors, shard_bytes: int) -> list[_NewShard]:
    sizes = {name: weights[name].num_bytes for name in sorted(weights)}
    limit = min(shard_bytes, max(LEAST_BYTES, sum(sizes.values()) // PUT_AT_ONCE))
    return [
        _NewShard(folder, "safetensors", list(pieces_of({name: weights[name] for name in run})))
        for run in split_runs(sizes, limit)
    ]


def _delta_shards(
    folder: str, changes: Mapping[str, Encoded], shard_bytes: int
) -> tuple[list[_NewShard], tuple[DeltaPart, ...]]:
    shards: list[_NewShard] = []
    parts: list[DeltaPart] = []
    for names in split_runs({name: len(part.payload) for name, part in changes.items()}, shard_bytes):
        offset = 0
        for name in names:
            part = changes[name]
            parts.append(DeltaPart(name, part.encoder, len(shards), offset, len(part.payload)))
            offset += len(part.payload)
        shards.append(_NewShard(folder, "delta", [changes[name].payload for name in names]))
    return shards, tuple(parts)


def _put(store: Store, shards: list[_NewShard]) -> tuple[Shard, ...]:
    """Store the objects, several at once. Raises StoreError."""

    def put(new: _NewShard) -> Shard:
        data = joined(new.pieces)
        digest = digest_of((data,))
        key = f"{new.folder}/{name_of(digest)}.{new.suffix}"
        reach("weights.before_shard")
        store.put(key, data)
        reach("weights.after_shard")
        return Shard(key=key, num_bytes=len(data), digest=digest)

    return tuple(in_threads(put, shards, most=PUT_AT_ONCE, size=lambda shard: sum(map(len, shard.pieces))))


def split_runs(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, in runs of at most `limit` bytes (or one name)."""
    run: list[str] = []
    total = 0
    for name, size in sizes.items():
        if run and total + size > limit:
            yield run
            run, total = [], 0
        run.append(name)
        total += size
    if run:
        yield run


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
