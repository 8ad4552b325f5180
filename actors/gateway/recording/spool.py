"""The spool: records on disk while the broker is away, in order.

    segment   <number>.spool: entries one after the other
    entry     length u32 · crc32 u32 · payload

Durable: `append` returns after one fsync of all its records, so they survive a kill and a power cut. Opening the spool cuts off
a torn tail (a kill during a write). An entry damaged before the tail is counted, with all entries behind it in its segment, and
the segment is kept. A segment is removed once all of it is sent; after a kill its entries are sent again, and readers drop
repeated ids. An unreadable segment stays for the next start. Blocking: call it from a thread, in a single process.
"""

import errno
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

SEGMENT_BYTES = 4 * 1024 * 1024
MAX_ENTRY_BYTES = 64 * 1024 * 1024
_HEAD = struct.Struct("<II")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpoolFull(Exception):
    """The disk takes no entries; nothing of them was kept. reason: "spool full" for want of room, else "spool lost"."""

    reason = "spool full"


class Spool:
    """Entries in a folder. max_bytes: of all segments together. torn_bytes, damaged: bytes cut off and segments damaged."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sealed = 0  # this segment and those before it take no more entries
        self.torn_bytes = 0
        self.damaged = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._numbers = sorted(int(path.stem) for path in folder.glob("*.spool"))
        self._counts = {number: self._recover(number) for number in self._numbers}
        self._sizes = {number: self._path(number).stat().st_size for number in self._numbers}

    def __len__(self) -> int:
        return sum(self._counts.values())

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def append(self, payloads: Sequence[bytes]) -> None:
        """Keep entries, all or none. Raises SpoolFull."""
        data = b"".join(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload for payload in payloads)
        if self.num_bytes + len(data) > self._max_bytes:
            raise SpoolFull(f"spool: {self.num_bytes} bytes and {len(data)} more, expected at most {self._max_bytes}")
        number = self._open_segment()
        path, before = self._path(number), self._sizes[number]
        try:
            with path.open("ab") as file:
                if file.tell() != before:
                    raise OSError(errno.EIO, f"{file.tell()} bytes, expected the {before} that were written")
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            full = SpoolFull(f"spool: {path.name} cannot be written: {error.strerror}")
            if error.errno not in _NO_ROOM:
                full.reason = "spool lost"
                self._sealed = max(self._sealed, number) if before else self._sealed
            self._cut(number, before)
            raise full from error
        self._sizes[number] += len(data)
        self._counts[number] += len(payloads)

    def oldest(self) -> tuple[int, list[bytes]] | None:
        """The oldest segment and its entries, None where there is nothing. It takes no more entries from here on. Raises
        OSError where it cannot be read whole.
        """
        while self._numbers:
            number = self._numbers[0]
            if count := self._counts[number]:
                self._sealed = max(self._sealed, number)
                path = self._path(number)
                found = [payload for payload, _ in entries_in(path.read_bytes())]
                if len(found) < count:
                    raise OSError(errno.EIO, f"{len(found)} entries, expected the {count} that were written", str(path))
                return number, found
            self.remove(number)
        return None

    def leave_oldest(self) -> int:
        """Leave the oldest segment to the next start. Returns its number of entries."""
        return self._forget(self._numbers[0])

    def remove(self, number: int) -> None:
        """Remove a segment that was sent. Raises OSError if it stays on disk: then the next start sends it again."""
        self._forget(number)
        self._path(number).unlink(missing_ok=True)

    def _forget(self, number: int) -> int:
        self._sealed = max(self._sealed, number)
        self._numbers.remove(number)
        del self._sizes[number]
        return self._counts.pop(number)

    def _cut(self, number: int, size: int) -> None:
        """Cut off the bytes of a failed write. If that fails as well, the segment takes no more entries."""
        path = self._path(number)
        try:
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        except OSError:
            self._sealed = max(self._sealed, number)

    def _open_segment(self) -> int:
        last = self._numbers[-1] if self._numbers else self._sealed
        if self._numbers and last > self._sealed and self._sizes[last] < SEGMENT_BYTES:
            return last
        number = max(last, self._sealed) + 1
        self._numbers.append(number)
        self._counts[number] = self._sizes[number] = 0
        return number

    def _recover(self, number: int) -> int:
        """Count the whole entries of a segment found on disk, and cut off all bytes behind them."""
        path = self._path(number)
        data = path.read_bytes()
        entries = list(entries_in(data))
        end = entries[-1][1] if entries else 0
        if end < len(data):
            if number == self._numbers[-1]:
                self.torn_bytes += len(data) - end
            else:
                self.damaged += 1
                path.with_suffix(".damaged").write_bytes(data)
            os.truncate(path, end)
        return len(entries)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}.spool"


def entries_in(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Payloads and their end offsets, up to the first entry that is not whole."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        payload = data[at + _HEAD.size : end]
        if length > MAX_ENTRY_BYTES or len(payload) < length or zlib.crc32(payload) != crc:
            return
        yield payload, end
        at = end
