"""Who joins late or slept reads a bounded part of what was published, and gets the very weights."""

import pytest

from infra.policies.chain import NUM_SLICES
from infra.policies.fetch import PolicyFetcher
from infra.policies.tensors import save_tensors
from infra.store.memory import MemoryStore
from schemas.errors import PolicyRefused
from tests.infra.weights.test_fetch import Counting
from tests.infra.weights.test_publish import NAMES, bf16, put, put_run, small_step


@pytest.mark.parametrize("dense", [False, True])
def test_a_late_joiner_holds_what_a_step_by_step_follower_holds(dense: bool) -> None:
    store = MemoryStore()
    events, weights = put_run(store, 40)
    if dense:  # an anchor in between, of a version that nothing has in common with the one before
        weights.append({name: bf16(100 + seed) for seed, name in enumerate(NAMES)})
        events.append(put(store, 40, weights[-1], weights[-2]))
        assert events[-1].stats["anchor"]
        for version in range(41, 50):
            weights.append(small_step(weights[-1], version))
            events.append(put(store, version, weights[-1], weights[-2]))
    steady = PolicyFetcher(store, "main")
    for event, expected in zip(events, weights, strict=True):
        policy = steady.fetch(event)
        late = PolicyFetcher(store, "main").fetch(event)
        assert dict(policy.tensors) == dict(late.tensors) == expected
        assert policy.version == late.version == event.version


def test_what_a_late_joiner_reads_has_a_bound_however_old_the_anchor_is() -> None:
    store = Counting()
    events, weights = put_run(store, 60)
    read = []
    for version in (20, 40, 59):
        store.read.clear()
        assert dict(PolicyFetcher(store, "main").fetch(events[version]).tensors) == weights[version]
        read.append(sum(len(MemoryStore.get(store, key)) for key in store.read))
        kinds = [key.split("/")[3] for key in store.read]
        assert (kinds.count("anchors"), kinds.count("slices")) == (0, 3)
        assert kinds.count("deltas") < NUM_SLICES
        assert kinds.count("manifests") <= NUM_SLICES
    assert max(read) < 1.5 * sum(tensor.num_bytes for tensor in weights[0].values())


def test_a_young_run_is_joined_by_its_anchor() -> None:
    store = Counting()
    events, weights = put_run(store, 4)
    store.read.clear()
    assert dict(PolicyFetcher(store, "main").fetch(events[3]).tensors) == weights[3]
    assert sum("/anchors/" in key for key in store.read) == 1


@pytest.mark.parametrize(("behind", "begins_anew"), [(1, False), (4, False), (16, False), (17, True), (30, True)])
def test_a_follower_that_slept_takes_the_deltas_it_lacks_or_begins_anew(behind: int, begins_anew: bool) -> None:
    store = Counting()
    events, weights = put_run(store, 40)
    follower = PolicyFetcher(store, "main")
    follower.fetch(events[39 - behind])
    store.read.clear()
    assert dict(follower.fetch(events[39]).tensors) == weights[39]
    assert any("/slices/" in key for key in store.read) == begins_anew
    assert sum("/deltas/" in key for key in store.read) <= min(behind, NUM_SLICES)
    follower.fetch(events[0])  # pinned back
    assert dict(follower.fetch(events[11]).tensors) == weights[11]


def test_tensors_of_a_slice_that_are_not_what_it_says_are_refused() -> None:
    store = MemoryStore()
    events, weights = put_run(store, 40)
    key = next(key for key in store.keys("policies/main/17/slices/") if store.size(key) > 1000)
    store.put(key, save_tensors({"layers.0.w": bf16(1), "strange": bf16(2)}))
    with pytest.raises(PolicyRefused, match="with digest blake3:"):
        PolicyFetcher(store, "main").fetch(events[int(key.split("/")[4])])
    assert dict(PolicyFetcher(store, "main").fetch(events[39]).tensors) == weights[39]
