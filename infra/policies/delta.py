"""One tensor as its difference from an older one: lossless for every bit pattern, NaN payloads and -0 included.

Encoders, one per tensor:

    k1      16-bit: values mapped to ordered integers, so that neighbours differ by one ulp. Streams: gaps between
            changed positions (u8, 255 escapes to u32), signs (bits), "more than one ulp" (bits), and for those
            |ulps| - 2 (u8, 255 escapes to u16). Made for reinforcement learning: few values change, nearly all by one
    bitmap  the same, with one bit per value instead of gaps: for many changes
    xor     any dtype: byte planes of new xor old
    planes  any dtype: byte planes of the new values alone
    raw     the new bytes

The number of values that changed decides between k1 and bitmap, by a sample; all else is tried, and the smallest kept.
Every stream is zstd level 1 where that is smaller. Decoding is bounded by the size of the tensor; what does not fit is
a ValueError.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import zstandard

from infra.policies.moves import Moves, in_order, moved
from infra.policies.tensors import CHUNK_VALUES, ITEM_BYTES, Seen, Tensor, are_finite, bits, chunks, is_finite, unseen
from infra.store.store import joined

LEVEL = 1
ESCAPE = 255
MIN_COMPRESSED_BYTES = 32
BITMAP_SHARE = 0.1  # of the values changed: from here on a bit per value is as small as gaps, and cheaper to make
SAMPLE_VALUES = 4096
MOVES_AT_ONCE = 2**16  # what is made of them stays in the processor's cache
MAX_VALUES = 2**31 - 1  # of a tensor: every stream then fits its u32 size; larger ones are sent raw
_STREAM = struct.Struct("<II")  # bytes unpacked, bytes stored (equal: stored as they are)


Move = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Values that changed: patterns before and after, [K] u16, and their places in the tensor, [K] i32 or i64, ascending."""


class Encoded(msgspec.Struct, frozen=True):
    """A tensor's new state. encoder: as in DeltaPart. payload: so encoded. changed: values that differ. finite: all are."""

    encoder: str
    payload: bytes | memoryview
    changed: int
    finite: bool = True


