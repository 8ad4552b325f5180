"""Memory that is used again: never while anything of it is in use."""

import gc

import numpy as np
import torch

from infra.policies.tensors import from_torch_all
from infra.store.rooms import LEAST_BYTES, Rooms


def place_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_room_comes_back_once_nothing_of_it_is_in_use() -> None:
    rooms = Rooms()
    first = rooms.take(LEAST_BYTES)
    place = place_of(first)
    first.flags.writeable = False
    piece = first.data[5:10]
    patterns = np.frombuffer(first.data, np.uint16)[3:]
    del first
    for _ in range(2):
        assert place_of(rooms.take(LEAST_BYTES)) != place
    del piece
    assert place_of(rooms.take(LEAST_BYTES)) != place
    del patterns
    gc.collect()
    taken = [rooms.take(LEAST_BYTES) for _ in range(3)]
    assert place in map(place_of, taken) and all(one.flags.writeable for one in taken)
    assert len({*map(place_of, taken)}) == 3


def test_a_slice_alone_keeps_its_room_from_others() -> None:
    rooms = Rooms()
    for view in (lambda room: room[5:10], lambda room: room.view(np.uint16)[3:], lambda room: room.reshape(2, -1)[1]):
        piece = view(rooms.take(LEAST_BYTES))
        piece[:] = 7
        rooms.take(LEAST_BYTES).fill(0)
        assert (piece == 7).all()


def test_a_room_of_another_size_is_not_given_out_and_small_ones_are_not_kept() -> None:
    rooms = Rooms()
    place = place_of(rooms.take(2 * LEAST_BYTES))
    assert rooms.take(LEAST_BYTES).size == LEAST_BYTES and rooms.take(0).size == 0
    assert rooms.take(7).base is None, "no room behind it"
    assert place_of(rooms.take(2 * LEAST_BYTES)) == place


def test_what_is_not_in_use_can_be_given_back() -> None:
    rooms = Rooms()
    kept = rooms.take(LEAST_BYTES)
    rooms.take(LEAST_BYTES)
    rooms.clear()
    place = place_of(kept)
    del kept
    assert place_of(rooms.take(LEAST_BYTES)) == place, "it came back after the others had gone"


def test_copies_of_a_model_take_turns_in_two_rooms_and_stay_what_they_were() -> None:
    rooms = Rooms()
    value = torch.zeros(2**19, dtype=torch.bfloat16)
    small = torch.zeros(3)
    previous = from_torch_all({"w": value, "s": small}, rooms)
    places = set()
    for version in range(1, 6):
        value.fill_(version)
        small.fill_(version)
        newest = from_torch_all({"w": value, "s": small, "tied": value}, rooms)
        assert newest["tied"] is newest["w"]
        for found, expected in ((previous, version - 1), (newest, version)):
            assert (torch.frombuffer(bytearray(found["w"].data), dtype=torch.bfloat16) == expected).all()
            assert (torch.frombuffer(bytearray(found["s"].data), dtype=torch.float32) == expected).all()
        places.add(place_of(np.frombuffer(newest["w"].data, np.uint8)))
        previous = newest
    assert len(places) == 2
