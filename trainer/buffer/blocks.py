"""Reading back what the journal names: blocks of `buffer` by offset.

Loss: an offset that retention has removed, or that does not decode, is an error that names it, never a gap.
"""

import hashlib
from collections.abc import Iterable

import msgspec

from infra.log.blobs import is_claim
from infra.log.log import Log, LogMessage
from schemas import Block, encode, topics
from schemas.errors import BadFrame, OffsetOutOfRange


class Stored(msgspec.Struct, frozen=True):
    """A block as it lies in `buffer`.

    block: decoded. frame: to keep in memory. digest: of the record, as the journal lists it.
    """

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
    """The block of a record of `buffer`; BadFrame naming its offset if it holds something else."""
    if not isinstance(message.value, Block):
        raise BadFrame(f"buffer offset {message.offset}: {message.error or 'not a block'}")
    return Stored(message.value, frame_of(message, message.value), digest_of(message))


async def read_blocks(log: Log, offsets: Iterable[int]) -> dict[int, Stored]:
    """What lies at these offsets of `buffer`. Raises OffsetOutOfRange or BadFrame naming the offset."""
    wanted = set(offsets)
    messages = await log.messages_at(topics.BUFFER, 0, wanted)
    if lost := wanted - messages.keys():
        raise OffsetOutOfRange(f"{log.name(topics.BUFFER)}/0: offset {min(lost)} is not kept, and the journal names it")
    return {offset: stored(message) for offset, message in messages.items()}