def encode_tensor(old: Tensor, new: Tensor, seen: Seen = unseen) -> Encoded:
    """`new` relative to `old`, which must have its dtype and shape. seen: is shown `new`."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise ValueError(f"delta: got {new.dtype}{new.shape}, expected {old.dtype}{old.shape}")
    before, after = bits(old), bits(new)
    size = before.size
    candidates: list[tuple[str, bytes | memoryview]] = []
    if before.itemsize == 2 and size <= MAX_VALUES:
        encoder = "k1" if sampled_share(before, after) < BITMAP_SHARE else "bitmap"
        changed, finite, streams = _by_ulps(before, after, encoder, new.dtype, seen)
        candidates.append((encoder, _pack(streams)))
    else:
        seen(memoryview(new.data))
        finite = is_finite(new)
        changed = sum(int(np.count_nonzero(a != b)) for a, b in zip(chunks(before), chunks(after), strict=True))
    if before.itemsize != 2 and size <= MAX_VALUES:
        candidates.append(("xor", _pack(_planes(before ^ after))))
    if size // 2 < changed and size <= MAX_VALUES:
        candidates.append(("planes", _pack(_planes(after))))
    encoder, payload = min(candidates, key=lambda candidate: len(candidate[1]), default=("raw", b""))
    if encoder == "raw" or len(payload) >= new.num_bytes:
        return Encoded("raw", new.data, changed, finite)
    return Encoded(encoder, payload, changed, finite)


def encode_moves(dtype: str, size: int, moves: Iterable[Move]) -> Encoded | None:
    """What `encode_tensor` gives for a tensor of `size` 16-bit values of which few changed, where these are known: in order,
    some at a time. None where it would not encode them by gaps.
    """
    streams = _UlpStreams(dtype, gaps=True)
    for before, after, at in moves:
        for start in range(0, at.size, MOVES_AT_ONCE):
            part = slice(start, start + MOVES_AT_ONCE)
            streams.add(before[part], after[part], at[part])
    changed, finite, joined_streams = streams.joined()
    payload = _pack(joined_streams)
    if size // 2 < changed or size > MAX_VALUES or len(payload) >= 2 * size:
        return None
    return Encoded("k1", payload, changed, finite)


def sampled_share(before: np.ndarray, after: np.ndarray) -> float:
    """About how many of the values differ, of values at even distances."""
    stride = -(-before.size // SAMPLE_VALUES) or 1
    return float(np.mean(before[::stride] != after[::stride])) if before.size else 0.0


def _by_ulps(
    before: np.ndarray, after: np.ndarray, encoder: str, dtype: str, seen: Seen = unseen
) -> tuple[int, bool, list[memoryview]]:
    """How many 16-bit values changed, whether they are finite, and the streams of k1 or bitmap. What differs is found piece by
    piece, so that what is made of one stays in the processor's cache; what is made of that, once there is enough of it.
    """
    streams = _UlpStreams(dtype, gaps=encoder == "k1")
    room = np.empty(min(before.size, CHUNK_VALUES), bool)
    found: list[Move] = []
    start = waiting = 0
    for old, new in zip(chunks(before), chunks(after), strict=True):
        seen(new.data)
        differs = np.not_equal(old, new, out=room[: old.size])
        if encoder == "bitmap":
            streams.places.append(np.packbits(differs))
        at = np.flatnonzero(differs) if encoder == "bitmap" else _sparse(differs)
        found.append((old.take(at), new.take(at), at + start))
        start, waiting = start + old.size, waiting + at.size
        if waiting >= MOVES_AT_ONCE or (waiting and start == before.size):
            streams.add(*map(np.concatenate, zip(*found, strict=True)))
            found, waiting = [], 0
    return streams.joined()


class _UlpStreams:
    """Streams of k1 (gaps) or bitmap, as far as they are made. places: gaps, or packed bits."""

    def __init__(self, dtype: str, *, gaps: bool) -> None:
        self._dtype = dtype
        self._gaps = gaps
        self._last = -1
        self._finite = True
        self.places: list[np.ndarray] = [np.empty(0, np.uint8)]
        self._place_escapes, self._down, self._large, self._rest, self._rest_escapes = (
            [np.empty(0, kind)] for kind in ("<u4", bool, bool, np.uint8, "<u2")
        )

    def add(self, before: np.ndarray, after: np.ndarray, at: np.ndarray) -> None:
        """What changed next: values before and after, and their places."""
        if self._gaps:
            gaps = np.diff(at, prepend=self._last) - 1
            self._last = int(at[-1])
            self.places.append(np.minimum(gaps, ESCAPE).astype(np.uint8))
            self._place_escapes.append((gaps[gaps >= ESCAPE] - ESCAPE).astype("<u4"))
        self._finite = self._finite and are_finite(after, self._dtype)
        one, other = in_order(before, np.empty_like(before)), in_order(after, np.empty_like(after))
        down = other.view(np.int16) < one.view(np.int16)
        ulps = _signed(other - one, down)
        large = ulps > 1
        over = ulps[large] - np.uint16(2)
        self._down.append(down)
        self._large.append(large)
        self._rest.append(np.minimum(over, ESCAPE).astype(np.uint8))
        self._rest_escapes.append((over[over >= ESCAPE] - np.uint16(ESCAPE)).astype("<u2"))

    def joined(self) -> tuple[int, bool, list[memoryview]]:
        """See `_by_ulps`."""
        signs = np.concatenate(self._down)
        found = [np.concatenate(self.places)]
        if self._gaps:
            found.append(np.concatenate(self._place_escapes))
        found += [
            np.packbits(signs),
            np.packbits(np.concatenate(self._large)),
            np.concatenate(self._rest),
            np.concatenate(self._rest_escapes),
        ]
        return signs.size, self._finite, [stream.view(np.uint8).data for stream in found]


def _sparse(differs: np.ndarray) -> np.ndarray:
    """Where few of many are true: eight at a time are looked at first."""
    if differs.size % 8:
        return np.flatnonzero(differs)
    eights = differs.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    at = np.flatnonzero(eights.take(some).view(bool))
    found: np.ndarray = (some.take(at >> 3) << 3) + (at & 7)
    return found


def _signed(ulps: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Where `down`, the negative, of 16 bits; without a branch, since signs cannot be foreseen."""
    ones: np.ndarray = np.negative(down.view(np.uint8).astype(np.uint16))
    signed: np.ndarray = (ulps ^ ones) - ones
    return signed


