"""Tensors as bytes: their file format against the safetensors library, and the delta codec, exact for every bit pattern."""

import itertools
import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.policies.delta import decode_chain, encode_tensor
from infra.policies.manifest import look_at
from infra.policies.tensors import (
    ITEM_BYTES,
    MAX_RANK,
    Blocks,
    Tensor,
    bits,
    from_numpy,
    from_torch,
    from_torch_all,
    load_tensors,
    save_tensors,
    to_numpy,
    to_torch,
)

WIDTHS = {1: "F8_E5M2", 2: "BF16", 4: "F32", 8: "F64"}


def of_bits(patterns: np.ndarray) -> Tensor:
    return Tensor(WIDTHS[patterns.itemsize], patterns.shape, patterns.tobytes())


def round_trip(old: Tensor, new: Tensor) -> str:
    encoded = encode_tensor(old, new)
    assert decode_chain([(encoded.encoder, encoded.payload)], old) == new
    assert encoded.changed == np.count_nonzero(bits(old) != bits(new))
    assert len(encoded.payload) <= new.num_bytes
    return encoded.encoder


def changed_tensor(size: int, share: float, ulps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal bf16 weights, and the same with `share` of them moved by up to `ulps`."""
    generator = np.random.default_rng(seed)
    old = (generator.normal(0, 0.02, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    moved = generator.integers(1, ulps + 1, size) * (generator.random(size) < share)
    return of_bits(old), of_bits((old + moved * generator.choice([-1, 1], size)).astype(np.uint16))


@settings(deadline=None)
@given(st.data())
def test_any_patterns_come_back_bit_by_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(ITEM_BYTES)))
    width = ITEM_BYTES[dtype]
    old = data.draw(st.binary(min_size=0, max_size=400).map(lambda b: b[: len(b) // width * width]))
    new = bytearray(old)
    for _ in range(data.draw(st.integers(0, 6))):
        if new:
            start = data.draw(st.integers(0, len(new) - 1))
            patch = data.draw(st.binary(min_size=1, max_size=40))[: len(new) - start]
            new[start : start + len(patch)] = patch
    shape = (len(old) // width,)
    round_trip(Tensor(dtype, shape, old), Tensor(dtype, shape, bytes(new)))


SPECIAL = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FC1, 0xFFC0, 0x7F7F, 0xFF7F, 0x3F80]


def test_every_special_value_may_become_every_other() -> None:
    pairs = np.array([(a, b) for a in SPECIAL for b in SPECIAL], np.uint16)
    calm = np.full(20_000, 0x3C00, np.uint16)
    for encoder, old, new in (
        ("ulps", np.append(calm, pairs[:, 0]), np.append(calm, pairs[:, 1])),
        (None, pairs[:, 0].copy(), pairs[:, 1].copy()),
    ):
        assert round_trip(of_bits(old), of_bits(new)) in (encoder, "raw")


def test_a_tensor_of_wider_values_is_sent_whole() -> None:
    old = np.random.default_rng(0).normal(0, 0.02, 50_000).astype(np.float32)
    assert round_trip(from_numpy(old), from_numpy(old + np.float32(1e-6))) == "raw"


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    for other in (from_numpy(np.zeros(3, np.float32)), from_numpy(np.zeros(4, np.int32))):
        with pytest.raises(ValueError, match="expected F32"):
            encode_tensor(from_numpy(np.zeros(4, np.float32)), other)


CASES = {
    "ulps": changed_tensor(3_000, 0.02, 400),
    "raw": tuple(of_bits(np.random.default_rng(s).integers(0, 2**16, 300).astype(np.uint16)) for s in (1, 2)),
}


@pytest.mark.parametrize("encoder", sorted(CASES))
def test_damaged_payloads_raise_value_error_or_decode_to_the_right_size(encoder: str) -> None:
    old, new = CASES[encoder]
    encoded = encode_tensor(old, new)
    assert encoded.encoder == encoder
    generator = np.random.default_rng(0)
    for attempt in range(300):
        damaged = bytearray(encoded.payload)
        if attempt % 3 == 0:
            del damaged[int(generator.integers(len(damaged))) :]
        else:
            for _ in range(attempt % 3):
                damaged[int(generator.integers(len(damaged)))] ^= 1 << int(generator.integers(8))
        try:
            decoded = decode_chain([(encoder, bytes(damaged))], old)
        except ValueError:
            continue
        assert (decoded.dtype, decoded.shape) == (new.dtype, new.shape)


@settings(deadline=None)
@given(st.sampled_from(["ulps", "raw", "pickle"]), st.binary(max_size=300))
def test_arbitrary_payloads_only_ever_raise_value_error(encoder: str, payload: bytes) -> None:
    old = of_bits(np.arange(64, dtype=np.uint16))
    try:
        decoded = decode_chain([(encoder, payload)], old)
    except ValueError:
        return
    assert decoded.num_bytes == old.num_bytes


def payload_of(*planes: bytes) -> bytes:
    return zstandard.compress(b"".join(planes))


GAPS = [bytes([low]) * 8 for low in (1, 0, 0, 0, 2, 0)]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (payload_of(bytes(99_999_996)), "got 99999996 bytes of changes"),
        (payload_of(bytes(47)), "got 47 bytes of changes"),
        (payload_of(*GAPS)[:-1], "does not decompress"),
        (payload_of(bytes(8), *GAPS[1:]), "twice the same"),
        (payload_of(bytes([9]) * 8, *GAPS[1:]), "positions up to 71"),
        (payload_of(*[b"\xff" * 8] * 4, *GAPS[4:]), "positions up to 34359738359"),
    ],
)
def test_a_payload_that_does_not_fit_the_tensor_is_refused_before_it_is_unpacked(payload: bytes, words: str) -> None:
    old = of_bits(np.zeros(64, np.uint16))
    assert decode_chain([("ulps", payload_of(*GAPS))], old) != old
    with pytest.raises(ValueError, match=words):
        decode_chain([("ulps", payload)], old)


@settings(deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), share=st.sampled_from([0.001, 0.03, 0.2, 0.9])
)
def test_a_chain_of_deltas_leads_to_its_end_at_once(seeds: list[int], share: float) -> None:
    states = [changed_tensor(3_000, 0.0, 1)[0]]
    for seed in seeds:
        generator = np.random.default_rng(seed)
        patterns = bits(states[-1]).copy()
        at = generator.choice(3_000, int(3_000 * share), replace=False)
        patterns[at] += generator.choice(np.array([1, 0xFFFF, 300], np.uint16), at.size)
        patterns[at] = generator.integers(0, 2**16, at.size) if seed % 5 == 0 else patterns[at]
        states.append(of_bits(patterns))
    steps = [encode_tensor(old, new) for old, new in itertools.pairwise(states)]
    assert decode_chain([(one.encoder, one.payload) for one in steps], states[0]) == states[-1]


def test_a_chain_of_an_unknown_encoder_is_refused() -> None:
    old, new = changed_tensor(3_000, 0.02, 1)
    one = encode_tensor(old, new)
    with pytest.raises(ValueError, match="got encoder 'zip'"):
        decode_chain([(one.encoder, one.payload), ("zip", b"")], old)


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
        (with_header({"w": GOOD | {"shape": [2**63 - 1] * 40_000}}, b"1234"), "header is not valid"),
        (with_header({"w": GOOD | {"shape": [1] * (MAX_RANK + 1)}}, b"1234"), "header is not valid"),
        (with_header({"w": GOOD | {"shape": [1e3]}}, b"1234"), "header is not valid"),
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


def test_torch_tensors_survive_a_round_trip_bit_by_bit() -> None:
    import torch

    for name, tensor in (EVERY_DTYPE | ODD).items():
        if tensor.dtype == "BOOL":  # only 0 and 1 are bools
            tensor = Tensor("BOOL", (2,), b"\0\1")
        assert from_torch(to_torch(tensor)) == tensor, name
    strided = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    assert to_numpy(from_torch(strided)).tolist() == strided.tolist()


def test_views_of_one_memory_are_copied_each_for_itself() -> None:
    import torch

    table = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    views = {"turned": table.T, "first": table[0], "bits": table.view(torch.int32), "none": table[:0]}
    found = from_torch_all(views | {"none.either": torch.zeros(0, 4)})
    assert to_numpy(found["turned"]).tolist() == table.T.tolist() and to_numpy(found["first"]).tolist() == [0, 1, 2, 3]
    assert found["bits"].dtype == "I32" and found["none"].shape == found["none.either"].shape == (0, 4)


def test_a_block_of_copies_is_used_again_only_when_the_last_of_them_is_gone() -> None:
    import torch

    blocks, value = Blocks(), torch.zeros(1024)

    def copied(number: int) -> dict[str, Tensor]:
        return from_torch_all({"a": value.fill_(number), "b": -value}, blocks)

    def place(tensors: dict[str, Tensor]) -> int:
        return int(np.frombuffer(tensors["a"].data, np.uint8).ctypes.data)

    first, second = copied(1), copied(2)
    used, kept = place(first), first["a"].data
    del first
    third = copied(3)
    assert len({used, place(second), place(third)}) == 3 and not (np.frombuffer(kept, np.float32) - 1).any()
    del kept
    assert place(copied(4)) == used and to_numpy(second["a"]).tolist() == [2.0] * 1024


def test_bfloat16_values_widen_exactly() -> None:
    import torch

    values = torch.tensor([1.0, -0.0, 3.140625, 1e-40, float("inf")], dtype=torch.bfloat16)
    assert to_numpy(from_torch(values)).tolist() == values.float().tolist()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_nan_and_infinity_is_found(dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    largest = torch.finfo(kind).max
    assert look_at(from_torch(torch.tensor([0.0, -largest, largest], dtype=torch.float64).to(kind))).finite
    for bad in ("nan", "inf", "-inf"):
        if dtype == "float8_e4m3fn" and bad != "nan":  # that dtype has no infinity
            continue
        assert not look_at(from_torch(torch.tensor([0.0, float(bad), 1.0]).to(kind))).finite, bad
