"""What S3 is sent and what comes back, as it goes over a connection: nothing is copied to be sent, and each piece that comes
goes where it belongs.
"""

import io
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from infra.store.pieces import Pieces, total_bytes

READ_TIMEOUT_S = 60.0
SLOWEST = 16 * 1024  # bytes a second; a connection that gives fewer is opened again
CHUNK_BYTES = 256 * 1024


class PiecesReader(io.RawIOBase):
    """Pieces as one file. BytesIO would first copy all of a memoryview."""

    def __init__(self, pieces: Pieces) -> None:
        self._left = deque(memoryview(piece) for piece in pieces)

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, fewer only at the end."""
        found, wanted = list[memoryview](), size if size >= 0 else total_bytes(self._left)
        while self._left and wanted:
            piece = self._left.popleft()
            found.append(piece[:wanted])
            if len(piece) > wanted:
                self._left.appendleft(piece[wanted:])
            wanted -= len(found[-1])
        return bytes(found[0]) if len(found) == 1 else b"".join(found)


def body_of(answer: Any, length: int, clock: Callable[[], float] = time.monotonic) -> Iterator[bytes]:
    """The bytes of an answer, of at most `length`, as they come. TimeoutError where that is more slowly than SLOWEST."""
    allowed_s, got = READ_TIMEOUT_S + length / SLOWEST, 0
    deadline = clock() + allowed_s
    while piece := answer.read1(CHUNK_BYTES):
        got += len(piece)
        if clock() > deadline:
            raise TimeoutError(f"got {got:,} of {length:,} bytes in {allowed_s:.0f} s")
        yield piece


def join(start: int, pieces: Iterator[bytes]) -> bytes:
    """The pieces, wherever they begin."""
    return b"".join(pieces)


def place(room: memoryview, start: int, pieces: Iterator[bytes]) -> memoryview:
    """Where the pieces lie now, one after the other. ValueError where they do not fit."""
    at = start
    for piece in pieces:
        room[at : at + len(piece)] = piece
        at += len(piece)
    return room[start:at]
