"""Bulk of an experience: its tokens, logprobs and messages, either made here or lying in the sections of a frame.

Sections are named columns of items, each compressed once, decompressed on first use and then shared; sections of unknown names
stay unchanged.

Guarantees: bulk from a frame is decoded on first use, once; invalid bulk raises BadFrame then, with the names of the
experience and the field. Arrays are read-only. Nothing is decompressed before its declared size is known to be within
MAX_SECTION_BYTES and to equal the size in the header; a section that is not opened is neither decompressed nor deciphered.
However often runs repeat or overlap, an experience has at most MAX_MESSAGES messages, and the experiences of a frame decode
at most MAX_READ_BYTES of text together.
"""

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
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
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    width: Annotated[int, Meta(ge=1, le=4096)]
    items: Index


class Seal(Protocol):
    """A key that section bodies are sealed under, or an unusable key with its fault (see `infra.store.seal`).

    fault: why it opens nothing, "" if it does.
    """

    @property
    def fault(self) -> str: ...

    def close(self, name: str, body: bytes) -> bytes:
        """A compressed section body, sealed. Raises Sealed where the key is gone."""

    def open(self, name: str, body: bytes | memoryview) -> bytes:
        """The compressed body again. Raises Sealed where the key is gone, BadFrame for a body that it did not seal."""


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
    experiences the frame held. sealed_under: key id, "" for plain ones. seal: key that opens them, None where the reader looked
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


MAX_MESSAGES = 16_384

Tokens = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]
TokenValues = Sequence[int] | npt.NDArray[np.integer[Any]]
LogprobValues = Sequence[float] | npt.NDArray[np.floating[Any]]

_messages_decoder = msgspec.msgpack.Decoder(Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)])


class Bulk:
    """Tokens uint32 [num_tokens], logprobs float32 [num_sampled] and messages of one experience.

    sections, ranges: where they lie (ranges aligned with sections.columns); None and () for bulk made in this process.
    lengths: number of tokens and of logprobs. extras: other sections carried along: name to (bytes per item, bytes).
    owner: id for error messages.
    """

    __slots__ = ("_logprobs", "_messages", "_tokens", "extras", "lengths", "owner", "ranges", "sections")

    sections: Sections | None
    _tokens: Tokens | None
    _logprobs: Logprobs | None
    _messages: tuple[Message, ...] | None

    def __init__(
        self, sections: Sections | None, ranges: Sequence[Ranges], lengths: tuple[int, int], owner: str
    ) -> None:
        self.sections = sections
        self.ranges = ranges
        self.lengths = lengths
        self.owner = owner
        self.extras: Mapping[str, tuple[int, bytes]] | None = None
        self._tokens = self._logprobs = self._messages = None

    @classmethod
    def made(cls, tokens: Tokens, logprobs: Logprobs, messages: tuple[Message, ...], owner: str) -> "Bulk":
        """Bulk of values that the caller has checked; the arrays become read-only."""
        bulk = cls(None, (), (len(tokens), len(logprobs)), owner)
        for values in (tokens, logprobs):
            if values.flags.writeable:  # to set it costs more than to ask
                values.flags.writeable = False
        bulk._tokens, bulk._logprobs, bulk._messages = tokens, logprobs, messages
        return bulk

    @property
    def tokens(self) -> Tokens:
        found = self._tokens
        if found is None:
            found = self._tokens = np.frombuffer(self._items(TOKENS), "<u4")
        return found

    @property
    def logprobs(self) -> Logprobs:
        """Logprobs of the sampled tokens, in their order; finite and at most 0."""
        found = self._logprobs
        if found is None:
            sections = self.sections
            assert sections is not None
            found = np.frombuffer(self._items(LOGPROBS), "<f4")
            if sections.logprobs_sound is None:
                sections.logprobs_sound = logprobs_fault(np.frombuffer(sections.raw(LOGPROBS), "<f4")) is None
            if not sections.logprobs_sound and (fault := logprobs_fault(found)) is not None:
                raise BadFrame(f"experience {self.owner}: logprobs: {fault}")
            self._logprobs = found
        return found

    @property
    def messages(self) -> tuple[Message, ...]:
        found = self._messages
        if found is None:
            made: list[Message] = []
            pairs = iter(self.ranges[TEXT])
            for start in pairs:
                made += self._messages_at(start, next(pairs, -1))
                if len(made) > MAX_MESSAGES:
                    raise BadFrame(f"experience {self.owner}: text: got over {MAX_MESSAGES} messages")
            found = self._messages = tuple(made)
        return found

    def _items(self, at: int) -> bytes:
        assert self.sections is not None
        found = self.sections.cut(at, self.ranges[at])
        if len(found) != 4 * self.lengths[at]:
            raise BadFrame(
                f"experience {self.owner}: {self.sections.columns[at].name}: got {len(found) // 4}, expected"
                f" {self.lengths[at]} as in the header"
            )
        return found

    def _messages_at(self, start: int, stop: int) -> tuple[Message, ...]:
        """Messages of one run of the text section; those of a shared prompt are decoded once."""
        assert self.sections is not None
        found = self.sections.texts.get((start, stop))
        if found is None:
            self.sections.read_bytes += max(stop - start, 0)
            if self.sections.read_bytes > MAX_READ_BYTES:
                raise BadFrame(f"experience {self.owner}: text: runs of over {MAX_READ_BYTES} bytes are read in all")
            try:
                found = _messages_decoder.decode(self.sections.cut(TEXT, (start, stop)))
            except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
                raise BadFrame(f"experience {self.owner}: text: {error}") from error
            self.sections.texts[start, stop] = found
        return found

    def extra_sections(self) -> Mapping[str, tuple[int, bytes]]:
        """Sections this version does not know, of this experience: name to (bytes per item, bytes)."""
        if self.extras is None:
            extras: dict[str, tuple[int, bytes]] = {}
            if self.sections is not None:
                for at in range(len(WIDTHS), len(self.ranges)):
                    column = self.sections.columns[at]
                    extras[column.name] = (column.width, self.sections.cut(at, self.ranges[at]))
            self.extras = extras
        return self.extras

    def sizes(self) -> Mapping[str, int]:
        """Bytes of the experience in each section, decompressing nothing."""
        if self.sections is None:
            text = msgspec.msgpack.encode(self.messages)
            known = zip(WIDTHS, (4 * self.lengths[TOKENS], 4 * self.lengths[LOGPROBS], len(text)), strict=True)
            return dict(known) | {name: len(raw) for name, (_, raw) in self.extra_sections().items()}
        columns = zip(self.sections.columns, self.ranges, strict=True)
        return {column.name: column.width * (sum(runs[1::2]) - sum(runs[::2])) for column, runs in columns}

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Bulk):
            return NotImplemented
        return (
            np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.logprobs, other.logprobs)
            and self.messages == other.messages
            and self.extra_sections() == other.extra_sections()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<bulk of {self.owner}>"


