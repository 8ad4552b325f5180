"""What one process publishes of a version: its tensors, hashed, encoded against those of the parent, and put into the store.

Of a version whose tensors lie in several processes each publishes its own. They do the same at the same time, and whoever
leads decides in between:

    look     what the tensors are, and what they were in the parent
    encode   what a delta weighs, or that a value is not finite
    put      the objects of a delta, of an anchor, of a slice
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from infra.observe.failpoint import reach
from infra.policies.delta import Encoded, encode_tensor, sampled_share
from infra.policies.manifest import DeltaPart, Shard, TensorEntry, differing, entries_of, sha256_hex
from infra.policies.tensors import Tensor, bits, first_not_finite, joined, save_tensors
from infra.policies.threads import in_threads
from infra.store.store import Store

SHARD_BYTES = 128 * 1024 * 1024  # as much as one connection should be asked to begin again
PUT_AT_ONCE = 4  # of whole tensors, each of which is copied first


class HashedTensors(dict[str, Tensor]):
    """Tensors that no longer change, looked at once: hashed as a version and as the parent of the next, and checked before
    what a checkpoint keeps and what is published.
    """

    @functools.cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """What a manifest says of them."""
        return entries_of(self)

    @functools.cached_property
    def not_finite(self) -> str:
        """See `first_not_finite`."""
        return first_not_finite(self)


class ShareLook(msgspec.Struct, frozen=True):
    """entries: of the version. parent: of its parent, None where the process does not have it. dense_bytes: of values of 32
    bits and more that differ, about.
    """

    entries: tuple[TensorEntry, ...]
    parent: tuple[TensorEntry, ...] | None
    dense_bytes: float = 0.0


class DeltaSize(msgspec.Struct, frozen=True):
    """Of a delta, in bytes, and how many values it changes. not_finite: name of a tensor that must not be published."""

    num_bytes: int = 0
    num_changed: int = 0
    not_finite: str = ""


class WantedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be put. folder: see `infra.policies.manifest`. delta, anchor: whether. slice: names, of all tensors."""

    folder: str
    version: int
    parent: int
    delta: bool
    anchor: bool
    slice: tuple[str, ...]


class StoredShare(msgspec.Struct, frozen=True, kw_only=True):
    """What was put. parts: of the delta; their shards are counted from the first of `delta`."""

    delta: tuple[Shard, ...] = ()
    parts: tuple[DeltaPart, ...] = ()
    anchor: tuple[Shard, ...] = ()
    slice: tuple[Shard, ...] = ()


class Share:
    """One process's tensors of a version. previous: the same of its parent, None for no delta. Calls block."""

    def __init__(
        self, store: Store, tensors: HashedTensors, previous: HashedTensors | None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._store = store
        self._tensors = tensors
        self._previous = previous
        self._shard_bytes = shard_bytes
        self._encoded: dict[str, Encoded] = {}

    def look(self) -> ShareLook:
        """Hash them."""
        if self._previous is None:
            return ShareLook(self._tensors.entries, None)
        return ShareLook(self._tensors.entries, self._previous.entries, self._dense_bytes(self._previous))

    def encode(self, *, delta: bool) -> DeltaSize:
        """Encode what differs from the parent. delta: False only looks for values that are not finite."""
        if not delta or self._previous is None:
            return DeltaSize(not_finite=self._tensors.not_finite)
        names, old = differing(self._tensors.entries, self._previous.entries), self._previous
        encoded = in_threads(
            lambda name: encode_tensor(old[name], self._tensors[name]),
            names,
            size=lambda name: self._tensors[name].num_bytes,
            same=lambda name: (id(old[name]), id(self._tensors[name])),
        )
        self._encoded = dict(zip(names, encoded, strict=True))
        return DeltaSize(
            sum(len(one.payload) for one in encoded),
            sum(one.changed for one in encoded),
            # What does not differ from the parent was found finite with it.
            next((name for name, one in self._encoded.items() if not one.finite), ""),
        )

    def put(self, wanted: WantedObjects) -> StoredShare:
        """Store what is wanted of them. StoreError."""
        shards, parts = self._put_delta(wanted) if wanted.delta else ((), ())
        sliced = [name for name in wanted.slice if name in self._tensors]
        return StoredShare(
            delta=shards,
            parts=parts,
            anchor=self._put_whole(wanted, "anchors", sorted(self._tensors)) if wanted.anchor else (),
            slice=self._put_whole(wanted, "slices", sliced),
        )

    def _dense_bytes(self, previous: HashedTensors) -> float:
        """From a sample of each tensor."""
        found = 0.0
        for name in differing(self._tensors.entries, previous.entries):
            if name in previous and previous[name].num_bytes == self._tensors[name].num_bytes:
                before, after = bits(previous[name]), bits(self._tensors[name])
                if before.itemsize >= 4:
                    found += sampled_share(before, after) * self._tensors[name].num_bytes
        return found

    def _put_whole(self, wanted: WantedObjects, folder: str, names: list[str]) -> tuple[Shard, ...]:
        def put(run: list[str]) -> Shard:
            data = save_tensors({name: self._tensors[name] for name in run})
            return self._put_shard(f"{wanted.folder}/{folder}/{wanted.version}", "safetensors", data)

        runs = split_runs({name: self._tensors[name].num_bytes for name in names}, self._shard_bytes)
        return tuple(in_threads(put, runs, most=PUT_AT_ONCE))

    def _put_delta(self, wanted: WantedObjects) -> tuple[tuple[Shard, ...], tuple[DeltaPart, ...]]:
        shards: list[Shard] = []
        parts: list[DeltaPart] = []
        for names in split_runs({name: len(one.payload) for name, one in self._encoded.items()}, self._shard_bytes):
            offset = 0
            for name in names:
                one = self._encoded[name]
                parts.append(DeltaPart(name, one.encoder, len(shards), offset, len(one.payload)))
                offset += len(one.payload)
            data = joined([self._encoded[name].payload for name in names])
            shards.append(self._put_shard(f"{wanted.folder}/deltas/{wanted.parent}-{wanted.version}", "delta", data))
        return tuple(shards), tuple(parts)

    def _put_shard(self, folder: str, suffix: Literal["safetensors", "delta"], data: memoryview) -> Shard:
        digest = sha256_hex(data)
        key = f"{folder}/{digest[:32]}.{suffix}"
        reach("weights.before_shard")
        self._store.put(key, data)
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
