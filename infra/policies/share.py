"""What one process publishes of a version: its tensors, hashed, encoded against those of the parent, and put into the store.

Of a version whose tensors lie in several processes each publishes its own. They do the same at the same time, and whoever
leads decides in between:

    look     what the tensors are, and what they were in the parent
    encode   what a delta weighs, or that a value is not finite
    put      the objects of a delta, of an anchor, of a slice
"""

import functools
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Literal, Protocol

import msgspec

from infra.observe.failpoint import reach
from infra.policies.delta import Encoded, encode_tensor, sampled_share
from infra.policies.manifest import DeltaPart, Look, Shard, TensorEntry, differing, looked_at
from infra.policies.tensors import ITEM_BYTES, CopiedTensors, Tensor, bits, pieces_of
from infra.policies.threads import in_threads
from infra.store.store import Pieces, Store, digest_of, name_of, total_bytes

SHARD_BYTES = 128 * 1024 * 1024  # as much as one connection should be asked to begin again
PUT_AT_ONCE = 4  # each over several connections
LEAST_BYTES = 16 * 1024 * 1024  # of whole tensors: less is not worth an object of its own


class VersionTensors(Protocol):
    """What one process has of a version: it no longer changes, and is looked at once, as a version and as the parent of the
    next. On the host these are HashedTensors, on a card `trainer.learners.card.tensors.CardTensors`.
    """

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """What a manifest says of them."""

    @property
    def not_finite(self) -> str:
        """Name of the first that holds NaN or infinity, "" where none does."""

    def __getitem__(self, name: str) -> Tensor:
        """One of them, in host memory."""

    def same_as(self, name: str) -> Hashable:
        """The same for tied ones, under each of their names."""

    def differ_by(self, name: str, old: "VersionTensors") -> float:
        """About which share of its values is another one in `old`, which has it in the same dtype and shape."""

    def encoded_since(self, old: "VersionTensors") -> dict[str, Encoded]:
        """Look at them, and encode against `old` what costs less together with that."""


class HashedTensors(dict[str, Tensor]):
    """See VersionTensors: those that are in host memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._known = tensors.not_finite if isinstance(tensors, CopiedTensors) else None

    @functools.cached_property
    def _looks(self) -> dict[str, Look]:
        return looked_at(self, is_finite=self._known is not None)

    @functools.cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """What a manifest says of them."""
        return tuple(
            TensorEntry(name, tensor.dtype, tensor.shape, self._looks[name].xxh3)
            for name, tensor in sorted(self.items())
        )

    @functools.cached_property
    def not_finite(self) -> str:
        """Name of the first that holds NaN or infinity, "" where none does."""
        if self._known is not None:
            return self._known
        return next((name for name, look in self._looks.items() if not look.finite), "")

    def same_as(self, name: str) -> Hashable:
        """See VersionTensors."""
        return id(self[name])

    def differ_by(self, name: str, old: VersionTensors) -> float:
        """See VersionTensors."""
        return sampled_share(bits(old[name]), bits(self[name]))

    def encoded_since(self, old: VersionTensors) -> dict[str, Encoded]:
        """Hash them, and on the way encode against `old` what is of 16 bits and differs by a sample, so that a tensor is read
        once for both. Nothing is encoded where they were hashed before, or where `old` is not on the host.
        """
        if "_looks" in self.__dict__ or not isinstance(old, HashedTensors):
            return {}

        def look_at(name: str) -> tuple[Look, Encoded | None]:
            tensor = self[name]
            look = Look(tensor.dtype, is_finite=self._known is not None)
            before = old.get(name)
            fits = before is not None and (before.dtype, before.shape) == (tensor.dtype, tensor.shape)
            if fits and ITEM_BYTES[tensor.dtype] == 2 and self.differ_by(name, old) > 0:
                return look, encode_tensor(old[name], tensor, look.take)
            look.take(tensor.data)
            return look, None

        found = in_threads(
            look_at,
            self,
            size=lambda name: self[name].num_bytes,
            same=lambda name: (old.same_as(name) if name in old else None, self.same_as(name)),
        )
        self._looks = {name: look for name, (look, _) in zip(self, found, strict=True)}
        return {name: encoded for name, (_, encoded) in zip(self, found, strict=True) if encoded is not None}


class ShareLook(msgspec.Struct, frozen=True):
    """entries: of the version. parent: of its parent, None where the process does not have it. dense_bytes: of values of 32
    bits and more that differ, about.
    """

    entries: tuple[TensorEntry, ...]
    parent: tuple[TensorEntry, ...] | None
    dense_bytes: float = 0.0


class DeltaSize(msgspec.Struct, frozen=True):
    """What a delta would be. num_bytes: encoded. num_changed: values. not_finite: name of a tensor that must not be
    published.
    """

    num_bytes: int = 0
    num_changed: int = 0
    not_finite: str = ""


class WantedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be put. folder: see `infra.policies.manifest`. version: that is published. parent: the delta's base.
    delta, anchor: whether. slice: names, of all tensors.
    """

    folder: str
    version: int
    parent: int
    delta: bool
    anchor: bool
    slice: tuple[str, ...]


