"""Checkpoints: whole or not there, the newest that verifies, never fewer than asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.store_memory import MemoryStore
from infra.weights.tensors import Tensor
from trainer.checkpoint import Checkpoint, Position, load, load_newest, prune, save, steps


def state(step: int, **fields: object) -> Checkpoint:
    weights = {"weights": Tensor("F32", (2,), bytes([step % 251] * 8))}
    given = {"learner": weights, "uses": {}, "references": (), **fields}
    return Checkpoint(position=Position(step=step, version=step), **given)  # type: ignore[arg-type]


def saved(*numbers: int) -> MemoryStore:
    store = MemoryStore()
    for number in numbers:
        save(store, "r", state(number))
    return store


def keys(store: MemoryStore, step: int) -> list[str]:
    return [key for key in store.keys("checkpoints/r/") if f"/{step + 1:012d}/" in key]


@given(
    st.dictionaries(st.binary(min_size=16, max_size=16), st.integers(1, 2**32 - 1), max_size=20),
    st.lists(st.integers(0, 2**62), max_size=20),
    st.integers(-1, 10**9),
)
def test_what_was_saved_is_loaded(uses: dict[bytes, int], references: list[int], step: int) -> None:
    store = MemoryStore()
    one = state(step, uses=uses, references=tuple(references))
    save(store, "r", one)
    found = load_newest(store, "r")
    assert found is not None
    assert (found.position, found.uses, found.references) == (one.position, uses, tuple(references))
    assert {name: bytes(tensor.data) for name, tensor in found.learner.items()} == {
        name: bytes(tensor.data) for name, tensor in one.learner.items()
    }


def test_there_may_be_none() -> None:
    assert load_newest(MemoryStore(), "r") is None


def test_the_checkpoint_before_the_first_step_is_one_too() -> None:
    store = saved(-1)
    assert steps(store, "r") == [-1] and load(store, "r", -1).position.step == -1


def test_another_runs_checkpoints_are_not_ours() -> None:
    store = saved(3)
    assert load_newest(store, "other") is None and steps(store, "other") == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "manifest cut", "manifest empty"])
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(damage: str) -> None:
    store = saved(3, 6)
    manifest, body = sorted(keys(store, 6))
    key = manifest if damage.startswith("manifest") else body
    data = store.get(key)
    if damage == "gone":
        store.delete(key)
    elif damage == "flipped":
        store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    else:
        store.put(key, b"" if damage.endswith("empty") else data[:-1])
    found = load_newest(store, "r")
    assert found is not None and found.position.step == 3


def test_a_state_without_its_manifest_does_not_exist() -> None:
    store = saved(3, 6)
    store.delete(min(keys(store, 6)))
    assert steps(store, "r") == [3]


def test_pruning_keeps_the_newest_and_leaves_nothing_of_the_others() -> None:
    store = saved(*range(8))
    assert prune(store, "r", 3) == [5, 6, 7] == steps(store, "r")
    assert not [key for step in range(5) for key in keys(store, step)]
    assert prune(store, "r", 3) == [5, 6, 7]


def test_fewer_than_three_are_never_kept() -> None:
    with pytest.raises(ValueError, match="keep: got 2"):
        prune(MemoryStore(), "r", 2)
