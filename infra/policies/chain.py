"""The way back from a version to its sources: deltas, and the held version or an anchor at their beginning."""

import msgspec

from infra.policies.manifest import PolicyManifest, WeightSource, decode_manifest, other_version, sha256_hex
from infra.store.store import Store
from schemas.errors import PolicyRefused

ANCHOR_EVERY = 16  # versions
MAX_STEPS = 1000  # of a chain of deltas; a longer one cannot be genuine


class Chain(msgspec.Struct, frozen=True):
    """steps: newest first. root: the oldest version. anchor: of the root, None where it is the version that is held."""

    steps: tuple[tuple[PolicyManifest, WeightSource], ...]
    root: PolicyManifest
    anchor: WeightSource | None = None


def walk(store: Store, manifest: PolicyManifest, held_version: int = -1) -> Chain:
    """From a version back to `held_version`, or to an anchor. Only manifests are read.

    Raises PolicyRefused where it leads nowhere, NotInStore, StoreError.
    """
    steps: list[tuple[PolicyManifest, WeightSource]] = []
    current = manifest
    while current.version > held_version:
        source = _choose(current, held_version)
        if source is None:
            raise PolicyRefused(f"version {current.version} has no anchor")
        if source.kind == "anchor":
            return Chain(tuple(steps), current, source)
        if source.base >= current.version or len(steps) >= MAX_STEPS:
            raise PolicyRefused(f"the chain of deltas does not end: version {current.version} has base {source.base}")
        steps.append((current, source))
        current, _ = read_manifest(store, source.base_manifest, source.base_sha256)
        _check_base(current, source, manifest)
    return Chain(tuple(steps), current)


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


def _choose(manifest: PolicyManifest, held_version: int) -> WeightSource | None:
    """The delta that leads closest to the held version without passing it; else the anchor, else any delta."""
    deltas = [source for source in manifest.sources if source.kind == "delta"]
    within = [source for source in deltas if 0 <= held_version <= source.base]
    if within:
        return min(within, key=lambda source: source.base)
    return manifest.source("anchor") or min(deltas, key=lambda source: source.base, default=None)


def _check_base(base: PolicyManifest, source: WeightSource, manifest: PolicyManifest) -> None:
    check_within(manifest, source.base_manifest)
    if base.version != source.base or base.policy != manifest.policy:
        raise PolicyRefused(f"{source.base_manifest} is version {base.version}, expected {source.base}")
    if difference := other_version(base.adapter, base.tensors, manifest, values=False):
        raise PolicyRefused(f"{source.base_manifest}: {difference}")
