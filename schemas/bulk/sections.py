"""Sections of a block: named columns of items, each compressed once, decompressed on first use and then shared.

Guarantee: nothing is decompressed before its declared size is known to be within `MAX_SECTION_BYTES` and to equal what
the header says, and a section that is not opened is never decompressed, nor, where it is sealed, deciphered. Sections of
unknown names are kept as they came.
"""

import threading
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec
import zstandard
from msgspec import Meta

from schemas.errors import BadFrame, Sealed
from schemas.records import Message

MAX_SECTION_BYTES = 16 * 1024 * 1024
MAX_TAKEN_BYTES = 256 * 1024 * 1024  # by all experiences of a block: runs may overlap, so sections do not bound it
MAX_READ_BYTES = 2 * MAX_SECTION_BYTES  # of text, by runs that are decoded: those we write do not overlap
MAX_SECTIONS = 16
MAX_BOUNDS = 2048

WIDTHS = {"tokens": 4, "logprobs": 4, "text": 1}  # bytes per item of the columns every block begins with
TOKENS, LOGPROBS, TEXT = range(len(WIDTHS))

Index = Annotated[int, Meta(ge=0, le=MAX_SECTION_BYTES)]
Ranges = Annotated[tuple[Index, ...], Meta(max_length=MAX_BOUNDS)]  # start, stop, start, stop, …: runs of items


class Column(msgspec.Struct, array_like=True, frozen=True):
    """Description of one section in the header.

    name: of the section. width: bytes per item. items: how many.

    Example: Column(name="tokens", width=4, items=176)
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    width: Annotated[int, Meta(ge=1, le=4096)]
    items: Index


class Seal(Protocol):
    """A key that section bodies are sealed under, or what is left of one (see `infra.store.seal`).

    key_id: its name, in the header of all it seals. fault: why it opens nothing, "" if it does.
    """

    @property
    def key_id(self) -> str: ...

    @property
    def fault(self) -> str: ...

    def close(self, name: str, body: bytes) -> bytes:
        """A compressed section body, sealed. Raises Sealed where the key is gone."""

    def open(self, name: str, body: bytes | memoryview) -> bytes:
        """The compressed body again. Raises Sealed where the key is gone, BadFrame for what it did not seal."""


FindSeal = Callable[[str], Seal]  # by key_id; may block


class _Codecs(threading.local):
    """zstd contexts, one pair per thread: they are costly to make and must not be shared by threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=2 * MAX_SECTION_BYTES)


_codecs = _Codecs()


def compress(raw: bytes) -> bytes:
    """One section body: a zstd level-1 frame with its size and checksum in it."""
    return _codecs.compressor.compress(raw)


def decompress(body: bytes | memoryview, column: Column) -> bytes:
    """Raw bytes of a section; raises BadFrame, before it allocates anything, for a size that is not `column`'s."""
    expected = column.width * column.items
    try:
        declared = zstandard.get_frame_parameters(body)
        if declared.content_size != expected or not declared.has_checksum or declared.dict_id:
            raise BadFrame(
                f"section {column.name}: got a zstd frame of {declared.content_size} bytes (checksum:"
                f" {declared.has_checksum}), expected {expected} as in the header, with checksum and no dictionary"
            )
        raw = _codecs.decompressor.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadFrame(f"section {column.name}: {error}") from error
    if len(raw) != expected:
        raise BadFrame(f"section {column.name}: got {len(raw)} bytes, expected {expected} as in the header")
    return raw


class Sections:
    """The sections of one frame, shared by the experiences decoded from it.

    columns, bodies: aligned, tokens, logprobs and text first. tail: lengths and bodies as they came. num_members:
    experiences the frame held. sealed_under: key id, "" for plain ones. seal: what opens them, None where the reader looked
    for no key. texts: messages decoded so far, by their bytes' bounds.
    """

    __slots__ = (
        "_raw", "bodies", "columns", "logprobs_sound", "num_members", "read_bytes", "seal", "sealed_under", "tail",
        "taken_bytes", "texts",
    )  # fmt: skip

    def __init__(
        self,
        columns: tuple[Column, ...],
        bodies: tuple[memoryview, ...],
        tail: memoryview,
        num_members: int,
        sealed_under: str = "",
        seal: Seal | None = None,
    ) -> None:
        self.columns = columns
        self.bodies = bodies
        self.tail = tail
        self.num_members = num_members
        self.sealed_under = sealed_under
        self.seal = seal
        self.taken_bytes = self.read_bytes = 0
        self.logprobs_sound: bool | None = None
        self.texts: dict[tuple[int, int], tuple[Message, ...]] = {}
        self._raw: list[bytes | None] = [None] * len(columns)

    def raw(self, at: int) -> bytes:
        """All bytes of the section in column `at`, decompressed on the first call."""
        found = self._raw[at]
        if found is None:
            body: bytes | memoryview = self.bodies[at]
            if self.sealed_under:
                if self.seal is None:
                    raise Sealed(f"sealed under {self.sealed_under}, and this reader looks for no keys")
                body = self.seal.open(self.columns[at].name, body)
            found = self._raw[at] = decompress(body, self.columns[at])
        return found

    def cut(self, at: int, bounds: Ranges) -> bytes:
        """Bytes of the runs of column `at`, one after the other; BadFrame for runs that leave it."""
        raw, column = self.raw(at), self.columns[at]
        chunks = []
        pairs = iter(bounds)
        for start in pairs:
            stop = next(pairs, -1)
            if not start <= stop <= column.items:
                raise BadFrame(f"section {column.name}: run {start} to {stop}, expected within {column.items}")
            self.taken_bytes += (stop - start) * column.width
            if self.taken_bytes > MAX_TAKEN_BYTES:
                raise BadFrame(f"section {column.name}: experiences take over {MAX_TAKEN_BYTES} bytes in all")
            chunks.append(raw[start * column.width : stop * column.width])
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
