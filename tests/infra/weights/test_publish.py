"""Publishing: what is written, when it is an anchor, that a version has one content, and versions of adapters."""

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from infra.policies.chain import ANCHOR_EVERY, read_manifest
from infra.policies.fetch import PolicyFetcher
from infra.policies.policy import Adapter, Probe
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import PolicyRefused, StoreError

NAMES = ("layers.0.w", "layers.1.w", "norm")


def bf16(seed: int, size: int = 20_000) -> Tensor:
    values = np.random.default_rng(seed).normal(0, 0.02, size).astype(np.float32)
    return Tensor("BF16", (size // 100, 100), (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def first_weights() -> dict[str, Tensor]:
    return {name: bf16(seed) for seed, name in enumerate(NAMES)}


def small_step(tensors: Mapping[str, Tensor], seed: int, names: tuple[str, ...] = NAMES[:2]) -> dict[str, Tensor]:
    """One ulp more or less for 1% of the values of `names`."""
    generator = np.random.default_rng(seed)
    moved = dict(tensors)
    for name in names:
        patterns = np.frombuffer(tensors[name].data, np.uint16).copy()
        chosen = generator.choice(patterns.size, patterns.size // 100, replace=False)
        patterns[chosen] += generator.choice([1, 0xFFFF], chosen.size).astype(np.uint16)
        moved[name] = Tensor("BF16", tensors[name].shape, patterns.tobytes())
    return moved


def put(
    store: Store,
    version: int,
    tensors: Mapping[str, Tensor],
    previous: Mapping[str, Tensor] | None = None,
    *,
    token: int = 17,
    probe: Probe | None = None,
    shard_bytes: int = 2**29,
) -> PolicyEvent:
    return publish(
        store,
        NewVersion(policy="main", token=token, version=version, parent=version - 1, step=version),
        tensors,
        previous=previous,
        probe=probe,
        shard_bytes=shard_bytes,
    )


def put_run(store: Store, num_versions: int, **options: int) -> tuple[list[PolicyEvent], list[dict[str, Tensor]]]:
    """Versions 0 to num_versions - 1, each a small step after the one before."""
    events, weights = [], [first_weights()]
    for version in range(num_versions):
        events.append(put(store, version, weights[-1], weights[-2] if version else None, **options))
        weights.append(small_step(weights[-1], version))
    return events, weights[:-1]


class Recording(MemoryStore):
    """A store that remembers the order of its writes, and can be told to fail at one of them."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.written: list[str] = []
        self.fail_at = fail_at

    def put(self, key: str, data: bytes) -> None:
        if len(self.written) == self.fail_at:
            raise StoreError("disk full")
        self.written.append(key)
        super().put(key, data)


def test_the_manifest_is_written_last_and_the_event_names_it() -> None:
    store = Recording()
    event = put_run(store, 4)[0][0]
    kinds = [key.split("/")[3] for key in store.written]
    assert kinds == ["anchors", "manifests", *["deltas", "manifests"] * 3]
    assert event.manifest == "policies/main/17/manifests/0.json"
    assert read_manifest(store, event.manifest, event.manifest_sha256)[0].version == 0
    assert all(key.startswith("policies/main/17/") for key in store.written)


def test_a_small_step_costs_little_and_an_unchanged_tensor_nothing() -> None:
    store, weights = MemoryStore(), first_weights()
    put(store, 0, weights)
    event = put(store, 1, small_step(weights, 1), weights)
    assert event.stats["bytes"] * 60 < event.stats["full_bytes"]
    assert event.stats["changed_share"] == pytest.approx(0.01 * 2 / 3)
    manifest, _ = read_manifest(store, event.manifest)
    assert [part.tensor for part in manifest.sources[0].parts] == list(NAMES[:2])
    event = put(store, 2, small_step(weights, 1), small_step(weights, 1))
    assert event.stats["bytes"] == 0.0


def test_every_version_but_the_first_is_a_delta_and_each_sixteenth_an_anchor_too() -> None:
    store = MemoryStore()
    events, _ = put_run(store, 40)
    assert [event.version for event in events if event.stats["anchor"]] == [0, 16, 32]
    for event in events:
        kinds = [source.kind for source in read_manifest(store, event.manifest)[0].sources]
        assert kinds == [*["delta"] * (event.version > 0), *["anchor"] * (event.version % ANCHOR_EVERY == 0)]


def test_weights_that_change_everywhere_are_anchors_without_a_delta() -> None:
    store, generator = MemoryStore(), np.random.default_rng(0)
    before = {"w": from_numpy(generator.normal(size=9_000).astype(np.float32))}
    after = {"w": from_numpy(generator.normal(size=9_000).astype(np.float32))}
    put(store, 0, before)
    event = put(store, 1, after, before)
    assert (event.stats["anchor"], event.stats["bytes"] / event.stats["full_bytes"]) == (
        1.0,
        pytest.approx(1, abs=0.01),
    )
    assert not list(store.keys("policies/main/17/deltas/"))


def test_publishing_again_gives_the_same_event_and_changes_no_object() -> None:
    store, weights = Recording(), first_weights()
    probe = Probe(sequences=((1, 2, 3),), logprobs=((-0.5, -1.25),))
    put(store, 0, weights)
    step = small_step(weights, 1)
    event = put(store, 1, step, weights, probe=probe)
    written = list(store.written)
    assert put(store, 1, step, weights, probe=probe) == event
    assert put(store, 1, step, None) == event
    assert store.written == written


def test_a_version_never_has_two_contents() -> None:
    store, weights = MemoryStore(), first_weights()
    event = put(store, 0, weights)
    with pytest.raises(PolicyRefused, match=r"version 0 of main is published already.*layers\.0\.w has other values"):
        put(store, 0, small_step(weights, 1))
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == weights


@pytest.mark.parametrize("fail_at", [2, 3])
def test_a_publication_that_died_is_invisible_and_can_be_repeated(fail_at: int) -> None:
    store, weights = Recording(fail_at), first_weights()
    put(store, 0, weights)
    step = small_step(weights, 1)
    with pytest.raises(StoreError):
        put(store, 1, step, weights)
    assert list(store.keys("policies/main/17/manifests/")) == ["policies/main/17/manifests/0.json"]
    store.fail_at = -1
    event = put(store, 1, step, weights)
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == step


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_never_published(bad: float) -> None:
    store = Recording()
    with pytest.raises(PolicyRefused, match="version 0: w holds values that are not finite"):
        put(store, 0, {"v": from_numpy(np.ones(2, np.float32)), "w": from_numpy(np.array([1, bad], np.float32))})
    assert store.written == []


@pytest.mark.parametrize("bad", [0x7FC0, 0x7F80, 0xFF80, 0x7F81, 0xFFFF])
@pytest.mark.parametrize("dense", [False, True])
def test_a_change_that_is_not_finite_is_never_published(bad: int, dense: bool) -> None:
    store, weights = Recording(), first_weights()
    put(store, 0, weights)
    written = list(store.written)
    step = small_step(weights, 1)
    patterns = np.frombuffer(step["layers.1.w"].data, np.uint16).copy()
    patterns[: 15_000 if dense else 3] += 1
    patterns[17] = bad
    step["layers.1.w"] = Tensor("BF16", step["layers.1.w"].shape, patterns.tobytes())
    with pytest.raises(PolicyRefused, match=r"version 1: layers\.1\.w holds values that are not finite"):
        put(store, 1, step, weights)
    assert store.written == written


def test_a_previous_that_is_not_what_was_published_is_the_callers_mistake() -> None:
    store, weights = MemoryStore(), first_weights()
    put(store, 0, weights)
    step = small_step(weights, 1)
    with pytest.raises(ValueError, match=r"previous: not version 0 as published: layers\.0\.w has other values"):
        put(store, 1, small_step(step, 2), step)
    with pytest.raises(ValueError, match="norm is missing"):
        put(store, 1, {name: step[name] for name in NAMES[:2]}, weights)


def test_tied_tensors_are_published_under_each_name_as_if_they_were_two() -> None:
    store, other = MemoryStore(), MemoryStore()
    first, table = first_weights(), bf16(9)
    after = small_step({"w": table}, 3, ("w",))["w"]
    apart = Tensor(table.dtype, table.shape, bytes(table.data)), Tensor(after.dtype, after.shape, bytes(after.data))
    for at, (two, four) in ((store, (table, after)), (other, apart)):
        old, new = first | {"in": table, "out": two}, first | {"in": after, "out": four}
        put(at, 0, old)
        put(at, 1, new, old)
    assert {key: store.get(key) for key in store.keys("")} == {key: other.get(key) for key in other.keys("")}


def test_large_models_are_split_into_shards() -> None:
    store, weights = MemoryStore(), first_weights()
    put(store, 0, weights, shard_bytes=50_000)
    step = small_step(weights, 1)
    event = put(store, 1, step, weights, shard_bytes=300)
    assert len(list(store.keys("policies/main/17/anchors/0/"))) == 3
    assert len(list(store.keys("policies/main/17/deltas/0-1/"))) == 2
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == step


def test_a_damaged_parent_leads_to_a_new_anchor() -> None:
    store = MemoryStore()
    _, weights = put_run(store, 5)
    store.put("policies/main/17/manifests/4.json", b"{}")
    event = put(store, 5, small_step(weights[4], 5), weights[4])
    assert event.stats["anchor"]
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == small_step(weights[4], 5)


ADAPTER = Adapter(rank=4, alpha=8, targets=("q_proj",), base="9f")
OTHER = msgspec.structs.replace(ADAPTER, alpha=16)


def put_adapter(
    store: Store,
    version: int,
    tensors: dict[str, Tensor],
    adapter: Adapter | None,
    previous: dict[str, Tensor] | None = None,
) -> PolicyEvent:
    new = NewVersion(policy="main", token=17, version=version, parent=version - 1, step=version, adapter=adapter)
    return publish(store, new, tensors, previous=previous, probe=None)


def test_an_adapter_comes_with_its_tensors_through_anchors_and_deltas() -> None:
    store, first = MemoryStore(), first_weights()
    second = small_step(first, 1)
    events = [put_adapter(store, 0, first, ADAPTER), put_adapter(store, 1, second, ADAPTER, first)]
    manifest, _ = read_manifest(store, events[1].manifest)
    assert manifest.source("delta", 0) is not None
    steady = PolicyFetcher(store, "main")
    assert [steady.fetch(event).adapter for event in events] == [ADAPTER, ADAPTER]
    late = PolicyFetcher(store, "main").fetch(events[1])
    assert (late.adapter, dict(late.tensors)) == (ADAPTER, second)


@pytest.mark.parametrize(("before", "after"), [(None, ADAPTER), (ADAPTER, None), (ADAPTER, OTHER)])
def test_a_policy_keeps_its_adapter_for_life(before: Adapter | None, after: Adapter | None) -> None:
    store, tensors = MemoryStore(), first_weights()
    moved = small_step(tensors, 1)
    first = put_adapter(store, 0, tensors, before)
    with pytest.raises(PolicyRefused, match="version 0 of main is published already"):
        put_adapter(store, 0, tensors, after)
    with pytest.raises(ValueError, match="differ from version 0"):
        put_adapter(store, 1, moved, after, tensors)
    second = put_adapter(store, 1, moved, after)  # without a base it may: a new run under the policy's name begins anew
    follower = PolicyFetcher(store, "main")
    follower.fetch(first)
    with pytest.raises(PolicyRefused, match=r"expected .* \(as in version 0, held now"):
        follower.fetch(second)
    assert PolicyFetcher(store, "main").fetch(second).adapter == after
