"""Facts of a whole log, dealt to parts by the group they are about, so that one part at a time fits into memory.

    part ─> facts that came last, in memory ─> every AT_ONCE of them one zstd frame in a file

Guarantees: a part gives its facts in the order in which they were added; the file has no name, so however the process ends,
nothing is left of it; the first PARTS x AT_ONCE facts or so need none.
"""

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import msgspec
import xxhash
import zstandard

from infra.ledger.facts import Fact, group_of_fact

PARTS = 256  # 30 M experiences are 120,000 a part
AT_ONCE = 512
LEVEL = 1


class ScratchSpool:
    """Not safe for concurrent use. The file lies where `tempfile` puts it: see TMPDIR."""

    def __init__(self, parts: int = PARTS, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._newest: list[list[Fact]] = [[] for _ in range(parts)]
        self._frames = [array("Q") for _ in range(parts)]  # offset, length, offset, length …
        self._file: BinaryIO | None = None
        self.num_bytes = 0  # in the file
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[Fact])
        self._pack, self._unpack = zstandard.ZstdCompressor(level=LEVEL), zstandard.ZstdDecompressor()

    @property
    def num_parts(self) -> int:
        """How many there are."""
        return len(self._newest)

    def add(self, fact: Fact) -> None:
        """Put a fact into the part of its group. Raises OSError where the disk is full."""
        part = xxhash.xxh3_64_intdigest(group_of_fact(fact).encode()) % len(self._newest)
        newest = self._newest[part]
        newest.append(fact)
        if len(newest) >= self._at_once:
            self._write(part, self.packed(newest))
            newest.clear()

    def read(self, part: int) -> Iterator[Fact]:
        """The facts of one part."""
        if self._file is not None:
            frames = self._frames[part]
            for offset, length in zip(frames[::2], frames[1::2], strict=True):
                frame = os.pread(self._file.fileno(), length, offset)
                yield from self._decoder.decode(self._unpack.decompress(frame))
        yield from self._newest[part]

    def packed(self, facts: Sequence[Fact]) -> bytes:
        """Facts as they lie in the file."""
        return self._pack.compress(self._encoder.encode(facts))

    def close(self) -> None:
        """Give the disk back."""
        if self._file is not None:
            self._file.close()

    def _write(self, part: int, frame: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - until `close`
        self._frames[part].extend((self.num_bytes, len(frame)))
        left = memoryview(frame)
        while left:
            left = left[self._file.write(left) :]
        self.num_bytes += len(frame)
