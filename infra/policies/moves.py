"""Moves of 16-bit values by ulps, of one delta or of a chain of them, made in one pass over the values.

The order of the moves does not matter: each adds to a value's place in the order of values, modulo 2^16.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

CHAIN_VALUES = 2**19  # of the values that a chain moves: in the cache, and enough of them to be worth the calls
# Of one chain: from here on it costs less to put all values in order than only those that each one moves.
MANY_MOVES = 8


class Moves(NamedTuple):
    """positions: where values move, [K] ascending. ulps: by how many, [K] u16, wrapped."""

    positions: np.ndarray
    ulps: np.ndarray


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
        near = (Moves(one.positions[part], one.ulps[part]) for one, part in zip(moves, parts, strict=True))
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
