"""The way back from a version to what it is rebuilt from: steps of deltas, and the weights at their beginning.

Those lie in an anchor, or in the slices of some versions in a row: a tensor then begins at the newest slice that holds it, and
takes the steps since then.
"""

from collections.abc import Mapping

import msgspec

from infra.policies.manifest import (
    PolicyManifest,
    Shard,
    Slice,
    WeightSource,
    decode_manifest,
    first_difference,
    other_adapter,
    sha256_hex,
)
from infra.store.store import Store
from schemas.errors import PolicyRefused

NUM_SLICES = 16  # of which each version without an anchor has one
MAX_STEPS = 1000  # of a chain of deltas; a longer one cannot be genuine


class Whole(msgspec.Struct, frozen=True):
    """Version that stored tensors whole. newer: names read elsewhere. num_steps: how many of the newest steps follow."""

    version: int
    shards: tuple[Shard, ...]
    newer: frozenset[str]
    num_steps: int


class Chain(msgspec.Struct, frozen=True):
    """steps: newest first. wholes: newest first; none where the chain leads to the version that is held. root: the oldest."""

    steps: tuple[tuple[PolicyManifest, WeightSource], ...]
    wholes: tuple[Whole, ...]
    root: PolicyManifest


def walk(store: Store, manifest: PolicyManifest, held_version: int = -1) -> Chain:
    """From a version back to `held_version`, or to where all its tensors are whole. Only manifests are read.

    Raises PolicyRefused where it leads nowhere, NotInStore, StoreError.
    """
    steps: list[tuple[PolicyManifest, WeightSource]] = []
    wholes: list[Whole] = []
    rest = names = frozenset(entry.name for entry in manifest.tensors)
    current = manifest
    while current.version > held_version:
        if held_version < 0 and current.slice is not None and not rest.isdisjoint(current.slice.names):
            wholes.append(Whole(current.version, current.slice.shards, names - rest, len(steps)))
            rest = rest.difference(current.slice.names)
        source = _choose(current, held_version)
        if rest and source is None:
            if (anchor := current.source("anchor")) is None:
                raise PolicyRefused(f"version {current.version} has no anchor")
            rest = frozenset()  # it holds what slices do, too
            wholes = [Whole(current.version, anchor.shards, rest, len(steps))]
        if source is None or not rest:
            break
        if source.base >= current.version or len(steps) >= MAX_STEPS:
            raise PolicyRefused(f"the chain of deltas does not end: version {current.version} has base {source.base}")
        steps.append((current, source))
        current, _ = read_manifest(store, source.base_manifest, source.base_sha256)
        _check_base(current, source, manifest)
    return Chain(tuple(steps), tuple(wholes), current)


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


def check_within(manifest: PolicyManifest, key: str) -> None:
    """Raise PolicyRefused unless the key is of an object of this policy."""
    if not key.startswith(f"policies/{manifest.policy}/"):
        raise PolicyRefused(f"{key} is not an object of {manifest.policy}")


def names_of_slice(num_bytes: Mapping[str, int], index: int) -> tuple[str, ...]:
    """Names of the tensors in the slice of that index: of all in order, those whose middle lies in its share of the bytes."""
    total, before, chosen = sum(num_bytes.values()), 0, []
    for name in sorted(num_bytes):
        if NUM_SLICES * (2 * before + num_bytes[name]) // max(2 * total, 1) == index:
            chosen.append(name)
        before += num_bytes[name]
    return tuple(chosen)


def next_index(before: Slice | None) -> int:
    """Index of the slice after this slice; 0 after an anchor."""
    return 0 if before is None else (before.index + 1) % NUM_SLICES


def _choose(manifest: PolicyManifest, held_version: int) -> WeightSource | None:
    """The delta that leads closest to the held version without passing it; None for the anchor."""
    deltas = [source for source in manifest.sources if source.kind == "delta"]
    within = [source for source in deltas if 0 <= held_version <= source.base]
    if within:
        return min(within, key=lambda source: source.base)
    if manifest.source("anchor") is not None:
        return None
    return min(deltas, key=lambda source: source.base, default=None)


def _check_base(base: PolicyManifest, source: WeightSource, manifest: PolicyManifest) -> None:
    check_within(manifest, source.base_manifest)
    if base.version != source.base or base.policy != manifest.policy:
        raise PolicyRefused(f"{source.base_manifest} is version {base.version}, expected {source.base}")
    if difference := other_adapter(base.adapter, manifest) or first_difference(
        base.tensors, manifest.tensors, values=False
    ):
        raise PolicyRefused(f"{source.base_manifest}: {difference}")
