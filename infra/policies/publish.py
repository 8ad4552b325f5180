"""Publishes a version to the store: shards, then the manifest; the caller then sends the event.

A version is visible only complete: nothing names it before its manifest, and its manifest is the last object written.
Publishing the same (token, version) again returns the same event; with other content it is refused.

The first version of a lease is an anchor, and each that changes too much for a delta. Every other one is a delta from its
parent and a slice: a sixteenth of the tensors, whole. So no version costs much more than another, and a late joiner reads the
slices of sixteen versions and the deltas between them, however old the anchor is.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from infra.observe.failpoint import reach
from infra.policies.adapter import Adapter
from infra.policies.chain import NUM_SLICES, names_of_slice, next_index, read_manifest
from infra.policies.delta import Encoded, encode_tensor, sampled_share
from infra.policies.manifest import (
    DeltaPart,
    PolicyManifest,
    Shard,
    Slice,
    TensorEntry,
    WeightSource,
    differing,
    encode_manifest,
    entries_of,
    first_difference,
    folder_of,
    format_of,
    manifest_key,
    other_adapter,
    sha256_hex,
)
from infra.policies.policy import Probe
from infra.policies.tensors import ITEM_BYTES, Tensor, bits, first_not_finite, save_tensors
from infra.policies.threads import in_threads
from infra.store.store import Store, check_key
from schemas.errors import NotInStore, PolicyRefused
from schemas.records import PolicyEvent

log = logging.getLogger(__name__)

SHARD_BYTES = 128 * 1024 * 1024  # joined or copied while no other thread runs: a few hundredths of a second
DENSE_SHARE = 0.6  # of 32-bit values changed: such a delta weighs more than half an anchor however it is encoded
CHANGED_SHARE = 1 / 8  # of the values or the bytes: where a chain of such deltas would cost more than an anchor


class Previous(msgspec.Struct, frozen=True):
    """The parent as published: the delta's base."""

    manifest: PolicyManifest
    key: str
    sha256: str
    tensors: Mapping[str, Tensor]


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be published. token: of the trainer's lease. parent: the version it was trained from, -1 for none. step: the
    last one it contains. adapter: of which the tensors are, None for the whole model.

    Example: NewVersion(policy="main", token=17, version=8, parent=7, step=31)
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

    previous: the tensors of its parent; None makes an anchor. Raises PolicyRefused where a tensor is not finite or the
    version exists with other content, StoreError, and ValueError where `previous` is not what was published.
    """
    policy, token, version = new.policy, new.token, new.version
    check_key(folder_of(policy, token))
    if "/" in policy or not tensors:
        raise ValueError(f"publish: got policy {policy!r} with {len(tensors)} tensors, expected a name without '/'")
    entries = entries_of(tensors)
    if (existing := _existing(store, new, entries)) is not None:
        return existing
    base = _previous(store, new, previous, entries)
    target = _Target(store, folder_of(policy, token), version, shard_bytes)
    sources = _store_sources(target, tensors, entries, base)
    has_anchor = any(source.kind == "anchor" for source in sources)
    sliced = None if has_anchor or base is None else _store_slice(target, tensors, next_index(base.manifest.slice))
    manifest = PolicyManifest(
        policy=policy,
        token=token,
        version=version,
        parent=new.parent,
        step=new.step,
        anchor=version if has_anchor or base is None else base.manifest.anchor,
        chain_bytes=0 if has_anchor or base is None else base.manifest.chain_bytes + sources[0].num_bytes,
        tensors=entries,
        sources=sources,
        probe=probe,
        format=format_of(new.adapter, sliced),
        adapter=new.adapter,
        slice=sliced,
    )
    data = encode_manifest(manifest)
    reach("weights.before_manifest")
    store.put(manifest_key(policy, token, version), data)
    reach("weights.after_manifest")
    return _event(manifest, sha256_hex(data))


class _Target(msgspec.Struct, frozen=True):
    """Where the objects of one version go."""

    store: Store
    folder: str
    version: int
    shard_bytes: int


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


def _previous(
    store: Store, new: NewVersion, tensors: Mapping[str, Tensor] | None, entries: tuple[TensorEntry, ...]
) -> Previous | None:
    """The base of a delta; None where there is none, as at the first version of a lease."""
    if tensors is None or new.parent < 0:
        return None
    key = manifest_key(new.policy, new.token, new.parent)
    try:
        manifest, digest = read_manifest(store, key)
    except NotInStore:
        return None
    except PolicyRefused as error:
        log.warning("parent not readable, publishing an anchor: %s", error)
        return None
    if difference := first_difference(entries_of(tensors), manifest.tensors, values=True):
        raise ValueError(f"previous: not version {new.parent} as published: {difference}")
    if difference := other_adapter(new.adapter, manifest) or first_difference(entries, manifest.tensors, values=False):
        raise ValueError(f"tensors: not those of version {new.parent}: {difference}")
    return Previous(manifest, key, digest, tensors)


def _encode(
    old: Mapping[str, Tensor],
    published: tuple[TensorEntry, ...],
    new: Mapping[str, Tensor],
    entries: tuple[TensorEntry, ...],
) -> dict[str, Encoded] | None:
    """What differs between two versions, by name; None where a delta cannot be worth it."""
    names = differing(entries, published)
    if _dense(old, new, names):
        return None
    return dict(zip(names, in_threads(lambda name: encode_tensor(old[name], new[name]), names), strict=True))


def _dense(old: Mapping[str, Tensor], new: Mapping[str, Tensor], names: list[str]) -> bool:
    """Whether most bytes are in wide values that changed, from a sample of each tensor."""
    changed_bytes = 0.0
    for name in names:
        before, after = bits(old[name]), bits(new[name])
        if before.itemsize < 4:
            continue
        changed_bytes += sampled_share(before, after) * new[name].num_bytes
    return changed_bytes > DENSE_SHARE * sum(tensor.num_bytes for tensor in new.values())


def _store_sources(
    target: _Target,
    tensors: Mapping[str, Tensor],
    entries: tuple[TensorEntry, ...],
    base: Previous | None,
) -> tuple[WeightSource, ...]:
    """Put the shards of a version; the ways that lead to it, the delta from its parent first.

    Nothing is written of weights that are not finite. What does not differ from the parent was found so before.
    """
    encoded = None if base is None else _encode(base.tensors, base.manifest.tensors, tensors, entries)
    if encoded is None:
        wrong = first_not_finite(tensors)
    else:
        wrong = next((name for name, one in encoded.items() if not one.finite), "")
    if wrong:
        raise PolicyRefused(f"version {target.version}: {wrong} holds values that are not finite")
    if base is None:
        return (_store_anchor(target, tensors),)
    full_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    delta_bytes = full_bytes if encoded is None else sum(len(one.payload) for one in encoded.values())
    if encoded is None or delta_bytes > full_bytes // 2:
        return (_store_anchor(target, tensors),)
    delta = _store_delta(target, encoded, base)
    changed = delta.num_changed / max(sum(math.prod(entry.shape) for entry in entries), 1)
    if max(changed, delta_bytes / max(full_bytes, 1)) > CHANGED_SHARE:
        return (delta, _store_anchor(target, tensors))
    return (delta,)


def _store_slice(target: _Target, tensors: Mapping[str, Tensor], index: int) -> Slice:
    names = names_of_slice({name: tensor.num_bytes for name, tensor in tensors.items()}, index)
    shards = _store_whole(target, "slices", {name: tensors[name] for name in names})
    return Slice(index=index, count=NUM_SLICES, names=names, shards=shards)


def _store_anchor(target: _Target, tensors: Mapping[str, Tensor]) -> WeightSource:
    return WeightSource(kind="anchor", shards=_store_whole(target, "anchors", tensors))


def _store_whole(target: _Target, folder: str, tensors: Mapping[str, Tensor]) -> tuple[Shard, ...]:
    shards = []
    for names in split_runs({name: tensors[name].num_bytes for name in sorted(tensors)}, target.shard_bytes):
        data = save_tensors({name: tensors[name] for name in names})
        shards.append(_store_shard(target, f"{folder}/{target.version}", "safetensors", data))
    return tuple(shards)


def _store_delta(target: _Target, encoded: Mapping[str, Encoded], base: Previous) -> WeightSource:
    shards: list[Shard] = []
    parts: list[DeltaPart] = []
    for names in split_runs({name: len(one.payload) for name, one in encoded.items()}, target.shard_bytes):
        offset = 0
        for name in names:
            one = encoded[name]
            parts.append(DeltaPart(name, one.encoder, len(shards), offset, len(one.payload)))
            offset += len(one.payload)
        data = b"".join(encoded[name].payload for name in names)
        shards.append(_store_shard(target, f"deltas/{base.manifest.version}-{target.version}", "delta", data))
    return WeightSource(
        kind="delta",
        shards=tuple(shards),
        base=base.manifest.version,
        base_manifest=base.key,
        base_sha256=base.sha256,
        parts=tuple(parts),
        num_changed=sum(one.changed for one in encoded.values()),
    )


def _store_shard(target: _Target, folder: str, suffix: Literal["safetensors", "delta"], data: bytes) -> Shard:
    digest = sha256_hex(data)
    key = f"{target.folder}/{folder}/{digest[:32]}.{suffix}"
    reach("weights.before_shard")
    target.store.put(key, data)
    reach("weights.after_shard")
    return Shard(key, digest, len(data))


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
