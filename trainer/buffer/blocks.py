"""Reading back what the journal names: blocks of `buffer` by offset.

Loss: an offset that retention has removed, or that does not decode, is an error that names it, never a gap.
"""

import hashlib
from collections.abc import Iterable

import msgspec

from infra.log.blobs import is_claim
from infra.log.bus import Partition
from infra.log.log import Log, LogMessage
from schemas import Block, encode, topics
from schemas.errors import BadFrame, OffsetOutOfRange

# Neighbouring offsets are read in one go where the hole between them costs less than another request.
MAX_HOLE = 64


def ranges(offsets: Iterable[int], max_hole: int = MAX_HOLE) -> list[tuple[int, int]]:
    """Ascending [start, stop) ranges that cover all offsets.

    >>> ranges([3, 4, 9, 200], max_hole=8)
    [(3, 10), (200, 201)]
    """
    found: list[tuple[int, int]] = []
    for offset in sorted(set(offsets)):
        if found and offset - found[-1][1] < max_hole:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found


class Stored(msgspec.Struct, frozen=True):
    """A block as it lies in `buffer`. frame: to keep in memory. digest: of the record, as the journal lists it."""

    block: Block
    frame: bytes
    digest: bytes


def digest_of(message: LogMessage) -> bytes:
    """BLAKE2b-128 of a record; that of a claim check covers the hash of what it claims."""
    return hashlib.blake2b(message.record.value, digest_size=16).digest()


def frame_of(message: LogMessage, block: Block) -> bytes:
    """The block's frame as it is kept in memory; what lies in the object store is encoded again."""
    return encode(block) if is_claim(message.record.value) else message.record.value


def stored(message: LogMessage) -> Stored:
    """The block of a record of `buffer`; BadFrame naming its offset if it is none."""
    if not isinstance(message.value, Block):
        raise BadFrame(f"buffer offset {message.offset}: {message.error or 'not a block'}")
    return Stored(message.value, frame_of(message, message.value), digest_of(message))


async def read_blocks(log: Log, offsets: Iterable[int]) -> dict[int, Stored]:
    """What lies at these offsets of `buffer`. Raises OffsetOutOfRange or BadFrame naming the offset."""
    wanted = set(offsets)
    if not wanted:
        return {}
    found: dict[int, Stored] = {}
    reader = await log.assigned(topics.BUFFER, {0: min(wanted)})
    end = max((await log.bus.end_offsets(log.name(topics.BUFFER))).values())
    partition = Partition(log.name(topics.BUFFER), 0)
    try:
        for start, stop in ranges(wanted):
            reader.seek(partition, start)
            at = start
            while at < min(stop, end):
                for message in await log.read(reader, timeout_s=5.0):
                    at = message.offset + 1
                    if message.offset not in wanted:
                        continue
                    found[message.offset] = stored(message)
    finally:
        await reader.close()
    if wanted - found.keys():
        raise OffsetOutOfRange(
            f"buffer: offset {min(wanted - found.keys())} is named by the journal but not in the log"
        )
    return found