def logprobs_fault(logprobs: Logprobs) -> str | None:
    """Fault of logprobs, which must be finite and at most 0, or None."""
    if not logprobs.size or (np.maximum.reduce(logprobs) <= 0 and np.minimum.reduce(logprobs) > -np.inf):
        return None
    position = int(np.argmax(~((logprobs <= 0) & (logprobs > -np.inf))))
    return f"got {logprobs[position]} at {position}, expected finite values of at most 0"


def token_array(tokens: TokenValues) -> Tokens:
    """A copy as uint32, never wrapped around."""
    if not isinstance(tokens, np.ndarray):
        try:
            return np.frombuffer(struct.pack(f"{len(tokens)}I", *tokens), np.uint32)  # three times faster than numpy
        except struct.error as error:
            raise ValueError(f"tokens: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens: got {tokens.dtype} {tokens.shape}, expected integers of one dimension")
    if tokens.dtype != np.uint32 and tokens.size and not 0 <= tokens.min() <= tokens.max() <= 0xFFFFFFFF:
        raise ValueError(f"tokens: got {tokens.min()} to {tokens.max()}, expected 0 to 2**32 - 1")
    return tokens.astype(np.uint32)


def logprob_array(logprobs: LogprobValues) -> Logprobs:
    """A copy as float32."""
    if not isinstance(logprobs, np.ndarray):
        try:
            return np.frombuffer(struct.pack(f"{len(logprobs)}f", *logprobs), np.float32)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"logprobs: {error}") from error
    if logprobs.ndim != 1 or logprobs.dtype.kind != "f":
        raise ValueError(f"logprobs: got {logprobs.dtype} {logprobs.shape}, expected floats of one dimension")
    return logprobs.astype(np.float32)
