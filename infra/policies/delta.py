"""One tensor as its difference from an older one: lossless for every bit pattern, NaN payloads and -0 included.

Encoders, of which the smallest is kept per tensor:

    k1      16-bit: values mapped to ordered integers, so that neighbours differ by one ulp. Streams: gaps between
            changed positions (u8, 255 escapes to u32), signs (bits), "more than one ulp" (bits), and for those
            |ulps| - 2 (u8, 255 escapes to u16). Made for reinforcement learning: few values change, nearly all by one
    bitmap  the same, with one bit per value instead of gaps: for many changes
    xor     any dtype: byte planes of new xor old
    planes  any dtype: byte planes of the new values alone
    raw     the new bytes

Every stream is zstd level 1 where that is smaller. Decoding is bounded by the size of the tensor; what does not fit is
a ValueError.
"""

import math
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import zstandard

from infra.policies.tensors import CHUNK_VALUES, ITEM_BYTES, Tensor, bits, chunks

LEVEL = 1
ESCAPE = 255
MIN_COMPRESSED_BYTES = 32
MAX_VALUES = 2**31 - 1  # of a tensor: every stream then fits its u32 size; larger ones are sent raw
_STREAM = struct.Struct("<II")  # bytes unpacked, bytes stored (equal: stored as they are)


class Encoded(msgspec.Struct, frozen=True):
    """A tensor's new state relative to its old one. changed: how many values differ."""

    encoder: str
    payload: bytes
    changed: int


def encode_tensor(old: Tensor, new: Tensor) -> Encoded:
    """`new` relative to `old`, which must have its dtype and shape."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise ValueError(f"delta: got {new.dtype}{new.shape}, expected {old.dtype}{old.shape}")
    before, after = bits(old), bits(new)
    positions = changed_positions(before, after)
    size = before.size
    if size > MAX_VALUES:
        return Encoded("raw", bytes(new.data), int(positions.size))
    candidates: list[tuple[str, bytes]] = []
    if before.itemsize == 2:
        ulps = _ordered(after[positions]).astype(np.int32) - _ordered(before[positions])
        candidates = _by_ulps(positions, ulps, size)
    else:
        candidates.append(("xor", _pack(_planes(before ^ after))))
    if positions.size > size // 2:
        candidates.append(("planes", _pack(_planes(after))))
    encoder, payload = min(candidates, key=lambda candidate: len(candidate[1]))
    if len(payload) >= new.num_bytes:
        return Encoded("raw", bytes(new.data), int(positions.size))
    return Encoded(encoder, payload, int(positions.size))


def changed_positions(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Where two flat arrays of one size differ: [K] int64, ascending."""
    starts = range(0, before.size, CHUNK_VALUES)
    pairs = zip(starts, chunks(before), chunks(after), strict=True)
    found = [np.flatnonzero(old != new) + start for start, old, new in pairs]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _by_ulps(positions: np.ndarray, ulps: np.ndarray, size: int) -> list[tuple[str, bytes]]:
    """What there is to choose from for 16-bit values. ulps: [K] int32, how far each moved."""
    candidates: list[tuple[str, bytes]] = []
    if positions.size <= size // 2:
        candidates.append(("k1", _pack([*_gaps(positions), *_ulp_streams(ulps)])))
    if positions.size > size // 32:
        mask = np.zeros(size, bool)
        mask[positions] = True
        candidates.append(("bitmap", _pack([np.packbits(mask).data, *_ulp_streams(ulps)])))
    return candidates


def compose(payloads: Sequence[tuple[str, bytes | memoryview]], dtype: str, shape: tuple[int, ...]) -> Encoded | None:
    """One change for several of the same tensor, each from where the one before it leads; None where that takes the values.

    payloads: (encoder, payload), oldest first. What moved by ulps moved by their sum. Byte planes and raw values replace
    what was there, so they need it. The result is what `encode_tensor` gives for the ends, where that is smaller than the
    tensor. ValueError for a payload that does not fit.
    """
    size = math.prod(shape)
    if ITEM_BYTES[dtype] != 2 or any(encoder not in ("k1", "bitmap") for encoder, _ in payloads):
        return None
    positions, ulps = _summed([_moves(encoder, payload, size) for encoder, payload in payloads], size)
    candidates = _by_ulps(positions, ulps, size)
    encoder, payload = min(candidates, key=lambda candidate: len(candidate[1]))
    smaller = positions.size <= size // 2 and len(payload) < 2 * size
    return Encoded(encoder, payload, int(positions.size)) if smaller else None


