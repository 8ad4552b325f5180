"""A version whose tensors lie in several processes is the version of one process that has them all."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.policies.chain import read_manifest
from infra.policies.fetch import PolicyFetcher
from infra.policies.publish import NewVersion, publish, publish_shares
from infra.policies.share import HashedTensors, Share
from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import PolicyRefused
from tests.infra.weights.test_publish import bf16, small_step


def publish_all(store: Store, version: int, shares: list[Share]) -> PolicyEvent:
    """Publish the shares of several processes, in this one."""
    return publish_shares(
        store,
        new_version(version),
        lambda: [share.encode() for share in shares],
        lambda wanted: [share.put(wanted) for share in shares],
        None,
    )


def new_version(version: int) -> NewVersion:
    return NewVersion(policy="main", token=17, version=version, parent=version - 1, step=version)


def dealt(tensors: Mapping[str, Tensor], owners: Mapping[str, int], ranks: int) -> list[HashedTensors]:
    return [HashedTensors({name: tensors[name] for name in tensors if owners[name] == rank}) for rank in range(ranks)]


def put_shares(
    store: Store,
    version: int,
    tensors: list[HashedTensors],
    previous: list[HashedTensors] | None,
    shard_bytes: int = 70_000,
) -> PolicyEvent:
    befores = previous if previous is not None else [None] * len(tensors)
    shares = [Share(store, one, before, shard_bytes) for one, before in zip(tensors, befores, strict=True)]
    return publish_all(store, version, shares)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.lists(st.sampled_from(["step", "same", "all"]), min_size=1, max_size=4),
)
def test_the_version_of_several_shares_is_the_version_of_one(ranks, moves) -> None:
    names = [f"layers.{index}.w" for index in range(6)]
    owners = dict(zip(names, ranks, strict=True))
    weights = {name: bf16(seed, 2000 * (seed + 1)) for seed, name in enumerate(names)}
    several, one = MemoryStore(), MemoryStore()
    follower, before = PolicyFetcher(several, "main"), None
    for version, move in enumerate(["first", *moves]):
        if move == "step":
            weights = small_step(weights, version, tuple(names[version % 3 :]))
        elif move == "all":
            weights = {name: bf16(50 + version, 2000 * (seed + 1)) for seed, name in enumerate(names)}
        event = put_shares(
            several, version, dealt(weights, owners, 3), None if before is None else dealt(before, owners, 3)
        )
        alone = publish(one, new_version(version), weights, previous=before, probe=None, shard_bytes=70_000)
        assert {**event.stats, "bytes": 0} == {**alone.stats, "bytes": 0}
        got, expected = (read_manifest(*which)[0] for which in ((several, event.manifest), (one, alone.manifest)))
        assert got.tensors == expected.tensors and got.anchor == expected.anchor
        assert [(way.kind, way.base, way.num_changed) for way in got.sources] == [
            (way.kind, way.base, way.num_changed) for way in expected.sources
        ]
        assert (got.slice and got.slice.names) == (expected.slice and expected.slice.names)
        assert follower.fetch(event).tensors == PolicyFetcher(several, "main").fetch(event).tensors == weights
        before = weights


def test_a_value_that_is_not_finite_in_any_share_publishes_nothing() -> None:
    bad = Tensor("BF16", (2,), b"\x80\x7f\x00\x00")
    for previous in (None, {"a": bf16(1), "b": Tensor("BF16", (2,), bytes(4))}):
        store = MemoryStore()
        owners = {"a": 0, "b": 1}
        if previous is not None:
            put_shares(store, 0, dealt(previous, owners, 2), None)
        before = list(store.keys(""))
        with pytest.raises(PolicyRefused, match="b holds values that are not finite"):
            put_shares(
                store,
                0 if previous is None else 1,
                dealt({"a": bf16(1), "b": bad}, owners, 2),
                None if previous is None else dealt(previous, owners, 2),
            )
        assert list(store.keys("")) == before


def test_where_a_share_has_no_parent_all_of_the_version_is_whole() -> None:
    store, weights, owners = MemoryStore(), {"a": bf16(1), "b": bf16(2)}, {"a": 0, "b": 1}
    put_shares(store, 0, dealt(weights, owners, 2), None)
    shares = dealt(small_step(weights, 1, ("a",)), owners, 2)
    first = Share(store, shares[0], dealt(weights, owners, 2)[0])
    event = publish_all(store, 1, [first, Share(store, shares[1], None)])
    assert event.stats["anchor"] == 1.0
    assert PolicyFetcher(store, "main").fetch(event).tensors == {
        name: one for part in shares for name, one in part.items()
    }


def test_tensors_that_no_longer_change_are_hashed_once() -> None:
    tensors = HashedTensors({"a": bf16(1)})
    assert tensors.entries is tensors.entries
