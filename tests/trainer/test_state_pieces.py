"""A state in pieces: one hash and the same bytes, however it is cut and whoever holds what."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from trainer.state import (
    CHUNK_BYTES,
    Extent,
    Kind,
    Piece,
    StoredState,
    Written,
    check_same,
    chunk_digests,
    encode_index,
    index_hash,
    joined_index,
    layout_of,
    open_state,
    owners,
    tails,
    whole_hash,
    write_pieces,
    write_whole,
)

SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17)


def tensors(seed: int, sizes: list[int]) -> dict[str, Tensor]:
    random = np.random.default_rng(seed)
    return {f"t{at}": Tensor("U8", (size,), random.bytes(size)) for at, size in enumerate(sizes)}


@st.composite
def cut(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[list[Piece]]]:
    """A state, and its pieces at one to four ranks: each tensor cut anywhere, each piece at any rank."""
    state = tensors(draw(st.integers(0, 99)), draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    held: list[list[Piece]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, one in state.items():
        near = st.sampled_from([0, 1, CHUNK_BYTES // 2, CHUNK_BYTES, CHUNK_BYTES + 3, 2 * CHUNK_BYTES])
        inner = draw(st.lists(near | st.integers(0, max(1, one.num_bytes)), max_size=5))
        bounds = sorted({0, one.num_bytes, *(at for at in inner if at < one.num_bytes)})
        for start, stop in pairwise(bounds):
            held[draw(st.integers(0, len(held) - 1))].append(Piece(name, start, one.data[start:stop]))
    return state, held


def written(state: dict[str, Tensor], held: list[list[Piece]], store: MemoryStore, object_bytes: int) -> list[Written]:
    """What the ranks do, one after the other."""
    extents = [[Extent(one.name, one.start, one.stop) for one in pieces] for pieces in held]
    sent = [owners(tails(pieces), extents) for pieces in held]
    found = []
    for rank, pieces in enumerate(held):
        digests = chunk_digests(pieces, layout_of(state), [one for by in sent for one in by[rank]])
        found.append(write_pieces(store, "f", rank, pieces, digests, object_bytes=object_bytes))
    return found


def opened(store: MemoryStore, index: object) -> StoredState:
    data = encode_index(index)  # type: ignore[arg-type]
    store.put("f/index.msgpack", data)
    return open_state(store, "f", "f/index.msgpack", hashlib.sha256(data).hexdigest())


@settings(max_examples=60, deadline=None)
@given(cut(), st.sampled_from([100_000, CHUNK_BYTES, 10**9]), st.data())
def test_a_state_has_one_hash_and_the_same_bytes_however_ranks_share_it(
    given_state: tuple[dict[str, Tensor], list[list[Piece]]], object_bytes: int, data: st.DataObject
) -> None:
    state, held = given_state
    store = MemoryStore()
    found = opened(store, joined_index(layout_of(state), written(state, held, store, object_bytes)))
    assert index_hash(found.index) == whole_hash(state)
    assert {name: bytes(one.data) for name, one in found.items()} == {name: one.data for name, one in state.items()}
    for name, one in state.items():
        start = data.draw(st.integers(0, one.num_bytes))
        stop = data.draw(st.integers(start, one.num_bytes))
        assert bytes(found.read(name, start, stop)) == one.data[start:stop]
    for part in range(3):
        found.verify(part, 3)


def test_a_range_is_read_without_the_rest() -> None:
    class Counting(MemoryStore):
        num_bytes = 0

        def read(self, key: str, start: int, length: int) -> bytes:
            self.num_bytes += length
            return super().read(key, start, length)

    store = Counting()
    state = tensors(1, [20 * CHUNK_BYTES])
    found = opened(store, write_whole(store, "f", state))
    found.read("t0", 5 * CHUNK_BYTES + 7, 5 * CHUNK_BYTES + 8)
    assert store.num_bytes == CHUNK_BYTES


def test_what_no_rank_holds_is_named_when_the_index_is_made() -> None:
    state = tensors(1, [3 * CHUNK_BYTES])
    held = [[Piece("t0", 0, state["t0"].data[: 2 * CHUNK_BYTES])]]
    store = MemoryStore()
    with pytest.raises(ValueError, match="t0: got 524288 bytes, expected 786432"):
        joined_index(layout_of(state), written(state, held, store, 10**9))


def test_any_damaged_byte_is_noticed_by_one_of_the_readers() -> None:
    store = MemoryStore()
    state = tensors(2, [2 * CHUNK_BYTES + 5, 1])
    found = opened(store, write_whole(store, "f", state))
    whole = store.get("f/state-00000-00000.bin")
    for at in (0, CHUNK_BYTES - 1, CHUNK_BYTES, len(whole) - 1):
        store.put("f/state-00000-00000.bin", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        noticed = 0
        for part in range(2):
            try:
                found.verify(part, 2)
            except ValueError as error:
                noticed += "f/state-00000-00000.bin (rank 0)" in str(error)
        assert noticed == 1


def test_a_state_of_another_model_is_refused_by_the_name_that_differs() -> None:
    one = {"a": Kind("F32", (2, 3)), "b": Kind("F32", ())}
    check_same(one, dict(one))
    with pytest.raises(ValueError, match="state: b: it is missing"):
        check_same({"a": one["a"]}, one)
    with pytest.raises(ValueError, match="state: b: the model has none"):
        check_same(one, {"a": one["a"]})
    with pytest.raises(ValueError, match=r"state: a: got shape \(3, 2\), expected \(2, 3\)"):
        check_same(one | {"a": Kind("F32", (3, 2))}, one)
