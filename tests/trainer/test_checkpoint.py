"""Checkpoints: whole or not there, the newest that verifies, never fewer than asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from schemas.errors import StoreError
from trainer.buffer.buffer import Known, Uses
from trainer.journal.checkpoint import (
    Checkpoint,
    CheckpointPlace,
    Position,
    Take,
    load,
    load_newest,
    manifests,
    places,
    remove,
    remove_unfinished,
    save,
)
from trainer.state import StoredState, whole_hash


def state(step: int, **fields: object) -> Checkpoint:
    weights = {"weights": Tensor("F32", (2,), bytes([step % 251] * 8))}
    given = {"learner": weights, "uses": Uses(), "references": (), **fields}
    return Checkpoint(position=Position(step=step, version=step), **given)  # type: ignore[arg-type]


def saved(*numbers: int) -> MemoryStore:
    store = MemoryStore()
    for number in numbers:
        save(store, "r", state(number))
    return store


def keys(store: MemoryStore, step: int) -> list[str]:
    return [key for key in store.keys("checkpoints/r/") if f"/{step + 1:012d}-0/" in key]


@given(
    st.dictionaries(
        st.binary(min_size=16, max_size=16),
        st.builds(Known, st.integers(1, 2**32 - 1), st.integers(0, 2**62)),
        max_size=20,
    ),
    st.lists(st.integers(0, 2**62), max_size=20),
    st.integers(-1, 10**9),
)
def test_what_was_saved_is_loaded(known: dict[bytes, Known], references: list[int], step: int) -> None:
    store = MemoryStore()
    uses = Uses()
    for key, value in known.items():
        uses.put(key, value)
    one = state(step, uses=uses, references=tuple(references))
    save(store, "r", one)
    found = load_newest(store, "r")
    assert found is not None
    assert (found.position, dict(found.uses), found.references) == (one.position, known, tuple(references))
    assert {name: bytes(tensor.data) for name, tensor in found.learner.items()} == {
        name: bytes(tensor.data) for name, tensor in one.learner.items()
    }


def test_there_may_be_none() -> None:
    assert load_newest(MemoryStore(), "r") is None


def test_the_checkpoint_before_the_first_step_is_one_too() -> None:
    store = saved(-1)
    assert (
        places(store, "r") == [CheckpointPlace(-1, 0)] and load(store, "r", CheckpointPlace(-1, 0)).position.step == -1
    )


def test_another_runs_checkpoints_are_not_ours() -> None:
    store = saved(3)
    assert load_newest(store, "other") is None and places(store, "other") == []


OBJECTS = ("index.msgpack", "state-00000-00000.bin", "state.safetensors")


def damaged(data: bytes, how: str) -> bytes:
    """The bytes of an object after an accident."""
    return {"cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[how]


@pytest.mark.parametrize("take", [dict, StoredState.verified])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in OBJECTS for damage in ("cut", "flipped", "empty", "gone")),
        *(("manifest.json", damage) for damage in ("cut", "empty", "gone")),
    ],
)
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(damage: str, name: str, take: Take) -> None:
    store = saved(3, 6)
    (key,) = [key for key in keys(store, 6) if key.endswith(name)]
    data = store.get(key)
    store.delete(key)
    if damage != "gone":
        store.put(key, damaged(data, damage))
    found = load_newest(store, "r", take=take)
    assert found is not None and found.position.step == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_missing_or_damaged_shard_is_named_with_the_rank_that_wrote_it(damage: str) -> None:
    store = saved(3)
    (key,) = [key for key in keys(store, 3) if key.endswith(".bin")]
    data = store.get(key)
    store.delete(key)
    if damage != "gone":
        store.put(key, damaged(data, damage))
    with pytest.raises(ValueError, match=rf"{key} \(rank 0\).*weights"):
        load(store, "r", CheckpointPlace(3, 0))


def test_a_state_without_its_manifest_does_not_exist() -> None:
    store = saved(3, 6)
    store.delete(next(key for key in keys(store, 6) if key.endswith("manifest.json")))
    assert places(store, "r") == [CheckpointPlace(3, 0)]


def test_what_is_removed_leaves_nothing_behind() -> None:
    store = saved(*range(8))
    remove(store, "r", [CheckpointPlace(step, 0) for step in range(5)])
    assert [place.step for place in places(store, "r")] == [5, 6, 7]
    assert not [key for step in range(5) for key in keys(store, step)]


def test_what_a_trainer_that_died_while_storing_left_is_removed_and_nothing_else() -> None:
    store = saved(3, 6)
    for place in ("000000000005-0", "000000000009-1", "000000000005-2", "000000000009-2", "000000000009-3"):
        store.put(f"checkpoints/r/{place}/state-00000-00000.bin", b"x")
    kept = {
        key
        for key in store.keys("")
        if not key.startswith(("checkpoints/r/000000000005-", "checkpoints/r/000000000009-1"))
    }
    assert remove_unfinished(store, "r", CheckpointPlace(6, 2)) == 3
    assert set(store.keys("")) == kept
    assert [place.step for place in places(store, "r")] == [3, 6]


def test_two_trainers_that_reach_the_same_step_write_to_different_places() -> None:
    store = saved(3)
    uses = Uses()
    uses.add(b"k" * 16, 5)
    save(store, "r", state(3, uses=uses), token=9)
    assert places(store, "r") == [CheckpointPlace(3, 0), CheckpointPlace(3, 9)]
    newest = load_newest(store, "r")
    older = load_newest(store, "r", before=CheckpointPlace(3, 9))
    assert newest is not None and newest.uses and older is not None and not older.uses


def test_a_store_that_fails_is_loud_and_no_reason_to_go_back() -> None:
    class Failing(MemoryStore):
        def get(self, key: str) -> bytes:
            raise StoreError("timed out")

    store = Failing()
    save(store, "r", state(3))
    with pytest.raises(StoreError, match="timed out"):
        load_newest(store, "r")


def test_the_manifest_says_what_of_the_buffer_is_needed_and_what_the_state_was() -> None:
    store = MemoryStore()
    one = state(3, references=(70, 9))
    save(store, "r", one, made_with={"torch": "2"}, time_ms=5)
    (first,) = manifests(store, "r")
    assert (first.oldest_offset, first.time_ms, first.made_with) == (9, 5, {"torch": "2"})
    assert first.learner_sha256 == whole_hash(one.learner)


def test_states_have_equal_hashes_exactly_where_names_dtypes_shapes_and_bytes_are_equal() -> None:
    zeros = bytes(8)
    different = [
        {"a": Tensor("F32", (2,), zeros)}, {"b": Tensor("F32", (2,), zeros)}, {"a": Tensor("I32", (2,), zeros)},
        {"a": Tensor("F32", (1, 2), zeros)}, {"a": Tensor("F32", (2,), b"\1" + zeros[1:])}, {},
        {"a": Tensor("F32", (1,), zeros[:4]), "b": Tensor("F32", (1,), zeros[:4])},
    ]  # fmt: skip
    assert len({whole_hash(state) for state in different}) == len(different)
    pair = {"a": Tensor("F32", (1,), zeros[:4]), "b": Tensor("U8", (1,), b"x")}
    assert whole_hash(pair) == whole_hash(dict(reversed(pair.items())))
