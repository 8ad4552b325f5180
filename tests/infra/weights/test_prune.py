"""Pruning: what goes, and that everything that stays can still be fetched."""

import pytest

from infra.policies.chain import NUM_SLICES
from infra.policies.fetch import PolicyFetcher
from infra.policies.prune import prune
from infra.store.memory import MemoryStore
from schemas.errors import PolicyRefused
from tests.infra.weights.test_publish import put, put_run, small_step


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


def test_an_anchor_without_its_manifest_is_no_reason_to_prune() -> None:
    store = MemoryStore()
    events, weights = put_run(store, 3)
    store.put("policies/main/17/anchors/3/unfinished.safetensors", b"x")
    assert prune(store, "main", oldest=3) == 0
    assert dict(PolicyFetcher(store, "main").fetch(events[2]).tensors) == weights[2]
