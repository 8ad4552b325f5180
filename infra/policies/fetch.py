"""Fetches published versions and keeps the newest in memory as the base of the next delta.

Nothing unverified leaves this module: the event's sha256 vouches for the manifest, the manifest's digests for every object and
for the state of every tensor, and all values are finite. A failed check is PolicyRefused, naming the tensor or the object, and
the shadow copy stays as it was; where the held copy cannot be moved on, or is too far behind, the version is rebuilt from an
anchor in the store.
"""

import logging
from collections.abc import Callable, Mapping

import msgspec

from infra.observe.failpoint import reach
from infra.policies.chain import ANCHOR_EVERY, Chain, check_within, read_manifest, walk
from infra.policies.delta import Part, decode_chain, moved, read_chain
from infra.policies.manifest import (
    DeltaPart,
    Look,
    PolicyManifest,
    Shard,
    TensorEntry,
    WeightSource,
    first_difference,
    look_at,
    look_at_all,
    other_version,
)
from infra.policies.policy import Policy
from infra.policies.tensors import Tensor, in_threads, load_tensors
from infra.policies.version_files import Put, VersionFiles
from infra.store.store import Store, digest_of
from schemas.errors import NotInStore, PolicyRefused
from schemas.records import PolicyEvent

log = logging.getLogger(__name__)

LOADED_AT_ONCE = 8  # objects of whole tensors, each of which is held until these are where they should lie


class HeldWeights(msgspec.Struct, frozen=True):
    """The shadow copy. tensors: in host memory."""

    manifest: PolicyManifest
    tensors: Mapping[str, Tensor]


class PolicyFetcher:
    """Follows one policy. One caller at a time; `fetch` blocks, so run it in a thread. files: where whole models are put, so
    that others on this host share them.
    """

    def __init__(self, store: Store, policy: str, files: VersionFiles | None = None) -> None:
        self._store = store
        self._policy = policy
        self._files = files
        self._held: HeldWeights | None = None

    @property
    def version(self) -> int:
        """Version of the shadow copy, -1 before the first."""
        return -1 if self._held is None else self._held.manifest.version

    def fetch(self, event: PolicyEvent) -> Policy:
        """The version an event names, verified; it becomes the shadow copy.

        Raises PolicyRefused (the shadow copy stays) and StoreError (retriable; nothing changed).
        """
        if event.policy != self._policy or not event.manifest:
            raise ValueError(f"event: got {event.event} of {event.policy!r}, expected a version of {self._policy!r}")
        what = f"version {event.version} of {event.policy}"
        try:
            reach("weights.before_fetch")
            manifest, _ = read_manifest(self._store, event.manifest, event.manifest_sha256)
            if (manifest.policy, manifest.version) != (event.policy, event.version):
                raise PolicyRefused(f"{event.manifest} is version {manifest.version} of {manifest.policy}")
            _check_listing(manifest, self._held)
            tensors = self._placed(manifest, event.manifest_sha256)
            reach("weights.after_fetch")
        except NotInStore as error:
            raise PolicyRefused(f"{what}: incomplete: {error}") from error
        except PolicyRefused as error:
            raise PolicyRefused(f"{what}: {error}") from error
        self._held = HeldWeights(manifest, tensors)
        probe, adapter = manifest.probe, manifest.adapter
        return Policy(version=manifest.version, tensors=tensors, probe=probe, adapter=adapter, finite=True)

    def _placed(self, manifest: PolicyManifest, sha256: str) -> dict[str, Tensor]:
        if self._files is None or manifest.adapter is not None:
            return self._obtain(manifest)
        found = self._files.place(
            sha256, manifest.tensors, lambda put: self._obtain(manifest, put), lambda found: verified(manifest, found)
        )
        return self._obtain(manifest) if found is None else found

    def _obtain(self, manifest: PolicyManifest, put: Put | None = None) -> dict[str, Tensor]:
        # A longer way costs more than a new beginning.
        if self._held is not None and 0 <= manifest.version - self.version <= ANCHOR_EVERY:
            try:
                return rebuild(self._store, manifest, self._held, put)
            except (PolicyRefused, NotInStore) as error:
                log.warning("held copy not usable: version=%d held=%d: %s", manifest.version, self.version, error)
        return rebuild(self._store, manifest, None, put)


