"""Objects that are put piece by piece, such as the tensors of an anchor: nothing is joined before it is written.

A store that takes pieces says so by its method `put_pieces`; for any other they are joined.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from infra.store.store import Store

Pieces = Sequence[bytes | memoryview]


@runtime_checkable
class PiecewiseStore(Protocol):
    """A store that takes an object in pieces."""

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        """What `Store.put` does with all pieces, one after the other. Raises StoreError."""


def put_pieces(store: Store, key: str, pieces: Pieces) -> None:
    """Put an object of these pieces into any store. Raises StoreError."""
    if isinstance(store, PiecewiseStore):
        store.put_pieces(key, pieces)
    else:
        store.put(key, joined(pieces))


def joined(pieces: Pieces) -> memoryview:
    """The bytes of all pieces, one after the other, read-only. Other threads run meanwhile, which `b"".join` keeps waiting."""
    room, start = np.empty(total_bytes(pieces), np.uint8), 0
    for piece in pieces:
        if piece:
            np.copyto(room[start : start + len(piece)], np.frombuffer(piece, np.uint8))
        start += len(piece)
    room.flags.writeable = False
    return room.data


def total_bytes(pieces: Pieces) -> int:
    """Of all pieces."""
    return sum(len(piece) for piece in pieces)
