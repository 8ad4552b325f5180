"""The bytes of every record: one bounded encoder and decoder, and the Kafka headers, so that no router has to open them.

    frame    magic "HR" · format u8 · flags u8 · body_len u32 LE · body
    control  flag bit 7: the body is the msgpack map of the record, and nothing follows
    block    format 3: the body is the header of `schemas.wire.block`; section lengths and sections follow
    sealed   format 4, flag bit 0: a block whose sections are sealed under the key_id in its header

A flag that readers must know comes with a higher format, so that older ones stop before the ack. A flag they do not know
in a format they do is damage, and dead-lettered as such: one flipped bit must not stop a partition.

Guarantee: `decode` raises only BadFrame or UnknownMajor, and never allocates memory for bytes that a frame only announces.
"""

import struct
from contextlib import suppress

import msgspec

from schemas.bulk import FindSeal
from schemas.errors import BadFrame, UnknownMajor
from schemas.experience import MAX_HEADER_BYTES, encoder
from schemas.ids import group_of
from schemas.records import MAJOR, Control, Feedback
from schemas.wire.block import Block, decode_block, encode_block

MAGIC = b"HR"
CONTROL = 0x80
SEALED = 0x01
BLOCK_FORMAT, SEALED_FORMAT = 3, 4
MAX_TOTAL_BYTES = 128 * 1024 * 1024

_BLOCKS = ((BLOCK_FORMAT, 0), (SEALED_FORMAT, SEALED))
_SEALED_START = MAGIC + bytes((SEALED_FORMAT, SEALED))
_PREFIX = struct.Struct("<2sBBI")
_control_decoder = msgspec.msgpack.Decoder(Control)


def encode(record: Control | Block, find: FindSeal | None = None) -> bytes:
    """The frame of a record; raises ValueError for one that no reader would accept.

    find: finds the key that a block's members name, to seal its sections under; its errors are raised.
    Putting members of several frames in one block opens their sections, so that BadFrame may be raised for these.
    """
    if isinstance(record, Block):
        header, rest, sealed = encode_block(record, find)
        kind = _BLOCKS[sealed]
    else:
        try:
            header, rest, kind = encoder.encode(record), b"", (MAJOR, CONTROL)
            _control_decoder.decode(header)
        except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError) as error:
            raise ValueError(f"{type(record).__name__}: {error}") from error
    size = _PREFIX.size + len(header) + len(rest)
    if size > MAX_TOTAL_BYTES or len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{type(record).__name__}: got {size} bytes with a header of {len(header)}, expected at most"
            f" {MAX_TOTAL_BYTES} with a header of {MAX_HEADER_BYTES}"
        )
    return b"".join((_PREFIX.pack(MAGIC, *kind, len(header)), header, rest))


def is_sealed(data: bytes) -> bool:
    return data[:4] == _SEALED_START


def decode(data: bytes | bytearray | memoryview, find: FindSeal | None = None) -> Control | Block:
    """The record in a frame; raises BadFrame, or UnknownMajor for a frame of a newer headrace.

    find: finds the key of sealed sections; its errors are raised. Without it they stay sealed: the header can be read and
    edited, and a read of a section raises Sealed.
    """
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise BadFrame(f"frame: got {len(view)} bytes, expected at least {_PREFIX.size}")
    magic, major, flags, length = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise BadFrame(f"frame: got magic {magic!r}, expected {MAGIC!r}")
    kind = (major, flags)
    is_block = kind in _BLOCKS
    if not is_block and major > SEALED_FORMAT:
        raise UnknownMajor(
            f"frame of format {major}, flags {flags:#x}; this reader knows {SEALED_FORMAT}: upgrade it first"
        )
    if not is_block and kind != (MAJOR, CONTROL):
        raise BadFrame(f"frame: got format {major} with flags {flags:#x}, expected a format with its own flags")
    if len(view) > MAX_TOTAL_BYTES or length > MAX_HEADER_BYTES or length > len(view) - _PREFIX.size:
        raise BadFrame(f"frame: got {len(view)} bytes with a header of {length}, expected a header that fits")
    body, rest = view[_PREFIX.size : _PREFIX.size + length], view[_PREFIX.size + length :]
    if is_block:
        return decode_block(body, rest, sealed=bool(flags & SEALED), find=find)
    if len(rest):
        raise BadFrame(f"frame: {len(rest)} bytes after the record, expected none")
    try:
        record: Control = _control_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise BadFrame(f"record: {error}") from error
    return record


def kafka_headers(record: Control | Block) -> tuple[tuple[str, bytes], ...]:
    """Headers for routing and for the answer to a poisoned frame, so that neither opens the value."""
    found: dict[str, object] = {"schema": MAJOR, "kind": kind_of(record)}
    if isinstance(record, Block):
        first = record.experiences[0]
        versions = [span.version for experience in record.experiences for span in experience.spans]
        found |= {"id": first.id, "group": record.group, "min_version": min(versions, default=-1)}
        found |= {"max_version": max(versions, default=-1), "key": first.key_id or None}
    else:
        issued = getattr(record, "issued", None)
        for name in ("id", "group", "run"):
            found[name] = getattr(record, name, None)
        found["group"] = found["group"] or getattr(issued, "group", None)
        if isinstance(record, Feedback):
            with suppress(ValueError):
                found["group"] = group_of(record.ref)
        if (version := getattr(record, "version", None)) is not None:
            found |= {"min_version": version, "max_version": version}
    return tuple((name, str(value).encode()) for name, value in found.items() if value is not None)


def kind_of(record: Control | Block) -> str:
    """ "block", or the tag of a control record."""
    return "block" if isinstance(record, Block) else str(record.__struct_config__.tag)