def rebuild(
    store: Store, manifest: PolicyManifest, held: HeldWeights | None, put: Put | None = None
) -> dict[str, Tensor]:
    """The tensors of `manifest`: from the held copy where its deltas lead there, else from an anchor.

    However long the chain, each tensor is copied once and verified once, at its end. put: to where they should lie, None for
    this process's own memory.
    """
    chain = walk(store, manifest, -1 if held is None else held.manifest.version)
    held = None if chain.anchor else held
    if held is not None and (difference := first_difference(held.manifest.tensors, chain.root.tensors, values=True)):
        raise PolicyRefused(f"held version {held.manifest.version} does not lead to {chain.root.version}: {difference}")
    parts = [_parts(store, step, source) for step, source in chain.steps]

    def at_the_end(begin: tuple[str, Tensor]) -> tuple[Tensor, Look]:
        name, tensor = begin
        chain = [step[name] for step in reversed(parts) if name in step]
        try:
            if put is None:
                end = decode_chain(chain, tensor)
                return end, look_at(end)
            base, moves = read_chain(chain, tensor)
        except ValueError as error:
            raise PolicyRefused(f"{name} in version {manifest.version}: {error}") from error
        look = Look(base.dtype)
        return put(name, base, look.through(moved(base, moves))), look

    if held is None:
        found = _from_anchor(store, chain, at_the_end)
    else:
        ends = in_threads(at_the_end, held.tensors.items(), size=lambda begin: begin[1].num_bytes)
        found = dict(zip(held.tensors, ends, strict=True))
    if strange := [name for step in parts for name in step if name not in found]:
        raise PolicyRefused(f"{strange[0]} changes before version {manifest.version}, which does not have it")
    _check_looks(manifest, found)
    return {name: tensor for name, (tensor, _) in found.items()}


def _from_anchor(
    store: Store, chain: Chain, at_the_end: Callable[[tuple[str, Tensor]], tuple[Tensor, Look]]
) -> dict[str, tuple[Tensor, Look]]:
    def taken(shard: Shard) -> dict[str, tuple[Tensor, Look]]:
        """Tensors of an object, moved on and put at once, so that the object can go."""
        try:
            tensors = load_tensors(memoryview(_read_shard(store, chain.root, shard)))
        except ValueError as error:
            raise PolicyRefused(f"{shard.key}: {error}") from error
        return {name: at_the_end((name, tensor)) for name, tensor in tensors.items()}

    assert chain.anchor is not None, "the chain leads to no held version"
    found: dict[str, tuple[Tensor, Look]] = {}
    shards = chain.anchor.shards
    for ends in in_threads(taken, shards, most=LOADED_AT_ONCE, size=lambda shard: shard.num_bytes):
        found |= ends
    return found


def _parts(store: Store, manifest: PolicyManifest, source: WeightSource) -> dict[str, Part]:
    shards = in_threads(lambda shard: memoryview(_read_shard(store, manifest, shard)), source.shards)
    try:
        found: dict[str, Part] = {part.tensor: (part.encoder, _payload(shards, part)) for part in source.parts}
    except ValueError as error:
        raise PolicyRefused(f"version {manifest.version}: {error}") from error
    if len(found) != len(source.parts):
        raise PolicyRefused(
            f"version {manifest.version}: a tensor changes twice ({len(source.parts)} parts, {len(found)} names)"
        )
    return found


def verified(manifest: PolicyManifest, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, if they are exactly the manifest's and finite. Raises PolicyRefused naming the first that is not."""
    looks = look_at_all(tensors)
    _check_looks(manifest, {name: (tensor, looks[name]) for name, tensor in tensors.items()})
    return tensors


def _check_looks(manifest: PolicyManifest, found: Mapping[str, tuple[Tensor, Look]]) -> None:
    """Raise PolicyRefused, naming a tensor, unless the found tensors are exactly the manifest's, and finite."""
    entries = tuple(TensorEntry(name, tensor.dtype, tensor.shape, look.xxh3) for name, (tensor, look) in found.items())
    if difference := first_difference(entries, manifest.tensors, values=True):
        raise PolicyRefused(difference)
    if wrong := next((name for name, (_, look) in found.items() if not look.finite), ""):
        raise PolicyRefused(f"{wrong} holds values that are not finite")


def _payload(shards: list[memoryview], part: DeltaPart) -> memoryview:
    """The payload of one tensor. ValueError where the objects do not hold it."""
    if not 0 <= part.shard < len(shards) or min(part.offset, part.num_bytes) < 0:
        raise ValueError(f"{part.tensor}: shard {part.shard} of {len(shards)}")
    payload = shards[part.shard][part.offset : part.offset + part.num_bytes]
    if len(payload) != part.num_bytes:
        raise ValueError(f"{part.tensor}: {len(payload)} bytes at {part.offset}, expected {part.num_bytes}")
    return payload


def _read_shard(store: Store, manifest: PolicyManifest, shard: Shard) -> bytes:
    check_within(manifest, shard.key)
    data = store.get(shard.key)
    if (digest := digest_of((data,))) != shard.digest or len(data) != shard.num_bytes:
        raise PolicyRefused(f"{shard.key}: got {len(data)} bytes with digest {digest}, expected {shard.digest}")
    return data


def _check_listing(manifest: PolicyManifest, held: HeldWeights | None) -> None:
    """A policy keeps its tensors for life: their names, dtypes and shapes never change, nor the adapter they are of."""
    if not manifest.tensors or len({entry.name for entry in manifest.tensors}) != len(manifest.tensors):
        raise PolicyRefused("its list of tensors is empty or has duplicates")
    if held is None:
        return
    if difference := other_version(manifest.adapter, manifest.tensors, held.manifest, values=False):
        raise PolicyRefused(f"{difference} (as in version {held.manifest.version}, held now)")
