"""One tensor as its difference from an older tensor: lossless for every bit pattern, NaN payloads and -0 included.

Encoders, one per tensor:

    k1    16-bit: values mapped to ordered integers, so that neighbours differ by one ulp. Streams: gaps between changed
          positions (u8, 255 escapes to u32), signs (bits), "more than one ulp" (bits), and for those |ulps| - 2 (u8, 255
          escapes to u16). Made for reinforcement learning: few values change, nearly all by one ulp
    raw   the new bytes: for other dtypes, and where many values change

A sample of the values decides. Every stream is zstd level 1 where that is smaller. Decoding is bounded by the size of the
tensor; a payload that does not fit is a ValueError.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import zstandard

from infra.policies.tensors import CHUNK_VALUES, ITEM_BYTES, Tensor, bits, chunks
from infra.store.store import joined

LEVEL = 1
ESCAPE = 255
MIN_COMPRESSED_BYTES = 32
K1_SHARE = 0.25  # of the values changed: more make the tensor raw, and its version an anchor
SAMPLE_VALUES = 4096
MOVES_AT_ONCE = 2**16  # what is made of them stays in the processor's cache
MAX_VALUES = 2**31 - 1  # of a tensor: every stream then fits its u32 size; larger ones are sent raw
CHAIN_VALUES = 2**19  # of the values that a chain moves: in the cache, and enough of them to be worth the calls
# Of one chain: from here on it costs less to put all values in order than only those that each one moves.
MANY_MOVES = 8
_STREAM = struct.Struct("<II")  # bytes unpacked, bytes stored (equal: stored as they are)


Move = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Values that changed: patterns before and after, [K] u16, and their places in the tensor, [K] i32 or i64, ascending."""


class Moves(NamedTuple):
    """positions: where values move, [K] ascending. ulps: by how many, [K] u16, wrapped."""

    positions: np.ndarray
    ulps: np.ndarray


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
    if before.itemsize == 2 and before.size <= MAX_VALUES and sampled_share(before, after) < K1_SHARE:
        streams = _UlpStreams()
        for move in _moves_between(before, after):
            streams.add(*move)
        changed, payload = streams.packed()
        if len(payload) < new.num_bytes:
            return Encoded("k1", payload, changed)
        return Encoded("raw", new.data, changed)
    changed = sum(int(np.count_nonzero(a != b)) for a, b in zip(chunks(before), chunks(after), strict=True))
    return Encoded("raw", new.data, changed)


def encode_moves(size: int, moves: Iterable[Move]) -> Encoded | None:
    """Like `encode_tensor` for a tensor of `size` 16-bit values, where the few that changed are known: in order,
    some at a time. None where it would be raw.
    """
    streams = _UlpStreams()
    for before, after, at in moves:
        for start in range(0, at.size, MOVES_AT_ONCE):
            part = slice(start, start + MOVES_AT_ONCE)
            streams.add(before[part], after[part], at[part])
    changed, payload = streams.packed()
    return None if size > MAX_VALUES or len(payload) >= 2 * size else Encoded("k1", payload, changed)


