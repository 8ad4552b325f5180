"""Following a policy: everything that must be refused, and how far logprobs may differ."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infra.observe import failpoint
from infra.policies.agreement import DRIFT, FLOOR_TOKENS, LARGEST, SPREAD, Agreement, agreement, disagreement, joined
from infra.policies.chain import read_manifest
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import HashedTensors, PolicyManifest, Shard, decode_manifest, sha256_hex
from infra.policies.tensors import Tensor, save_tensors
from infra.store.directory import INCOMING, STALE_AFTER_S, DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.store import digest_of
from schemas import PolicyEvent
from schemas.errors import PolicyRefused, StoreError
from tests.infra.weights.test_publish import NAMES, bf16, first_weights, put, put_run, small_step
from trainer.loop.prune import remove_unfinished


class Counting(MemoryStore):
    """A store that counts the objects and bytes it was asked for, and can be offline."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.offline = False

    def get(self, key: str) -> bytes:
        if self.offline:
            raise StoreError("store offline")
        self.read.append(key)
        return super().get(key)


def test_a_held_copy_of_another_lineage_is_rebuilt_from_the_anchor() -> None:
    store = MemoryStore()
    events, weights = put_run(store, 3)
    follower = PolicyFetcher(store, "main")
    follower.fetch(put(store, 1, small_step(weights[1], 99), token=99))
    assert dict(follower.fetch(events[2]).tensors) == weights[2]


def test_an_unreachable_store_is_retriable_and_changes_nothing() -> None:
    store = Counting()
    events, weights = put_run(store, 2)
    follower = PolicyFetcher(store, "main")
    follower.fetch(events[0])
    store.offline = True
    with pytest.raises(StoreError) as caught:
        follower.fetch(events[1])
    assert caught.value.retriable
    assert follower.version == 0
    store.offline = False
    assert dict(follower.fetch(events[1]).tensors) == weights[1]


# What must be refused ------------------------------------------------------------------------------------------------


def run_of(num_versions: int) -> tuple[dict[str, bytes], list[PolicyEvent], list[dict[str, Tensor]]]:
    store = MemoryStore()
    events, weights = put_run(store, num_versions)
    return {key: store.get(key) for key in store.keys("")}, events, weights


