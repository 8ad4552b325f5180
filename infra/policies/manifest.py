"""Manifest of a published version: every tensor with the hash of its state, and the ways to obtain them.

    policies/<policy>/<token>/manifests/<version>.json      one per version, written last, named by the event's sha256
    policies/<policy>/<token>/anchors/<version>/<digest>.safetensors
    policies/<policy>/<token>/deltas/<base>-<version>/<digest>.delta

A manifest names its objects by their digests and the manifest of each base by sha256, so that the event vouches for everything
below it. Objects are named by content and never change.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
import numpy as np
import xxhash

from infra.policies.policy import Adapter, Probe, described
from infra.policies.tensors import ITEM_BYTES, Tensor, are_finite, chunks, in_threads

FORMAT = 7


class Shard(msgspec.Struct, frozen=True):
    """One stored object. key: in the store. num_bytes: its size. digest: of its bytes, see `infra.store.store.digest_of`."""

    key: str
    num_bytes: int
    digest: str


class DeltaPart(msgspec.Struct, frozen=True):
    """Position of a changed tensor's encoded difference. shard: index among the source's shards. offset: in the shard."""

    tensor: str
    encoder: str
    shard: int
    offset: int
    num_bytes: int


class WeightSource(msgspec.Struct, frozen=True, kw_only=True):
    """One way to obtain the version: full tensors (anchor), or the changes since `base` (delta).

    parts: of a delta; a tensor without one is unchanged. num_changed: values that differ from the base.
    """

    kind: Literal["anchor", "delta"]
    shards: tuple[Shard, ...]
    base: int = -1
    base_manifest: str = ""
    base_sha256: str = ""
    parts: tuple[DeltaPart, ...] = ()
    num_changed: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of the version. dtype: a safetensors name. shape: of the whole tensor. xxh3: xxh3-128 of its data, hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str


class PolicyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version. anchor: the newest version with one. num_deltas: since then. tensors: all of them.

    sources: ways to obtain them. probe: with it an engine checks itself. adapter: settings of the adapter that the tensors are;
    None where they are the whole model.
    """

    policy: str
    token: int
    version: int
    parent: int
    step: int
    anchor: int
    num_deltas: int
    tensors: tuple[TensorEntry, ...]
    sources: tuple[WeightSource, ...]
    probe: Probe | None = None
    format: int = FORMAT
    adapter: Adapter | None = None

    def source(self, kind: Literal["anchor", "delta"], base: int = -1) -> WeightSource | None:
        """The source of that kind and base, if there is one."""
        return next((source for source in self.sources if (source.kind, source.base) == (kind, base)), None)


def decode_manifest(data: bytes) -> PolicyManifest:
    try:
        version = msgspec.json.decode(data, type=_Format).format
        if version != FORMAT:
            raise ValueError(f"manifest: got format {version}, expected {FORMAT}: another release wrote it")
        return msgspec.json.decode(data, type=PolicyManifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"manifest: not valid: {error}") from error


class _Format(msgspec.Struct):
    format: int


def folder_of(policy: str, token: int) -> str:
    """Folder of everything that one trainer lease publishes."""
    return f"policies/{policy}/{token}"


def manifest_key(policy: str, token: int, version: int) -> str:
    return f"{folder_of(policy, token)}/manifests/{version}.json"


class Look:
    """Hash of a tensor's data, and whether all values are finite, taken while its chunks are in the processor's cache."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._hasher = xxhash.xxh3_128()
        self.finite = True

    @property
    def xxh3(self) -> str:
        """Hash of the chunks so far, as in TensorEntry."""
        return self._hasher.hexdigest()

    def through(self, values: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Pass the chunks of a tensor on, looking at each."""
        for chunk in values:
            self._hasher.update(chunk.data)
            self.finite = self.finite and are_finite(chunk, self._dtype)
            yield chunk


def look_at(tensor: Tensor) -> Look:
    look = Look(tensor.dtype)
    for _ in look.through(chunks(tensor)):
        pass
    return look


def look_at_all(tensors: Mapping[str, Tensor]) -> dict[str, Look]:
    """All of them, by name, in threads."""
    looks = in_threads(look_at, tensors.values(), size=lambda tensor: tensor.num_bytes)
    return dict(zip(tensors, looks, strict=True))


class HashedTensors(dict[str, Tensor]):
    """Tensors that are hashed once: a version, and then the parent of the next one. They no longer change."""

    @functools.cached_property
    def _looks(self) -> dict[str, Look]:
        return look_at_all(self)

    @functools.cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Their entries of the manifest, by name."""
        return tuple(
            TensorEntry(name, tensor.dtype, tensor.shape, self._looks[name].xxh3)
            for name, tensor in sorted(self.items())
        )

    @functools.cached_property
    def not_finite(self) -> str:
        """Name of the first tensor that holds NaN or infinity, "" for none."""
        return next((name for name, look in self._looks.items() if not look.finite), "")

    def base(self) -> "HashedTensors":
        """Base for the delta of the next version: every entry, and the values of 16-bit tensors."""
        kept = HashedTensors({name: tensor for name, tensor in self.items() if ITEM_BYTES[tensor.dtype] == 2})
        kept.__dict__["entries"] = self.entries
        return kept


def first_difference(got: tuple[TensorEntry, ...], expected: tuple[TensorEntry, ...], *, values: bool) -> str | None:
    """First difference of two lists of tensors (names, dtypes, shapes; values), in words; None for none."""
    have = {entry.name: entry for entry in got}
    for entry in expected:
        own = have.pop(entry.name, None)
        if own is None:
            return f"{entry.name} is missing"
        if (own.dtype, own.shape) != (entry.dtype, entry.shape):
            return f"{entry.name} is {own.dtype}{list(own.shape)}, expected {entry.dtype}{list(entry.shape)}"
        if values and own.xxh3 != entry.xxh3:
            return f"{entry.name} has other values"
    return f"{min(have)} is not expected" if have else None


def other_version(
    adapter: Adapter | None, got: tuple[TensorEntry, ...], manifest: PolicyManifest, *, values: bool
) -> str | None:
    """`first_difference` from a version, or that its tensors mean something else."""
    if adapter != manifest.adapter:
        return f"it is {described(adapter)}, expected {described(manifest.adapter)}"
    return first_difference(got, manifest.tensors, values=values)


def differing(got: tuple[TensorEntry, ...], expected: tuple[TensorEntry, ...]) -> list[str]:
    """Names of the tensors of `got`, in order, whose values differ from `expected`."""
    hashes = {entry.name: entry.xxh3 for entry in expected}
    return [entry.name for entry in got if hashes.get(entry.name) != entry.xxh3]


def sha256_hex(data: bytes | memoryview) -> str:
    """sha256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()
