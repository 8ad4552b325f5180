"""Versions that are an adapter: their manifests say of what, and nobody takes one for a whole model."""

import msgspec
import pytest

from infra.policies.adapter import Adapter
from infra.policies.chain import read_manifest
from infra.policies.fetch import PolicyFetcher
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import PolicyRefused
from tests.infra.weights.test_publish import first_weights, small_step

ADAPTER = Adapter(rank=4, alpha=8, targets=("q_proj",), base="9f")
OTHER = msgspec.structs.replace(ADAPTER, alpha=16)


def put(
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
    events = [put(store, 0, first, ADAPTER), put(store, 1, second, ADAPTER, first)]
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
    first = put(store, 0, tensors, before)
    with pytest.raises(PolicyRefused, match="version 0 of main is published already"):
        put(store, 0, tensors, after)
    with pytest.raises(ValueError, match="not those of version 0"):
        put(store, 1, moved, after, tensors)
    second = put(store, 1, moved, after)  # without a base it may: a new run under the policy's name begins anew
    follower = PolicyFetcher(store, "main")
    follower.fetch(first)
    with pytest.raises(PolicyRefused, match=r"expected .* as in version 0, held now"):
        follower.fetch(second)
    assert PolicyFetcher(store, "main").fetch(second).adapter == after