def store_of(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    return store


def damages(data: bytes, generator: np.random.Generator) -> list[bytes | None]:
    """Truncations, flips, additions and absence (None) of one object."""
    cuts: list[bytes | None] = [data[: int(cut)] for cut in generator.integers(0, len(data), 4)]
    for _ in range(6):
        flipped = bytearray(data)
        flipped[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
        cuts.append(bytes(flipped))
    return [*cuts, b"", data + b"\0", data[:-1], None]


def damaged(store: MemoryStore, key: str, data: bytes | None) -> None:
    store.delete(key) if data is None else store.put(key, data)


def test_every_damage_to_every_object_is_refused_by_a_joiner_and_its_copy_stays() -> None:
    """Version 2 needs anchor 0, both deltas and three manifests; without any of them it must not exist."""
    objects, events, weights = run_of(3)
    assert len(objects) == 6
    generator = np.random.default_rng(0)
    other_lineage = first_weights() | {NAMES[0]: bf16(77)}
    for key, whole in objects.items():
        for data in damages(whole, generator):
            store = store_of(objects)
            damaged(store, key, data)
            follower = PolicyFetcher(store, "main")
            with pytest.raises(PolicyRefused, match="version 2 of main"):
                follower.fetch(events[2])
            assert follower.version == -1
            follower.fetch(put(store, 0, other_lineage, token=99))
            with pytest.raises(PolicyRefused, match="version 2 of main"):
                follower.fetch(events[2])
            assert follower.version == 0
            store.put(key, whole)
            assert dict(follower.fetch(events[2]).tensors) == weights[2]


def test_a_steady_follower_needs_only_the_newest_objects_and_keeps_its_copy_where_they_are_damaged() -> None:
    objects, events, weights = run_of(3)
    generator = np.random.default_rng(1)
    needed = [key for key in objects if "/deltas/1-2/" in key or key.endswith("manifests/2.json")]
    assert len(needed) == 2
    for key in needed:
        for data in damages(objects[key], generator):
            store = store_of(objects)
            follower = PolicyFetcher(store, "main")
            follower.fetch(events[1])
            damaged(store, key, data)
            with pytest.raises(PolicyRefused):
                follower.fetch(events[2])
            assert follower.version == 1
            store.put(key, objects[key])
            policy = follower.fetch(events[2])
            assert dict(policy.tensors) == weights[2]


def test_a_damaged_delta_is_walked_around_where_an_anchor_exists() -> None:
    store = MemoryStore()
    events, weights = put_run(store, 5)
    follower = PolicyFetcher(store, "main")
    follower.fetch(events[4])
    step = weights[4]
    for seed in range(30):
        step = small_step(step, seed, NAMES)
    event = put(store, 5, step, weights[4])
    assert event.stats["anchor"] and event.stats["changed_share"] > 1 / 8
    store.delete(next(store.keys("policies/main/17/deltas/4-5/")))
    assert dict(follower.fetch(event).tensors) == step


def forged(
    change: Callable[[PolicyManifest], PolicyManifest], tensors: dict[str, Tensor] | None = None
) -> tuple[MemoryStore, PolicyEvent]:
    """Version 1 as an anchor with a manifest that was changed before it was signed by its event."""
    store = MemoryStore()
    weights = first_weights()
    put(store, 0, weights)
    event = put(store, 1, tensors or small_step(weights, 1))
    data = msgspec.json.encode(change(read_manifest(store, event.manifest)[0]))
    store.put(event.manifest, data)
    return store, msgspec.structs.replace(event, manifest_sha256=sha256_hex(data))


def refused(store: MemoryStore, event: PolicyEvent) -> str:
    """The message with which a follower that holds version 0 refuses `event`."""
    follower = PolicyFetcher(store, "main")
    follower.fetch(put(store, 0, first_weights(), token=99))
    with pytest.raises(PolicyRefused) as caught:
        follower.fetch(event)
    assert follower.version == 0
    return str(caught.value)


def with_anchor(tensors: dict[str, Tensor]) -> tuple[MemoryStore, PolicyEvent]:
    """Version 1 whose anchor and listing are exactly `tensors`, hashes and all, as a faulty trainer would write it."""
    store = MemoryStore()
    data = save_tensors(tensors)
    key = "policies/main/17/anchors/1/x.safetensors"
    store.put(key, data)
    event = put(store, 0, first_weights())
    manifest = read_manifest(store, event.manifest)[0]
    source = msgspec.structs.replace(
        manifest.sources[0], shards=(Shard(key=key, num_bytes=len(data), digest=digest_of((data,))),)
    )
    manifest = msgspec.structs.replace(manifest, version=1, sources=(source,), tensors=HashedTensors(tensors).entries)
    encoded = msgspec.json.encode(manifest)
    store.put("policies/main/17/manifests/1.json", encoded)
    return store, msgspec.structs.replace(
        event, version=1, manifest="policies/main/17/manifests/1.json", manifest_sha256=sha256_hex(encoded)
    )


def norm_of(pattern: int | None = None, shape: tuple[int, ...] = (200, 100), dtype: str = "BF16") -> Tensor:
    patterns = np.frombuffer(first_weights()["norm"].data, np.uint16).copy()
    if pattern is not None:
        patterns[123] = pattern
    return Tensor(dtype, shape, patterns.tobytes())


NOT_FINITE = "norm holds values that are not finite"
STRANGE: list[tuple[dict[str, Tensor | None], str]] = [
    ({"layers.1.w": None}, "layers.1.w is missing"),
    ({"extra": bf16(5)}, "extra is not expected"),
    ({"norm": norm_of(shape=(100, 200))}, "norm is BF16[100, 200], expected BF16[200, 100]"),
    ({"norm": norm_of(dtype="F16")}, "norm is F16"),
    *(({"norm": norm_of(pattern)}, NOT_FINITE) for pattern in (0x7FC0, 0x7F80, 0xFF80, 0x7F81)),
]


@pytest.mark.parametrize(("changed", "words"), STRANGE)
def test_a_tensor_that_is_not_as_expected_is_refused_by_name(changed: dict[str, Tensor | None], words: str) -> None:
    tensors = first_weights() | changed
    assert words in refused(*with_anchor({name: tensor for name, tensor in tensors.items() if tensor is not None}))


def with_shard(manifest: PolicyManifest, **changed: str) -> PolicyManifest:
    """The manifest with something else said of its first object."""
    source = manifest.sources[0]
    first = msgspec.structs.replace(source.shards[0], **changed)
    shards = (first, *source.shards[1:])
    return msgspec.structs.replace(manifest, sources=(msgspec.structs.replace(source, shards=shards),))


def other_hash(manifest: PolicyManifest) -> PolicyManifest:
    first, *rest = manifest.tensors
    return msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(first, xxh3="0" * 32), *rest))