def _summed(moves: Sequence[tuple[np.ndarray, np.ndarray]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and ulps of several moves made one after the other, without those that come back to where they were."""
    starts = np.arange(0, size, CHUNK_VALUES)
    cuts = [np.append(np.searchsorted(positions, starts), positions.size) for positions, _ in moves]
    sums = np.empty(CHUNK_VALUES, np.int32)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for chunk, start in enumerate(starts.tolist()):
        sums.fill(0)
        for (positions, ulps), cut in zip(moves, cuts, strict=True):
            part = slice(cut[chunk], cut[chunk + 1])
            sums[positions[part] - start] += ulps[part]
        moved = np.flatnonzero(sums != 0)
        found.append((moved + start, sums[moved]))
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])


def decode_tensor(encoder: str, payload: bytes | memoryview, old: Tensor) -> Tensor:
    """The tensor that `encode_tensor` was given. ValueError for a payload that does not fit."""
    size, width = math.prod(old.shape), ITEM_BYTES[old.dtype]
    if encoder == "raw":
        return Tensor(old.dtype, old.shape, payload)
    if encoder in ("xor", "planes"):
        values = _from_planes(_unpack(payload, [size] * width), size, width)
        return _tensor(old, values ^ bits(old) if encoder == "xor" else values)
    if encoder not in ("k1", "bitmap") or width != 2:
        raise ValueError(f"delta: got encoder {encoder!r} for {old.dtype}, expected k1, bitmap, xor, planes or raw")
    positions, ulps = _moves(encoder, payload, size)
    before = bits(old)
    after = before.copy()
    moved = _ordered(before[positions]).astype(np.int32) + ulps
    if moved.size and (moved.min() < 0 or moved.max() > 0xFFFF):
        raise ValueError("delta: a value moves beyond the range of its dtype")
    after[positions] = _from_ordered(moved.astype(np.uint16))
    return _tensor(old, after)


def _moves(encoder: str, payload: bytes | memoryview, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where 16-bit values moved and by how many ulps: [K] int64 and [K] int32."""
    by_value = [-(-size // 8), -(-size // 8), size, 2 * size]
    if encoder == "k1":
        streams = _unpack(payload, [size, 4 * size, *by_value])
        positions = _positions(streams[0], streams[1], size)
    else:
        streams = _unpack(payload, [-(-size // 8), *by_value])
        mask = np.frombuffer(streams[0], np.uint8)
        if mask.size != -(-size // 8):
            raise ValueError(f"delta: bitmap of {mask.size} bytes for {size} values")
        positions = np.flatnonzero(np.unpackbits(mask, count=size))
    return positions, _from_ulps(streams[-4:], positions.size)


def _tensor(old: Tensor, patterns: np.ndarray) -> Tensor:
    patterns.flags.writeable = False
    return Tensor(old.dtype, old.shape, patterns.view(np.uint8).data if patterns.size else b"")


def _ordered(patterns: np.ndarray) -> np.ndarray:
    """Sign-magnitude patterns as integers in the order of the values they stand for (u16 to u16, one to one)."""
    ordered: np.ndarray = patterns ^ ((patterns >> 15) * np.uint16(0x7FFF) | np.uint16(0x8000))
    return ordered


def _from_ordered(ordered: np.ndarray) -> np.ndarray:
    patterns: np.ndarray = ordered ^ ((np.uint16(1) - (ordered >> 15)) * np.uint16(0x7FFF) | np.uint16(0x8000))
    return patterns


def _ulp_streams(delta: np.ndarray) -> list[memoryview]:
    """Streams of the differences of changed values: signs, whether over one ulp, |ulps| - 2 of those, their escapes."""
    magnitude = np.abs(delta)
    large = magnitude > 1
    rest = magnitude[large] - 2
    escaped = rest >= ESCAPE
    return [
        np.packbits(delta < 0).data,
        np.packbits(large).data,
        np.minimum(rest, ESCAPE).astype(np.uint8).data,
        (rest[escaped] - ESCAPE).astype("<u2").view(np.uint8).data,
    ]


def _from_ulps(streams: Sequence[bytes], count: int) -> np.ndarray:
    signs, large_bits, small, escapes = (np.frombuffer(stream, np.uint8) for stream in streams)
    if signs.size != -(-count // 8) or large_bits.size != signs.size or escapes.size % 2:
        raise ValueError(f"delta: {signs.size} and {large_bits.size} bytes of bits for {count} changed values")
    large = np.unpackbits(large_bits, count=count).astype(bool)
    rest = small.astype(np.int32)
    escaped = rest == ESCAPE
    if np.count_nonzero(large) != rest.size or np.count_nonzero(escaped) != escapes.size // 2:
        raise ValueError(f"delta: {rest.size} sizes and {escapes.size // 2} escapes do not fit {count} changed values")
    rest[escaped] += escapes.view("<u2")
    magnitude = np.ones(count, np.int32)
    magnitude[large] = rest + 2
    return np.where(np.unpackbits(signs, count=count).astype(bool), -magnitude, magnitude)


def _gaps(positions: np.ndarray) -> list[memoryview]:
    """Streams of increasing positions: values skipped before each (u8), and what is over ESCAPE (u32)."""
    gaps = np.diff(positions, prepend=-1) - 1
    escaped = gaps >= ESCAPE
    return [
        np.minimum(gaps, ESCAPE).astype(np.uint8).data,
        (gaps[escaped] - ESCAPE).astype("<u4").view(np.uint8).data,
    ]


def _positions(gap_bytes: bytes, escape_bytes: bytes, size: int) -> np.ndarray:
    gaps = np.frombuffer(gap_bytes, np.uint8).astype(np.int64)
    escaped = gaps == ESCAPE
    if len(escape_bytes) != 4 * np.count_nonzero(escaped):
        raise ValueError(f"delta: {len(escape_bytes) // 4} escapes for {np.count_nonzero(escaped)} long gaps")
    gaps[escaped] += np.frombuffer(escape_bytes, "<u4")
    positions = np.cumsum(gaps + 1) - 1
    if positions.size and positions[-1] >= size:
        raise ValueError(f"delta: position {positions[-1]} beyond {size} values")
    return positions


def _planes(patterns: np.ndarray) -> list[memoryview]:
    """Byte 0 of every value, then byte 1, and so on: exponents compress apart from mantissas."""
    by_byte = patterns.view(np.uint8).reshape(-1, patterns.itemsize)
    return [np.ascontiguousarray(by_byte[:, index]).data for index in range(patterns.itemsize)]


def _from_planes(streams: Sequence[bytes], size: int, width: int) -> np.ndarray:
    by_byte = np.empty((size, width), np.uint8)
    for index, stream in enumerate(streams):
        if len(stream) != size:
            raise ValueError(f"delta: plane of {len(stream)} bytes for {size} values")
        by_byte[:, index] = np.frombuffer(stream, np.uint8)
    return by_byte.reshape(-1).view(f"<u{width}")


def _pack(streams: Sequence[memoryview]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    sizes: list[bytes] = []
    bodies: list[bytes | memoryview] = []
    for stream in streams:
        body: bytes | memoryview = stream
        if len(stream) >= MIN_COMPRESSED_BYTES:
            compressed = compressor.compress(stream)
            body = compressed if len(compressed) < len(stream) else stream
        sizes.append(_STREAM.pack(len(stream), len(body)))
        bodies.append(body)
    return b"".join([*sizes, *bodies])


def _unpack(payload: bytes | memoryview, limits: Sequence[int]) -> list[bytes]:
    """The streams, none over its limit in bytes."""
    view = memoryview(payload)
    position = _STREAM.size * len(limits)
    if len(view) < position:
        raise ValueError(f"delta: payload of {len(view)} bytes, expected at least {position}")
    decompressor = zstandard.ZstdDecompressor()
    streams: list[bytes] = []
    for index, limit in enumerate(limits):
        size, stored = _STREAM.unpack_from(view, _STREAM.size * index)
        body = view[position : position + stored]
        position += stored
        if size > limit or len(body) != stored:
            raise ValueError(f"delta: stream {index} of {size} bytes (limit {limit}), {len(body)} of {stored} stored")
        if size == stored:
            streams.append(bytes(body))
            continue
        try:
            if zstandard.frame_content_size(body) != size:
                raise ValueError(f"delta: stream {index} declares another size than {size} bytes")
            streams.append(decompressor.decompress(body, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise ValueError(f"delta: stream {index} does not decompress: {error}") from error
    if position != len(view):
        raise ValueError(f"delta: {len(view) - position} bytes after the last stream")
    return streams
