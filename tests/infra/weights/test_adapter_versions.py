"""Versions that are an adapter: their manifests say of what, and nobody takes one for a whole model."""

import json
from typing import Any

import msgspec
import pytest

from infra.policies.adapter import Adapter
from infra.policies.chain import read_manifest
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import DIGEST_FORMAT, decode_manifest, encode_manifest
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
    assert manifest.source("delta", 0) is not None and manifest.format == DIGEST_FORMAT
    steady = PolicyFetcher(store, "main")
    assert [steady.fetch(event).adapter for event in events] == [ADAPTER, ADAPTER]
    late = PolicyFetcher(store, "main").fetch(events[1])
    assert (late.adapter, dict(late.tensors)) == (ADAPTER, second)


def earlier(manifest: bytes, number: int) -> dict[str, Any]:
    """A manifest as earlier releases wrote it, its objects by sha256."""
    fields: dict[str, Any] = json.loads(manifest) | {"format": number}
    for shard in (one for source in fields["sources"] for one in source["shards"]):
        shard["sha256"] = shard.pop("digest").removeprefix("blake3:")
    return fields


def test_manifests_are_written_in_one_format_and_those_of_earlier_releases_are_read_in_theirs() -> None:
    store = MemoryStore()
    whole, adapted = (
        store.get(put(store, number, first_weights(), one).manifest) for number, one in enumerate((None, ADAPTER))
    )
    for written in (whole, adapted):
        assert json.loads(written)["format"] == DIGEST_FORMAT and encode_manifest(decode_manifest(written)) == written
    assert decode_manifest(json.dumps(earlier(whole, 1)).encode()).adapter is None
    fields = earlier(adapted, 2)  # releases before adapters take 1 alone
    assert decode_manifest(json.dumps(fields).encode()).adapter == ADAPTER
    for odd in (fields | {"format": 1}, fields | {"adapter": None}, fields | {"format": 3}):
        with pytest.raises(ValueError, match=r"not valid: format [123] with"):
            decode_manifest(json.dumps(odd).encode())
    with pytest.raises(ValueError, match="got format 5, expected 1 to 4: upgrade headrace here first"):
        decode_manifest(json.dumps(fields | {"format": 5}).encode())


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