FORGERIES: dict[str, tuple[Callable[[PolicyManifest], PolicyManifest], str]] = {
    "another version": (lambda manifest: msgspec.structs.replace(manifest, version=7), "is version 7 of main"),
    "another policy": (lambda manifest: msgspec.structs.replace(manifest, policy="x"), "is version 1 of x"),
    "no tensors": (lambda manifest: msgspec.structs.replace(manifest, tensors=()), "empty"),
    "twice": (lambda m: msgspec.structs.replace(m, tensors=(*m.tensors, m.tensors[0])), "has duplicates"),
    "another hash": (other_hash, "layers.0.w has other values"),
    "no shards": (
        lambda m: msgspec.structs.replace(m, sources=(msgspec.structs.replace(m.sources[0], shards=()),)),
        "layers.0.w is missing",
    ),
    "no sources": (lambda manifest: msgspec.structs.replace(manifest, sources=()), "no anchor"),
    "another format": (lambda manifest: msgspec.structs.replace(manifest, format=5), "another release wrote it"),
    "foreign object": (
        lambda m: msgspec.structs.replace(
            m, sources=(msgspec.structs.replace(m.sources[0], shards=(Shard("keys/tenant", 1, digest="blake3:0"),)),)
        ),
        "keys/tenant is not an object of main",
    ),
    "another digest": (lambda m: with_shard(m, digest=f"md5:{32 * '0'}"), "expected md5:"),
    "no digest": (lambda m: with_shard(m, digest=""), "with digest blake3:"),
    "circle": (
        lambda m: msgspec.structs.replace(m, sources=(msgspec.structs.replace(m.sources[0], kind="delta", base=1),)),
        "does not end",
    ),
}


@pytest.mark.parametrize("name", sorted(FORGERIES))
def test_a_manifest_that_contradicts_itself_is_refused(name: str) -> None:
    change, words = FORGERIES[name]
    assert words in refused(*forged(change))


def test_arbitrary_manifests_only_ever_raise_value_error() -> None:
    whole = msgspec.json.encode(read_manifest(*published_one())[0])
    generator = np.random.default_rng(0)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(int(generator.integers(1, 4))):
            data[int(generator.integers(len(data)))] = int(generator.integers(256))
        try:
            assert isinstance(decode_manifest(bytes(data)), PolicyManifest)
        except ValueError:
            continue
    for data in (b"", b"[" * 100_000, b"\xff", b"null", b'{"format": 1}', whole[:-1]):
        with pytest.raises(ValueError, match="manifest"):
            decode_manifest(data)


def published_one() -> tuple[MemoryStore, str]:
    store = MemoryStore()
    return store, put(store, 0, first_weights()).manifest


POINTS = (
    *(f"{point}=kill@{number}" for point in ("weights.before_shard", "weights.after_shard") for number in (1, 2, 3)),
    *(f"store.write=tear@{number}" for number in (1, 2, 3, 4)),  # three shards, and the manifest
    *(f"store.before_rename=kill@{number}" for number in (1, 2, 3, 4)),
    "weights.before_manifest=kill",
    "weights.after_manifest=kill",
)
SHARD_BYTES = 2 * 20_000 + 1  # one tensor


def publish_and_be_killed(folder: Path) -> None:
    """Each point in a process of its own, under a lease of its own."""
    store, weights = DirectoryStore(folder), small_step(first_weights(), 1)
    for point in POINTS:
        if not (child := os.fork()):
            os.environ[failpoint.VARIABLE] = point
            failpoint.check()
            put(store, 1, weights, token=int(token_of(point)), shard_bytes=SHARD_BYTES)
            os._exit(0)  # it was not killed
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, point


