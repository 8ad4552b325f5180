"""One tensor as its difference from an older tensor: lossless for every bit pattern, NaN payloads and -0 included.

Encoders, one per tensor:

    ulps  16-bit: the values that changed. For each the gap to the one before (u32), and by how many ulps it moved (u16,
          zigzag): values are mapped to integers of the same order, so that neighbours differ by one ulp. The first bytes of
          all these numbers, then the second ones and so on are compressed together with zstd level 1. Made for reinforcement
          learning: few values change, nearly all by one ulp, so most of these planes are constant
    raw   the new bytes: for other dtypes, and where many values change

Decoding is bounded by the size of the tensor; a payload that does not fit is a ValueError.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import zstandard

from infra.policies.tensors import CHUNK_VALUES, ITEM_BYTES, Tensor, bits, chunks

LEVEL = 1
MAX_SHARE = 0.25  # of the values changed: more make the tensor raw, and its version an anchor
MAX_VALUES = 2**31 - 1  # of a tensor: its gaps and counts then fit a u32; larger tensors are sent raw
GAP_BYTES, ULPS_BYTES = 4, 2
Part = tuple[str, bytes | memoryview]
"""Encoder and payload."""
Moves = tuple[np.ndarray, np.ndarray]
"""Positions of the values that change, [K] i64 ascending, and by how many ulps each moves, [K] u16, wrapped."""


class Encoded(msgspec.Struct, frozen=True):
    """A tensor's new state. encoder: as in DeltaPart. payload: so encoded. changed: values that differ."""

    encoder: str
    payload: bytes | memoryview
    changed: int


def encode_tensor(old: Tensor, new: Tensor) -> Encoded:
    """`new` relative to `old`, which must have its dtype and shape."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise ValueError(f"delta: got {new.dtype}{new.shape}, expected {old.dtype}{old.shape}")
    before, after = bits(old), bits(new)
    if before.itemsize == 2 and before.size <= MAX_VALUES and (moves := _moves_between(before, after)) is not None:
        payload = _pack(*moves)
        if len(payload) < new.num_bytes:
            return Encoded("ulps", payload, moves[0].size)
    return Encoded("raw", new.data, int(np.count_nonzero(before != after)))


def decode_chain(parts: Sequence[Part], old: Tensor) -> Tensor:
    """The tensor that a chain of deltas leads to, oldest first. ValueError for a payload that does not fit."""
    base, moves = read_chain(parts, old)
    if not moves:
        return base
    values, start = np.empty(base.num_bytes // 2, np.uint16), 0
    for chunk in moved(base, moves):
        values[start : start + chunk.size] = chunk
        start += chunk.size
    values.flags.writeable = False
    return Tensor(old.dtype, old.shape, values.view(np.uint8).data if values.size else b"")


def read_chain(parts: Sequence[Part], old: Tensor) -> tuple[Tensor, list[Moves]]:
    """The tensor that a chain of deltas begins with, and the moves that follow. ValueError for a payload that does not fit."""
    base, moves = old, list[Moves]()
    for encoder, payload in parts:
        match encoder:
            case "raw":
                base, moves = Tensor(old.dtype, old.shape, payload), []
            case "ulps":
                moves.append(_unpack(payload, old.dtype, old.num_bytes // ITEM_BYTES[old.dtype]))
            case _:
                raise ValueError(f"delta: got encoder {encoder!r} for {old.dtype}, expected ulps or raw")
    return base, moves


def moved(base: Tensor, moves: Sequence[Moves]) -> Iterator[np.ndarray]:
    """Patterns of `base` after all moves, a chunk at a time. A chunk is valid until the next one is asked for."""
    room = np.empty(CHUNK_VALUES, np.uint16)
    for index, chunk in enumerate(chunks(base)):
        if moves:
            source, chunk = chunk, room[: chunk.size]
            np.copyto(chunk, source)
        start = index * CHUNK_VALUES
        for positions, ulps in moves:
            first, last = np.searchsorted(positions, (start, start + CHUNK_VALUES))
            at = positions[first:last] - start
            chunk[at] = in_order(in_order(chunk[at]) + ulps[first:last])
        yield chunk


def in_order(patterns: np.ndarray) -> np.ndarray:
    """Sign-magnitude patterns as two's complement, in the order of the values they stand for, and back again (u16 to u16)."""
    signed = patterns.view(np.int16)
    return (signed ^ (signed >> 15 & np.int16(0x7FFF))).view(np.uint16)


def _moves_between(before: np.ndarray, after: np.ndarray) -> Moves | None:
    """The values that differ; None where they are too many."""
    room = np.empty(min(before.size, CHUNK_VALUES), bool)
    places, ulps, count = [np.empty(0, np.int64)], [np.empty(0, np.uint16)], 0
    for start in range(0, before.size, CHUNK_VALUES):
        old, new = before[start : start + CHUNK_VALUES], after[start : start + CHUNK_VALUES]
        at = np.flatnonzero(np.not_equal(old, new, out=room[: old.size]))
        places.append(at + start)
        ulps.append(in_order(new[at]) - in_order(old[at]))
        count += at.size
        if count > MAX_SHARE * before.size:
            return None
    return np.concatenate(places), np.concatenate(ulps)


def _pack(at: np.ndarray, ulps: np.ndarray) -> bytes:
    signed = ulps.view(np.int16)
    zigzag = (signed << 1 ^ signed >> 15).astype("<i2")
    gaps = np.diff(at, prepend=-1).astype("<u4")
    planes = [numbers.view(np.uint8).reshape(at.size, numbers.itemsize).T for numbers in (gaps, zigzag)]
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(np.concatenate(planes)).data)


def _unpack(payload: bytes | memoryview, dtype: str, size: int) -> Moves:
    if ITEM_BYTES[dtype] != 2 or size > MAX_VALUES:
        raise ValueError(f"delta: got ulps for {size} values of {dtype}, expected at most {MAX_VALUES} of 16 bits")
    try:
        num_bytes = zstandard.frame_content_size(payload)
        count, odd = divmod(num_bytes, GAP_BYTES + ULPS_BYTES)
        if num_bytes < 0 or odd or count > size:
            raise ValueError(f"delta: got {num_bytes} bytes of changes, expected a multiple of 6, for {size} values")
        plain = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"delta: does not decompress: {error}") from error
    planes = np.frombuffer(plain, np.uint8).reshape(GAP_BYTES + ULPS_BYTES, count)
    gaps = np.ascontiguousarray(planes[:GAP_BYTES].T).view("<u4").ravel()
    at = np.cumsum(gaps, dtype=np.int64) - 1
    if count and (gaps.min() == 0 or at[-1] >= size):
        raise ValueError(f"delta: positions up to {at[-1]} or twice the same, expected ascending ones below {size}")
    zigzag = np.ascontiguousarray(planes[GAP_BYTES:].T).view("<u2").ravel()
    return at, zigzag >> 1 ^ -(zigzag & 1)