def sampled_share(before: np.ndarray, after: np.ndarray) -> float:
    """About how many of the values differ, of values at even distances."""
    stride = -(-before.size // SAMPLE_VALUES) or 1
    return float(np.mean(before[::stride] != after[::stride])) if before.size else 0.0


def _moves_between(before: np.ndarray, after: np.ndarray) -> Iterator[Move]:
    """Differences, found piece by piece, so that each piece stays in the processor's cache."""
    room = np.empty(min(before.size, CHUNK_VALUES), bool)
    found: list[Move] = []
    start = waiting = 0
    for old, new in zip(chunks(before), chunks(after), strict=True):
        at = _sparse(np.not_equal(old, new, out=room[: old.size]))
        found.append((old.take(at), new.take(at), at + start))
        start, waiting = start + old.size, waiting + at.size
        if waiting >= MOVES_AT_ONCE or (waiting and start == before.size):
            olds, news, places = map(np.concatenate, zip(*found, strict=True))
            yield olds, news, places
            found, waiting = [], 0


class _UlpStreams:
    def __init__(self) -> None:
        self._last = -1
        self._gaps, self._gap_escapes, self._down, self._large, self._rest, self._rest_escapes = (
            [np.empty(0, kind)] for kind in (np.uint8, "<u4", bool, bool, np.uint8, "<u2")
        )

    def add(self, before: np.ndarray, after: np.ndarray, at: np.ndarray) -> None:
        """The next values that changed: before and after, and their places."""
        gaps = np.diff(at, prepend=self._last) - 1
        self._last = int(at[-1])
        self._gaps.append(np.minimum(gaps, ESCAPE).astype(np.uint8))
        self._gap_escapes.append((gaps[gaps >= ESCAPE] - ESCAPE).astype("<u4"))
        old, new = in_order(before, np.empty_like(before)), in_order(after, np.empty_like(after))
        down = new.view(np.int16) < old.view(np.int16)
        ulps = _signed(new - old, down)
        large = ulps > 1
        over = ulps[large] - np.uint16(2)
        self._down.append(down)
        self._large.append(large)
        self._rest.append(np.minimum(over, ESCAPE).astype(np.uint8))
        self._rest_escapes.append((over[over >= ESCAPE] - np.uint16(ESCAPE)).astype("<u2"))

    def packed(self) -> tuple[int, memoryview]:
        """Number of values that changed, and the payload."""
        signs = np.concatenate(self._down)
        streams = [
            np.concatenate(self._gaps),
            np.concatenate(self._gap_escapes),
            np.packbits(signs),
            np.packbits(np.concatenate(self._large)),
            np.concatenate(self._rest),
            np.concatenate(self._rest_escapes),
        ]
        return signs.size, _pack([stream.view(np.uint8).data for stream in streams])


def _sparse(differs: np.ndarray) -> np.ndarray:
    """Indices of the true values of an array with few of them: eight are tested at a time."""
    if differs.size % 8:
        return np.flatnonzero(differs)
    eights = differs.view(np.uint64)
    some = np.flatnonzero(eights != 0)
    at = np.flatnonzero(eights.take(some).view(bool))
    found: np.ndarray = (some.take(at >> 3) << 3) + (at & 7)
    return found


def _signed(ulps: np.ndarray, down: np.ndarray) -> np.ndarray:
    """16-bit values, negative where `down`; without a branch, since signs cannot be foreseen."""
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


def decode_pieces(parts: Sequence[Part], old: Tensor) -> Iterator[memoryview]:
    """The bytes of `decode_chain`, one piece after the other; a piece is valid until the next one is asked for. ValueError for
    a payload that does not fit, before the first piece.
    """
    base, moves = _last_moves(parts, old)
    for piece in moved(base, moves) if moves else chunks(base):
        if piece.size:
            yield piece.view(np.uint8).data


def _last_moves(parts: Sequence[Part], old: Tensor) -> tuple[np.ndarray, list[Moves]]:
    """End of a chain: values [size], and the moves that are still to be made on them."""
    if unknown := [encoder for encoder, _ in parts if encoder not in ("k1", "raw")]:
        raise ValueError(f"delta: got encoder {unknown[0]!r} for {old.dtype}, expected k1 or raw")
    raw = max((index for index, (encoder, _) in enumerate(parts) if encoder == "raw"), default=-1)
    base = bits(old) if raw < 0 else bits(Tensor(old.dtype, old.shape, parts[raw][1]))
    return base, [_moves(payload, old.dtype, base.size) for _, payload in parts[raw + 1 :]]


def _moves(payload: bytes | memoryview, dtype: str, size: int) -> Moves:
    if ITEM_BYTES[dtype] != 2 or size > MAX_VALUES:
        raise ValueError(f"delta: got k1 for {size} values of {dtype}, expected at most {MAX_VALUES} of 16 bits")
    flags = -(-size // 8)
    streams = _unpack(payload, [size, 4 * size, flags, flags, size, 2 * size])
    positions = _positions(streams[0], streams[1], size)
    return Moves(positions, _from_ulps(streams[2:], positions.size))


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


def moved(base: np.ndarray, moves: Sequence[Moves], out: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """The values after all moves, one after the other, piece by piece, in `out` [size]; without it a piece holds until the next
    one is asked for. What moves beyond the range comes in again at its other end.
    """
    starts = np.append(np.arange(0, base.size, CHAIN_VALUES), base.size)
    cuts = [np.searchsorted(positions, starts.astype(positions.dtype)) for positions, _ in moves]
    most = max(int(np.diff(cut).max(initial=0)) for cut in cuts)
    # Written over for each piece: to take memory anew costs more than what is done in it.
    scratch = _Scratch(np.empty((3, min(base.size, CHAIN_VALUES)), np.uint16), np.empty(most, np.int64))
    move = _move_all if len(moves) >= MANY_MOVES else _move
    for chunk, start in enumerate(starts[:-1]):
        parts = [slice(cut[chunk], cut[chunk + 1]) for cut in cuts]
        near = (Moves(move.positions[part], move.ulps[part]) for move, part in zip(moves, parts, strict=True))
        old = base[start : start + CHAIN_VALUES]
        piece = scratch.values[0, : old.size] if out is None else out[start : start + CHAIN_VALUES]
        move(old, piece, start, near, scratch)
        yield piece


class _Scratch(NamedTuple):
    """values: [3, CHAIN_VALUES] u16. places: [K] i64, of what one move has of a piece."""

    values: np.ndarray
    places: np.ndarray


def _move(old: np.ndarray, piece: np.ndarray, start: int, moves: Iterable[Moves], scratch: _Scratch) -> None:
    """Fill the piece that begins at `start`: of each move, only what it moves is put in the order of values."""
    np.copyto(piece, old)
    for positions, ulps in moves:
        at = np.subtract(positions, start, out=scratch.places[: positions.size])
        taken, other = scratch.values[1:, : at.size]
        piece.take(at, out=taken, mode="wrap")  # all lie within: to wrap is less than to look
        np.add(in_order(taken, other), ulps, out=other)
        piece[at] = in_order(other, taken)


def _move_all(old: np.ndarray, piece: np.ndarray, start: int, moves: Iterable[Moves], scratch: _Scratch) -> None:
    """The same, with all of the piece in the order of values meanwhile: of many moves each is then one pass."""
    turned = in_order(old, scratch.values[1, : old.size])
    for positions, ulps in moves:
        np.add.at(turned, np.subtract(positions, start, out=scratch.places[: positions.size]), ulps)
    in_order(turned, piece)


def in_order(patterns: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Sign-magnitude patterns as two's complement, in the order of the values they stand for, and back again (u16 to u16, one
    to one): of what is negative, all bits but the sign are turned. out: another array.
    """
    signed, turned = patterns.view(np.int16), out.view(np.int16)
    np.right_shift(signed, 15, out=turned)
    np.bitwise_and(turned, np.int16(0x7FFF), out=turned)
    np.bitwise_xor(turned, signed, out=turned)
    return out