def test_a_publisher_killed_anywhere_changes_no_version_and_what_it_left_goes(tmp_path: Path) -> None:
    store, weights = DirectoryStore(tmp_path), first_weights()
    event = put(store, 0, weights, shard_bytes=SHARD_BYTES)
    process = multiprocessing.get_context("spawn").Process(target=publish_and_be_killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == weights
    unfinished = [*(tmp_path / INCOMING).iterdir()]
    assert len(unfinished) >= sum("store." in point for point in POINTS), "several are written at once"
    in_the_manifest, whole = (token_of(point) for point in ("store.write=tear@4", "weights.after_manifest=kill"))
    before_it = token_of("weights.before_manifest=kill")
    assert {in_the_manifest, before_it, whole} <= tokens_in(store), "they had put all but the manifest, or that too"

    new = small_step(weights, 2)
    event = put(store, 1, new, token=1000, shard_bytes=SHARD_BYTES)
    assert remove_unfinished(store, "main", before=1000) >= 12
    assert tokens_in(store) == {"17", whole, "1000"}, "a version that is whole goes like any other"
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == new
    old = time.time() - STALE_AFTER_S - 1
    for path in unfinished:
        os.utime(path, (old, old))
    DirectoryStore(tmp_path)
    assert not [*(tmp_path / INCOMING).iterdir()]


def token_of(point: str) -> str:
    return str(100 + POINTS.index(point))


def tokens_in(store: DirectoryStore) -> set[str]:
    return {key.split("/")[2] for key in store.keys("policies/main/")}


NOISE = 0.02  # nats at surprise 0, above what a floor may at least be


def reading(random: np.random.Generator, noise: float, *, tokens: int = 63, rows: int = 4) -> tuple[list, list]:
    """A reading of `rows` sequences and one that is off by half-normal e."""
    theirs = -random.exponential(3.0, (rows, tokens))
    ours = theirs + noise * random.normal(size=theirs.shape) * (1 - theirs)
    return ours.tolist(), theirs.tolist()


def unlike(random: np.random.Generator, floor: Agreement, noise: float, trials: int = 300) -> float:
    found = [agreement(*reading(random, noise)) for _ in range(trials)]
    return sum(bool(disagreement(one, floor, "bfloat16")) for one in found) / trials


def floors(random: np.random.Generator, count: int) -> list[Agreement]:
    return [agreement(*reading(random, NOISE, rows=FLOOR_TOKENS // 63 + 1)) for _ in range(count)]


def test_where_the_assumptions_hold_no_honest_version_is_refused_also_after_the_drift_that_is_allowed() -> None:
    random = np.random.default_rng(0)
    for scale in (1 / DRIFT, 1.0, DRIFT):
        assert max(unlike(random, floor, scale * NOISE) for floor in floors(random, 10)) == 0.0


def test_versions_whose_noise_varies_as_much_as_is_assumed_are_not_refused() -> None:
    """All tokens of a version share a factor; with what single tokens add, the spread is what assumption 2 allows."""
    random = np.random.default_rng(5)
    shared = math.sqrt(SPREAD**2 - 1) / math.sqrt(252)
    (floor,) = floors(random, 1)
    found = [agreement(*reading(random, NOISE * math.exp(shared * random.normal()))) for _ in range(3000)]
    assert sum(bool(disagreement(one, floor, "bfloat16")) for one in found) <= 1


def test_a_fault_of_a_tenth_of_the_tokens_is_told_by_the_percentile() -> None:
    random = np.random.default_rng(2)
    (floor,) = floors(random, 1)
    for _ in range(50):
        ours, theirs = (np.array(one) for one in reading(random, NOISE))
        ours[:, ::10] += 1.0 - theirs[:, ::10]  # one nat per nat
        assert disagreement(agreement(ours.tolist(), theirs.tolist()), floor, "bfloat16")


def test_unlikely_tokens_do_not_decide() -> None:
    likely, unlikely = [[-0.1] * 20], [[-19.0] * 20]
    off = 0.2
    assert agreement([[-0.1 + off] * 20], likely).mean == pytest.approx(off / 1.1)
    assert agreement([[-19.0 + off] * 20], unlikely).mean == pytest.approx(off / 20)


def test_float32_is_bounded_by_its_largest_difference_per_nat_of_surprise_alone() -> None:
    most = LARGEST["float32"]
    assert not disagreement(Agreement(10, 9.0, 9.0, 9.0, top=most), None, "float32")
    assert not disagreement(agreement([[-0.1] * 19 + [-5.18 + 1.5e-4]], [[-0.1] * 19 + [-5.18]]), None, "float32")
    far = agreement([[-5.18] * 19 + [-0.1 + 1.21e-4]], [[-5.18] * 19 + [-0.1]])
    assert "differ by 1.10e-04 per nat of surprise, expected at most 1e-04" in disagreement(far, None, "float32")


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_finite_is_refused(odd: float, dtype: str) -> None:
    for ours, theirs in (([[odd, -1.0]], [[-1.0, -1.0]]), ([[-1.0, -1.0]], [[odd, -1.0]])):
        assert disagreement(agreement(ours, theirs), None, dtype)


def test_a_floor_is_made_of_the_first_accepted_tokens_and_then_stays() -> None:
    floor = None
    for _ in range(FLOOR_TOKENS // 128):
        floor = joined(floor, Agreement(128, 0.01, 0.04, 0.1))
    assert floor is not None and floor.tokens == FLOOR_TOKENS and floor.mean == pytest.approx(0.01)
    assert joined(floor, Agreement(128, 0.5, 0.9, 3.0)) == floor
