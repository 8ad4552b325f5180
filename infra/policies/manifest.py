"""What a published version consists of: every tensor with the hash of its state, and the ways to obtain them.

    policies/<policy>/<token>/manifests/<version>.json      one per version, written last, named by the event's sha256
    policies/<policy>/<token>/anchors/<version>/<sha>.safetensors
    policies/<policy>/<token>/deltas/<base>-<version>/<sha>.delta
    policies/<policy>/<token>/slices/<version>/<sha>.safetensors

A manifest names its objects and the manifest of each base by sha256, so that the event vouches for everything below it.
Shards are named by content and never change.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal

import msgspec
import xxhash

from infra.policies.adapter import Adapter, described
from infra.policies.policy import Probe
from infra.policies.tensors import Tensor, num_bytes_of
from infra.policies.threads import in_threads
from infra.store.pieces import Pieces

FORMAT = 1
ADAPTER_FORMAT = 2  # releases that would take an adapter for the whole model refuse it in one line
SLICED_FORMAT = 3  # releases that look for an anchor, which may be gone, refuse it in one line


class Shard(msgspec.Struct, frozen=True):
    """One stored object. key: in the store. sha256: of its bytes. num_bytes: of the object."""

    key: str
    sha256: str
    num_bytes: int


class DeltaPart(msgspec.Struct, frozen=True):
    """Where a changed tensor's encoded difference lies. tensor: its name. encoder: that wrote it. shard: index among
    those of the source. offset: of its first byte in the shard. num_bytes: from there on.
    """

    tensor: str
    encoder: str
    shard: int
    offset: int
    num_bytes: int


class WeightSource(msgspec.Struct, frozen=True, kw_only=True):
    """One way to obtain the version.

    kind: full tensors (anchor), or what changed since `base` (delta). shards: to be read. base: the version it applies
    to, -1 for an anchor. base_manifest, base_sha256: of that version. parts: of a delta; a tensor without one is
    unchanged. num_changed: values that differ from the base.
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
        """Size of its objects."""
        return sum(shard.num_bytes for shard in self.shards)


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Some tensors of the version, whole. index: which slice, from 0. count: so many versions in a row have all tensors
    in their slices. names: of the tensors. shards: they are in.
    """

    index: int
    count: int
    names: tuple[str, ...]
    shards: tuple[Shard, ...]


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of the version. name: as the model calls it. dtype: a safetensors name. shape: of the whole tensor.
    xxh3: xxh3-128 of its data, hexadecimal.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str


class PolicyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version.

    policy: its name. token: of the trainer's lease. version: from 1. parent: the version it was trained from, -1 for
    none. step: the last one it contains. anchor: the newest version with one. chain_bytes: of the deltas since then,
    one by one. tensors: all of them. sources: ways to obtain them. probe: what an engine checks itself by. format: see
    `format_of`. adapter: what the tensors are an adapter of; None, and not written, where they are the whole model.
    slice: None, and not written, with an anchor.

    Example: PolicyManifest(policy="main", token=17, version=1, parent=0, step=1, anchor=0, chain_bytes=210,
                      tensors=(TensorEntry("w", "BF16", (2,), "99aa…"),), sources=(WeightSource(kind="delta", …),))
    """

    policy: str
    token: int
    version: int
    parent: int
    step: int
    anchor: int
    chain_bytes: int
    tensors: tuple[TensorEntry, ...]
    sources: tuple[WeightSource, ...]
    probe: Probe | None = None
    format: int = FORMAT
    adapter: Adapter | None = None
    slice: Slice | None = None

    def source(self, kind: Literal["anchor", "delta"], base: int = -1) -> WeightSource | None:
        """The source of that kind and base, if there is one."""
        return next((source for source in self.sources if (source.kind, source.base) == (kind, base)), None)


def encode_manifest(manifest: PolicyManifest) -> bytes:
    """As JSON, the same bytes for the same manifest."""
    fields = msgspec.structs.asdict(manifest)
    for name in ("adapter", "slice"):
        if fields[name] is None:
            del fields[name]
    return msgspec.json.encode(fields)


def decode_manifest(data: bytes) -> PolicyManifest:
    """ValueError says what does not hold."""
    try:
        version = msgspec.json.decode(data, type=_Format).format
        if not FORMAT <= version <= SLICED_FORMAT:
            raise ValueError(
                f"manifest: got format {version}, expected {FORMAT} to {SLICED_FORMAT}: upgrade headrace here first"
            )
        manifest = msgspec.json.decode(data, type=PolicyManifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"manifest: not valid: {error}") from error
    if format_of(manifest.adapter, manifest.slice) != manifest.format:
        raise ValueError(f"manifest: not valid: format {manifest.format} with {described(manifest.adapter)}")
    return manifest


def other_adapter(got: Adapter | None, manifest: PolicyManifest) -> str:
    """In words, that the tensors of a version mean something else; "" where they do not."""
    return "" if got == manifest.adapter else f"it is {described(got)}, expected {described(manifest.adapter)}"


def format_of(adapter: Adapter | None, slice_: Slice | None) -> int:
    """The lowest format that says all of a manifest."""
    if slice_ is not None:
        return SLICED_FORMAT
    return FORMAT if adapter is None else ADAPTER_FORMAT


class _Format(msgspec.Struct):
    format: int = FORMAT


def folder_of(policy: str, token: int) -> str:
    """Where everything lies that one trainer lease publishes."""
    return f"policies/{policy}/{token}"


def manifest_key(policy: str, token: int, version: int) -> str:
    """Where the manifest of a version lies."""
    return f"{folder_of(policy, token)}/manifests/{version}.json"


def hash_tensor(tensor: Tensor) -> str:
    """xxh3-128 of the data."""
    return xxhash.xxh3_128_hexdigest(tensor.data)


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[TensorEntry, ...]:
    """The manifest's list of tensors, by name."""
    ordered = sorted(tensors.items())
    hashes = in_threads(hash_tensor, [tensor for _, tensor in ordered], size=num_bytes_of, same=id)
    return tuple(
        TensorEntry(name, tensor.dtype, tensor.shape, xxh3)
        for (name, tensor), xxh3 in zip(ordered, hashes, strict=True)
    )


def first_difference(got: tuple[TensorEntry, ...], expected: tuple[TensorEntry, ...], *, values: bool) -> str | None:
    """What first differs between two lists of tensors (names, dtypes, shapes; values), in words; None if nothing."""
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


def differing(got: tuple[TensorEntry, ...], expected: tuple[TensorEntry, ...]) -> list[str]:
    """Names of the tensors of `got`, in order, whose values are not those of `expected`."""
    hashes = {entry.name: entry.xxh3 for entry in expected}
    return [entry.name for entry in got if hashes.get(entry.name) != entry.xxh3]


def sha256_hex(data: bytes | memoryview) -> str:
    """sha256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_pieces(pieces: Pieces) -> str:
    """The same of all pieces, one after the other."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
