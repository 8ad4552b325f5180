"""Tensors as bytes, and their file format against the safetensors library."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from infra.policies.tensors import (
    CHUNK_VALUES,
    ITEM_BYTES,
    Rooms,
    Tensor,
    from_numpy,
    from_torch,
    from_torch_all,
    is_finite,
    load_tensors,
    save_tensors,
    to_numpy,
    to_torch,
)


def any_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    size = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return Tensor(dtype, shape, np.random.default_rng(seed).bytes(size))


EVERY_DTYPE = {f"t.{dtype}": any_tensor(dtype, (3, 5), seed) for seed, dtype in enumerate(ITEM_BYTES)}
ODD = {"scalar": any_tensor("F32", ()), "empty": any_tensor("BF16", (0, 4)), "a.b": any_tensor("U8", (7,))}


@pytest.mark.parametrize("tensors", [EVERY_DTYPE, ODD, {}], ids=["dtypes", "odd", "none"])
def test_a_file_gives_back_the_same_tensors(tensors: dict[str, Tensor]) -> None:
    assert load_tensors(save_tensors(tensors, {"step": "3"})) == tensors


def test_the_safetensors_library_reads_what_is_written_here() -> None:
    read = dict(safetensors.deserialize(bytes(save_tensors(EVERY_DTYPE | ODD))))
    assert {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in read.items()} == {
        name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in (EVERY_DTYPE | ODD).items()
    }


def test_what_the_safetensors_library_writes_is_read_here() -> None:
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([1, -2], np.int64)}
    read = load_tensors(safetensors.numpy.save(arrays, metadata={"format": "pt"}))
    assert {name: to_numpy(tensor).tolist() for name, tensor in read.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def with_header(header: object, body: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + body


GOOD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "at least 8"),
        (b"\xff" * 8, "does not fit"),
        (with_header([1]), "header is not valid"),
        (with_header({"w": 3}), "header is not valid"),
        (b"\x02" + b"\0" * 7 + b"\xff\xff", "header is not valid"),
        (with_header({"w": GOOD}), "w at 0:4"),
        (with_header({"w": GOOD}, b"12345"), "1 bytes after"),
        (with_header({"w": GOOD | {"shape": [2]}}, b"1234"), "w: data: got 4 bytes"),
        (with_header({"w": GOOD | {"dtype": "F33"}}, b"1234"), "w: dtype: got 'F33'"),
        (with_header({"w": GOOD | {"shape": [-1, -1]}}, b"1234"), "header is not valid"),
        (with_header({"w": GOOD | {"data_offsets": [4, 0]}}, b"1234"), "w at 4:0"),
        (with_header({"w": GOOD, "v": GOOD}, b"1234"), "expected a start at 4"),
        (with_header({"w": GOOD | {"data_offsets": [1, 5]}}, b"12345"), "expected a start at 0"),
    ],
)
def test_a_broken_file_is_a_value_error_that_names_the_place(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_tensors(data)


OFFSETS = st.integers(-1, 12) | st.integers()
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F33"]),
        "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=3),
        "data_offsets": st.lists(OFFSETS, min_size=1, max_size=3),
    }
)


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=3), ENTRIES | st.just(GOOD), max_size=3))
def test_arbitrary_bytes_and_headers_give_whole_tensors_or_a_value_error(data: bytes, header: object) -> None:
    for candidate in (data, len(data).to_bytes(8, "little") + data, with_header(header, data[:4]), with_header(header)):
        try:
            read = load_tensors(candidate)
        except ValueError:
            continue
        assert load_tensors(save_tensors(read)) == read


def test_a_tensor_whose_data_does_not_fit_its_shape_cannot_exist() -> None:
    with pytest.raises(ValueError, match=r"got 7 bytes, expected 8 for BF16\[2, 2\]"):
        Tensor("BF16", (2, 2), b"1234567")


def test_an_array_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        from_numpy(np.zeros(1, np.complex64))
    with pytest.raises(ValueError, match="use bits"):
        to_numpy(any_tensor("F8_E4M3", (1,)))


def test_torch_tensors_survive_a_round_trip_bit_by_bit() -> None:
    import torch

    for name, tensor in (EVERY_DTYPE | ODD).items():
        if tensor.dtype == "BOOL":  # only 0 and 1 are bools
            tensor = Tensor("BOOL", (2,), b"\0\1")
        assert from_torch(to_torch(tensor)) == tensor, name
    strided = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    assert to_numpy(from_torch(strided)).tolist() == strided.tolist()


def test_tied_tensors_are_copied_once_and_others_of_the_same_memory_for_themselves() -> None:
    import torch

    table = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    views = {
        "in": table,
        "out": table.view(3, 4),
        "turned": table.T,
        "first": table[0],
        "bits": table.view(torch.int32),
    }
    found = from_torch_all(views | {"none": table[:0], "none.either": torch.zeros(0, 4)})
    assert found["in"] is found["out"] and len({id(one) for one in found.values()}) >= 5
    assert to_numpy(found["turned"]).tolist() == table.T.tolist() and to_numpy(found["first"]).tolist() == [0, 1, 2, 3]
    assert found["bits"].dtype == "I32" and found["none"].shape == found["none.either"].shape == (0, 4)


def test_bfloat16_values_widen_exactly() -> None:
    import torch

    values = torch.tensor([1.0, -0.0, 3.140625, 1e-40, float("inf")], dtype=torch.bfloat16)
    assert to_numpy(from_torch(values)).tolist() == values.float().tolist()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_nan_and_infinity_is_found(dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    largest = torch.finfo(kind).max
    assert is_finite(from_torch(torch.tensor([0.0, -largest, largest], dtype=torch.float64).to(kind)))
    for bad in ("nan", "inf", "-inf"):
        if dtype == "float8_e4m3fn" and bad != "nan":  # that dtype has no infinity
            continue
        assert not is_finite(from_torch(torch.tensor([0.0, float(bad), 1.0]).to(kind))), bad


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_copies_know_which_of_them_is_not_finite(dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    fine = torch.ones(CHUNK_VALUES + 3).to(kind)
    last = fine.clone()
    last[-1] = float("nan")
    turned = last[-6:].view(2, 3).T
    assert from_torch_all({"fine": fine, "whole": fine.view(torch.uint8)}).not_finite == ""
    for bad in (last, turned):
        assert from_torch_all({"fine": fine, "bad": bad, "worse": last}).not_finite == "bad"
        assert from_torch_all({"fine": fine, "bad": bad}, Rooms()).not_finite == "bad"
