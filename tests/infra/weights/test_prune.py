"""Old versions: what is pruned, and how a late joiner rebuilds what stays."""

import threading

import pytest

from infra.policies.chain import NUM_SLICES
from infra.policies.fetch import PolicyFetcher
from infra.policies.prune import prune
from infra.store.memory import MemoryStore
from schemas.errors import PolicyRefused
from tests.infra.weights.test_fetch import Counting
from tests.infra.weights.test_publish import NAMES, bf16, put, put_run, small_step


@pytest.mark.parametrize("oldest", [0, 1, 15, 16, 17, 18, 25, 33, 39])
def test_every_kept_version_can_still_be_joined(oldest: int) -> None:
    store = MemoryStore()
    events, weights = put_run(store, 40)
    prune(store, "main", oldest=oldest)
    for version in range(oldest, 40):
        assert dict(PolicyFetcher(store, "main").fetch(events[version]).tensors) == weights[version]
    left = {int(key.split("/")[4].removesuffix(".json").split("-")[-1]) for key in store.keys("")}
    assert oldest - NUM_SLICES < min(left) or min(left) == 0
    for version in range(min(left)):
        with pytest.raises(PolicyRefused, match="incomplete"):
            PolicyFetcher(store, "main").fetch(events[version])


def test_a_follower_of_a_pruned_version_goes_on_from_what_is_whole() -> None:
    store = MemoryStore()
    events, weights = put_run(store, 40)
    follower = PolicyFetcher(store, "main")
    follower.fetch(events[3])
    prune(store, "main", oldest=39)
    assert dict(follower.fetch(events[39]).tensors) == weights[39]


def test_nothing_is_pruned_where_the_oldest_kept_version_leads_nowhere() -> None:
    store = MemoryStore()
    put_run(store, 40)
    store.delete("policies/main/17/manifests/28.json")
    assert prune(store, "main", oldest=30) == 0


def test_pruning_crosses_leases_and_leaves_other_policies_alone() -> None:
    store = MemoryStore()
    _, weights = put_run(store, 3)
    store.put("policies/main-2/17/manifests/0.json", b"{}")
    step = small_step(weights[2], 9)
    event = put(store, 3, step, weights[2], token=40)
    assert prune(store, "main", oldest=2) == 0
    assert prune(store, "main", oldest=3) == 6
    assert [key.split("/")[2] for key in store.keys("policies/main/")] == ["40", "40"]
    assert list(store.keys("policies/main-2/")) == ["policies/main-2/17/manifests/0.json"]
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == step


class LiveObject(bytes):
    """An object that was read; the store counts those that somebody still holds."""

    store: "CountingLiving"

    def __del__(self) -> None:
        self.store.count(-1)


class CountingLiving(MemoryStore):
    """A store that knows how many of the anchor's shards that it gave are held at the same time. most: at the worst."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = self.given = 0
        self._counting = threading.Lock()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        if "/anchors/" not in key:
            return data
        shard = LiveObject(data)
        shard.store = self
        self.count(1)
        return shard

    def count(self, change: int) -> None:
        with self._counting:
            self.held += change
            self.given += change > 0
            self.most = max(self.most, self.held)


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