Part = tuple[str, bytes | memoryview]  # encoder and payload


def decode_tensor(encoder: str, payload: bytes | memoryview, old: Tensor) -> Tensor:
    """The tensor that `encode_tensor` was given. ValueError for a payload that does not fit."""
    return decode_chain([(encoder, payload)], old)


def decode_chain(parts: Sequence[Part], old: Tensor) -> Tensor:
    """The tensor that a chain of deltas leads to, oldest first: one copy is made, however long the chain. ValueError for a
    payload that does not fit.
    """
    base, moves = _last_moves(parts, old)
    if not moves:
        return _tensor(old, base)
    values = np.empty_like(base)
    for _ in moved(base, moves, values):
        pass
    return _tensor(old, values)


def decode_pieces(parts: Sequence[Part], old: Tensor, out: np.ndarray | None = None) -> Iterator[memoryview]:
    """The bytes of `decode_chain`, one piece after the other, each put into its place of `out` [num_bytes] u8. Without `out` a
    piece is valid until the next one is asked for. `out` may be the memory of `old`. ValueError for a payload that does not
    fit, before the first piece.
    """
    base, moves = _last_moves(parts, old)
    values = None if out is None else out.view(base.dtype)
    for piece in moved(base, moves, values) if moves else _copied(base, values):
        if piece.size:
            yield piece.view(np.uint8).data


def _copied(base: np.ndarray, out: np.ndarray | None) -> Iterator[np.ndarray]:
    for index, piece in enumerate(chunks(base)):
        if out is None:
            yield piece
        else:
            start = index * CHUNK_VALUES
            room = out[start : start + piece.size]
            np.copyto(room, piece)
            yield room


def _last_moves(parts: Sequence[Part], old: Tensor) -> tuple[np.ndarray, list[Moves]]:
    """What a chain ends with: values [size], and the moves that are still to be made on them."""
    size, width = math.prod(old.shape), ITEM_BYTES[old.dtype]
    base, moves = bits(old), list[Moves]()
    whole = max((index for index, (encoder, _) in enumerate(parts) if encoder in ("raw", "planes")), default=-1)
    if whole >= 0:
        encoder, payload = parts[whole]
        if encoder == "raw":
            base = bits(Tensor(old.dtype, old.shape, payload))
        else:
            base = _from_planes(_unpack(payload, [size] * width), size, width)
    for encoder, payload in parts[whole + 1 :]:
        if encoder in ("k1", "bitmap") and width == 2:
            moves.append(_moves(encoder, payload, size))
        elif encoder == "xor":
            if moves:
                base = np.concatenate([piece.copy() for piece in moved(base, moves)])
                moves = []
            base = base ^ _from_planes(_unpack(payload, [size] * width), size, width)
        else:
            raise ValueError(f"delta: got encoder {encoder!r} for {old.dtype}, expected k1, bitmap, xor, planes or raw")
    return base, moves


