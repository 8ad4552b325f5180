"""Old versions: what is pruned, and how a late joiner rebuilds what stays."""

import pytest

from infra.policies.chain import ANCHOR_EVERY
from infra.policies.fetch import PolicyFetcher
from infra.store.memory import MemoryStore
from schemas.errors import PolicyRefused
from tests.infra.weights.test_fetch import Counting
from tests.infra.weights.test_publish import put, put_run, small_step
from trainer.loop.prune import prune


@pytest.mark.parametrize("oldest", [0, 1, 15, 16, 17, 18, 25, 33, 39])
def test_every_kept_version_can_still_be_joined(oldest: int) -> None:
    store = MemoryStore()
    events, weights = put_run(store, 40)
    prune(store, "main", oldest=oldest)
    for version in range(oldest, 40):
        assert dict(PolicyFetcher(store, "main").fetch(events[version]).tensors) == weights[version]
    left = {int(key.split("/")[4].removesuffix(".json").split("-")[-1]) for key in store.keys("")}
    assert min(left) == oldest - oldest % ANCHOR_EVERY
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
    assert event.stats["anchor"], "a new lease starts with an anchor"
    assert prune(store, "main", oldest=2) == 0
    assert prune(store, "main", oldest=3) == 6
    assert [key.split("/")[2] for key in store.keys("policies/main/")] == ["40", "40"]
    assert list(store.keys("policies/main-2/")) == ["policies/main-2/17/manifests/0.json"]
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == step


def test_what_a_late_joiner_reads_has_a_bound_however_old_the_policy_is() -> None:
    store = Counting()
    events, weights = put_run(store, 64)
    for version, num_deltas in ((16, 0), (20, 4), (63, 15)):
        store.read.clear()
        assert dict(PolicyFetcher(store, "main").fetch(events[version]).tensors) == weights[version]
        kinds = [key.split("/")[3] for key in store.read]
        assert kinds.count("anchors") == 1
        assert (kinds.count("deltas"), kinds.count("manifests")) == (num_deltas, num_deltas + 1)


@pytest.mark.parametrize(("behind", "begins_anew"), [(1, False), (4, False), (16, False), (17, True), (30, True)])
def test_a_follower_that_slept_takes_the_deltas_it_lacks_or_begins_anew(behind: int, begins_anew: bool) -> None:
    store = Counting()
    events, weights = put_run(store, 40)
    follower = PolicyFetcher(store, "main")
    follower.fetch(events[39 - behind])
    store.read.clear()
    assert dict(follower.fetch(events[39]).tensors) == weights[39]
    assert any("/anchors/" in key for key in store.read) == begins_anew
    assert sum("/deltas/" in key for key in store.read) <= min(behind, ANCHOR_EVERY)
    follower.fetch(events[0])  # pinned back
    assert dict(follower.fetch(events[11]).tensors) == weights[11]
