"""The objects of a version: its tensors are hashed, encoded against those of the parent, and put into the store."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from infra.observe.failpoint import reach
from infra.policies.delta import Encoded, encode_tensor
from infra.policies.manifest import DeltaPart, Look, Shard, TensorEntry, differing, look_at_all
from infra.policies.tensors import ITEM_BYTES, Tensor, in_threads, pieces_of
from infra.store.store import Pieces, Store, digest_of, name_of, total_bytes

SHARD_BYTES = 128 * 1024 * 1024  # as much as one connection should be asked to begin again
PUT_AT_ONCE = 4  # each over several connections
LEAST_BYTES = 16 * 1024 * 1024  # of whole tensors: less is not worth an object of its own


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

    def encoded_since(self, old: "HashedTensors") -> dict[str, Encoded]:
        """Encode the 16-bit tensors that changed and whose difference from `old` is smaller than the tensor."""
        before = {entry.name: entry for entry in old.entries}
        sizes = {
            entry.name: math.prod(entry.shape)
            for entry in self.entries
            if has_delta(parent := before.get(entry.name), entry.dtype, entry.shape) and parent != entry
        }
        found = in_threads(
            lambda name: encode_tensor(old[name], self[name]),
            sizes,
            size=sizes.__getitem__,
            same=lambda name: (id(old[name]), id(self[name])),
        )
        return {name: part for name, part in zip(sizes, found, strict=True) if part.encoder != "raw"}

    def base(self) -> "HashedTensors":
        """Base for `encoded_since` of the next version: every entry, and the values of 16-bit tensors."""
        kept = HashedTensors({name: tensor for name, tensor in self.items() if ITEM_BYTES[tensor.dtype] == 2})
        kept.__dict__["entries"] = self.entries
        return kept


def has_delta(old: TensorEntry | None, dtype: str, shape: tuple[int, ...]) -> bool:
    """True if a tensor of this dtype and shape can be encoded against `old`. Wider values nearly all change in every step."""
    return old is not None and ITEM_BYTES[dtype] == 2 and (old.dtype, old.shape) == (dtype, shape)


class EncodedTensors(msgspec.Struct, frozen=True):
    """Tensors of a version, encoded. entries: of the version. parent: of its parent, None where there is none.
    not_finite: name of a tensor that must not be published. delta_bytes: of a delta. num_changed: values that differ from
    the parent; all values of a tensor that a delta holds whole.
    """

    entries: tuple[TensorEntry, ...]
    parent: tuple[TensorEntry, ...] | None = None
    not_finite: str = ""
    delta_bytes: int = 0
    num_changed: int = 0


class WantedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """Objects to put. parent: the delta's base. delta, anchor: put one."""

    folder: str
    version: int
    parent: int
    delta: bool
    anchor: bool


class StoredObjects(msgspec.Struct, frozen=True, kw_only=True):
    """Objects that were put. parts: of the delta; their shards are counted from the first of `delta`."""

    delta: tuple[Shard, ...] = ()
    parts: tuple[DeltaPart, ...] = ()
    anchor: tuple[Shard, ...] = ()


class _NewShard(NamedTuple):
    folder: str
    suffix: str
    pieces: Pieces


class VersionObjects:
    """A version's tensors on their way into the store. previous: those of its parent, None for no delta. Calls block."""

    def __init__(
        self, store: Store, tensors: HashedTensors, previous: HashedTensors | None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._store = store
        self._tensors = tensors
        self._previous = previous
        self._shard_bytes = shard_bytes
        self._encoded: dict[str, Encoded] = {}

    def encode(self) -> EncodedTensors:
        """Hash the tensors, and encode what changed since the parent."""
        if self._previous is None:
            return EncodedTensors(self._tensors.entries, not_finite=self._tensors.not_finite)
        self._encoded = self._tensors.encoded_since(self._previous)
        entries = {entry.name: entry for entry in self._tensors.entries}
        whole = [name for name in self._changed if name not in self._encoded]
        return EncodedTensors(
            self._tensors.entries,
            self._previous.entries,
            self._tensors.not_finite,
            sum(len(part.payload) for part in self._encoded.values()) + sum(self._sizes[name] for name in whole),
            sum(part.changed for part in self._encoded.values())
            + sum(math.prod(entries[name].shape) for name in whole),
        )

    def put(self, wanted: WantedObjects) -> StoredObjects:
        """Store the wanted objects, several at once. Raises StoreError."""
        delta, parts = self._delta(wanted) if wanted.delta else ([], ())
        anchor = self._anchor(wanted) if wanted.anchor else []
        shards = tuple(
            in_threads(
                self._put_shard,
                [*delta, *anchor],
                most=PUT_AT_ONCE,
                size=lambda shard: total_bytes(shard.pieces),
            )
        )
        return StoredObjects(delta=shards[: len(delta)], parts=parts, anchor=shards[len(delta) :])

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return {entry.name: math.prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in self._tensors.entries}

    @functools.cached_property
    def _changed(self) -> list[str]:
        return [] if self._previous is None else differing(self._tensors.entries, self._previous.entries)

    def _anchor(self, wanted: WantedObjects) -> list[_NewShard]:
        sizes = dict(sorted(self._sizes.items()))
        limit = min(self._shard_bytes, max(LEAST_BYTES, sum(sizes.values()) // PUT_AT_ONCE))
        return [
            _NewShard(
                f"{wanted.folder}/anchors/{wanted.version}",
                "safetensors",
                list(pieces_of({name: self._tensors[name] for name in run})),
            )
            for run in split_runs(sizes, limit)
        ]

    def _delta(self, wanted: WantedObjects) -> tuple[list[_NewShard], tuple[DeltaPart, ...]]:
        found = {name: self._encoded.get(name) or Encoded("raw", self._tensors[name].data, 0) for name in self._changed}
        shards: list[_NewShard] = []
        parts: list[DeltaPart] = []
        for names in split_runs({name: len(part.payload) for name, part in found.items()}, self._shard_bytes):
            offset = 0
            for name in names:
                part = found[name]
                parts.append(DeltaPart(name, part.encoder, len(shards), offset, len(part.payload)))
                offset += len(part.payload)
            payloads = [found[name].payload for name in names]
            shards.append(_NewShard(f"{wanted.folder}/deltas/{wanted.parent}-{wanted.version}", "delta", payloads))
        return shards, tuple(parts)

    def _put_shard(self, new: _NewShard) -> Shard:
        digest = digest_of(new.pieces)
        key = f"{new.folder}/{name_of(digest)}.{new.suffix}"
        reach("weights.before_shard")
        self._store.put_pieces(key, new.pieces)
        reach("weights.after_shard")
        return Shard(key=key, num_bytes=total_bytes(new.pieces), digest=digest)


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