def _moves(encoder: str, payload: bytes | memoryview, size: int) -> Moves:
    if size > MAX_VALUES:
        raise ValueError(f"delta: got {encoder} for {size} values, expected at most {MAX_VALUES}")
    by_value = [-(-size // 8), -(-size // 8), size, 2 * size]
    if encoder == "k1":
        streams = _unpack(payload, [size, 4 * size, *by_value])
        positions = _positions(streams[0], streams[1], size)
    else:
        streams = _unpack(payload, [-(-size // 8), *by_value])
        mask = np.frombuffer(streams[0], np.uint8)
        if mask.size != -(-size // 8):
            raise ValueError(f"delta: bitmap of {mask.size} bytes for {size} values")
        positions = np.flatnonzero(np.unpackbits(mask, count=size).view(bool))
    return Moves(positions, _from_ulps(streams[-4:], positions.size))


def _tensor(old: Tensor, patterns: np.ndarray) -> Tensor:
    patterns.flags.writeable = False
    return Tensor(old.dtype, old.shape, patterns.view(np.uint8).data if patterns.size else b"")


def _from_ulps(streams: Sequence[bytes | memoryview], count: int) -> np.ndarray:
    """By how many ulps each changed value moved: [K] u16, what went down as its complement."""
    signs, large_bits, small, escapes = (np.frombuffer(stream, np.uint8) for stream in streams)
    if signs.size != -(-count // 8) or large_bits.size != signs.size or escapes.size % 2:
        raise ValueError(f"delta: {signs.size} and {large_bits.size} bytes of bits for {count} changed values")
    ulps = np.ones(count, np.uint16)
    if small.size or large_bits.any():
        large = np.flatnonzero(np.unpackbits(large_bits, count=count).view(bool))
        rest = small.astype(np.uint16)
        escaped = np.flatnonzero(small == ESCAPE)
        if large.size != rest.size or escaped.size != escapes.size // 2:
            raise ValueError(
                f"delta: {rest.size} sizes and {escapes.size // 2} escapes do not fit {count} changed values"
            )
        rest[escaped] += escapes.view("<u2")
        ulps[large] = rest + np.uint16(2)
    elif escapes.size:
        raise ValueError(f"delta: 0 sizes and {escapes.size // 2} escapes do not fit {count} changed values")
    return _signed(ulps, np.unpackbits(signs, count=count).view(bool))


def _positions(gap_bytes: bytes | memoryview, escape_bytes: bytes | memoryview, size: int) -> np.ndarray:
    """Increasing positions [K] i32 of their gaps: values skipped before each (u8), and what is over ESCAPE (u32)."""
    gaps = np.frombuffer(gap_bytes, np.uint8)
    escaped = np.flatnonzero(gaps == ESCAPE)
    if len(escape_bytes) != 4 * escaped.size:
        raise ValueError(f"delta: {len(escape_bytes) // 4} escapes for {escaped.size} long gaps")
    escapes = np.frombuffer(escape_bytes, "<u4")
    end = int(gaps.sum(dtype=np.int64)) + int(escapes.sum(dtype=np.int64)) + gaps.size
    if end > size:
        raise ValueError(f"delta: position {end - 1} beyond {size} values")
    steps = gaps.astype(np.int32)
    steps += 1
    steps[escaped] += escapes.astype(np.int32)
    steps[:1] -= 1
    return np.cumsum(steps, dtype=np.int32, out=steps)


def _planes(patterns: np.ndarray) -> list[memoryview]:
    """Byte 0 of every value, then byte 1, and so on: exponents compress apart from mantissas."""
    by_byte = patterns.view(np.uint8).reshape(-1, patterns.itemsize)
    return [np.ascontiguousarray(by_byte[:, index]).data for index in range(patterns.itemsize)]


def _from_planes(streams: Sequence[bytes | memoryview], size: int, width: int) -> np.ndarray:
    by_byte = np.empty((size, width), np.uint8)
    for index, stream in enumerate(streams):
        if len(stream) != size:
            raise ValueError(f"delta: plane of {len(stream)} bytes for {size} values")
        by_byte[:, index] = np.frombuffer(stream, np.uint8)
    return by_byte.reshape(-1).view(f"<u{width}")


def _pack(streams: Sequence[memoryview]) -> memoryview:
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
    return joined([*sizes, *bodies])


def _unpack(payload: bytes | memoryview, limits: Sequence[int]) -> list[bytes | memoryview]:
    """The streams, none over its limit in bytes."""
    view = memoryview(payload)
    position = _STREAM.size * len(limits)
    if len(view) < position:
        raise ValueError(f"delta: payload of {len(view)} bytes, expected at least {position}")
    decompressor = zstandard.ZstdDecompressor()
    streams: list[bytes | memoryview] = []
    for index, limit in enumerate(limits):
        size, stored = _STREAM.unpack_from(view, _STREAM.size * index)
        body = view[position : position + stored]
        position += stored
        if size > limit or len(body) != stored:
            raise ValueError(f"delta: stream {index} of {size} bytes (limit {limit}), {len(body)} of {stored} stored")
        if size == stored:
            streams.append(body)
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