class StoredShare(msgspec.Struct, frozen=True, kw_only=True):
    """What was put. delta: shards of differences. parts: of the delta; their shards are counted from the first of
    `delta`. anchor: shards of whole tensors. slice: likewise, of some.
    """

    delta: tuple[Shard, ...] = ()
    parts: tuple[DeltaPart, ...] = ()
    anchor: tuple[Shard, ...] = ()
    slice: tuple[Shard, ...] = ()


class NewShard(msgspec.Struct, frozen=True):
    """An object that is to be put. folder: its key without its name, which its content gives. suffix: of the name.
    pieces: of its bytes, in order.
    """

    folder: str
    suffix: Literal["safetensors", "delta"]
    pieces: Pieces


class Share:
    """One process's tensors of a version. previous: the same of its parent, None for no delta. Calls block."""

    def __init__(
        self, store: Store, tensors: VersionTensors, previous: VersionTensors | None, shard_bytes: int = SHARD_BYTES
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
        self._encoded = self._tensors.encoded_since(self._previous)
        return ShareLook(self._tensors.entries, self._previous.entries, self._dense_bytes(self._previous))

    def encode(self, *, delta: bool) -> DeltaSize:
        """Encode what differs from the parent. delta: False only looks for values that are not finite."""
        if not delta or self._previous is None:
            self._encoded = {}
            return DeltaSize(not_finite=self._tensors.not_finite)
        names, old = differing(self._tensors.entries, self._previous.entries), self._previous
        encoded = in_threads(
            lambda name: self._encoded.get(name) or encode_tensor(old[name], self._tensors[name]),
            names,
            size=self._sizes.__getitem__,
            same=lambda name: (old.same_as(name), self._tensors.same_as(name)),
        )
        self._encoded = dict(zip(names, encoded, strict=True))
        return DeltaSize(
            sum(len(one.payload) for one in encoded),
            sum(one.changed for one in encoded),
            # What does not differ from the parent was found finite with it.
            next((name for name, one in self._encoded.items() if not one.finite), ""),
        )

    def put(self, wanted: WantedObjects) -> StoredShare:
        """Store what is wanted of them, several objects at once. StoreError."""
        delta, parts = self._delta(wanted) if wanted.delta else ([], ())
        anchor = self._whole(wanted, "anchors", sorted(self._sizes)) if wanted.anchor else []
        sliced = self._whole(wanted, "slices", [name for name in wanted.slice if name in self._sizes])
        shards = tuple(
            in_threads(
                self._put_shard,
                [*delta, *anchor, *sliced],
                most=PUT_AT_ONCE,
                size=lambda one: total_bytes(one.pieces),
            )
        )
        whole_from, slice_from = len(delta), len(delta) + len(anchor)
        return StoredShare(
            delta=shards[:whole_from], parts=parts, anchor=shards[whole_from:slice_from], slice=shards[slice_from:]
        )

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of each tensor."""
        return {one.name: math.prod(one.shape) * ITEM_BYTES[one.dtype] for one in self._tensors.entries}

    def _dense_bytes(self, previous: VersionTensors) -> float:
        """From a sample of each tensor."""
        found, before = 0.0, {one.name: one for one in previous.entries}
        for one in self._tensors.entries:
            old = before.get(one.name)
            if old is None or old.xxh3 == one.xxh3 or (old.dtype, old.shape) != (one.dtype, one.shape):
                continue
            if ITEM_BYTES[one.dtype] >= 4:
                found += self._tensors.differ_by(one.name, previous) * self._sizes[one.name]
        return found

    def _whole(self, wanted: WantedObjects, folder: str, names: list[str]) -> list[NewShard]:
        sizes = {name: self._sizes[name] for name in names}
        limit = min(self._shard_bytes, max(LEAST_BYTES, sum(sizes.values()) // PUT_AT_ONCE))
        return [
            NewShard(
                f"{wanted.folder}/{folder}/{wanted.version}",
                "safetensors",
                list(pieces_of({name: self._tensors[name] for name in run})),
            )
            for run in split_runs(sizes, limit)
        ]

    def _delta(self, wanted: WantedObjects) -> tuple[list[NewShard], tuple[DeltaPart, ...]]:
        shards: list[NewShard] = []
        parts: list[DeltaPart] = []
        for names in split_runs({name: len(one.payload) for name, one in self._encoded.items()}, self._shard_bytes):
            offset = 0
            for name in names:
                one = self._encoded[name]
                parts.append(DeltaPart(name, one.encoder, len(shards), offset, len(one.payload)))
                offset += len(one.payload)
            payloads = [self._encoded[name].payload for name in names]
            shards.append(NewShard(f"{wanted.folder}/deltas/{wanted.parent}-{wanted.version}", "delta", payloads))
        return shards, tuple(parts)

    def _put_shard(self, new: NewShard) -> Shard:
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
