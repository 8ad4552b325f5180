"""Bulk of an experience: its tokens, logprobs and messages, either made here or lying in the sections of a frame.

Guarantee: bulk from a frame is decoded on first use, once; what is wrong with it raises BadFrame then, naming the
experience and the field. Arrays are read-only. However often runs repeat or overlap, an experience has at most
MAX_MESSAGES messages, and the experiences of a frame decode at most MAX_READ_BYTES of text together.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from schemas.bulk.sections import LOGPROBS, MAX_READ_BYTES, TEXT, TOKENS, WIDTHS, Ranges, Sections
from schemas.errors import BadFrame
from schemas.records import Message

MAX_MESSAGES = 16_384
MANY = 1024  # logprobs in a list; fewer are packed one by one
_TAGGED = np.dtype([("tag", "u1"), ("value", ">f8")])  # a float as msgpack has it
_FLOAT = 0xCB

Tokens = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]
TokenValues = Sequence[int] | npt.NDArray[np.integer[Any]]
LogprobValues = Sequence[float] | npt.NDArray[np.floating[Any]]

_encoder = msgspec.msgpack.Encoder()
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
        """Prompt and response token ids."""
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
        """The conversation as text."""
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

    def extra_sizes(self) -> Mapping[str, int]:
        """Bytes of each of `extra_sections`, decompressing nothing."""
        if self.extras is not None or self.sections is None:
            return {name: len(raw) for name, (_, raw) in self.extra_sections().items()}
        columns = zip(self.sections.columns[len(WIDTHS) :], self.ranges[len(WIDTHS) :], strict=True)
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

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self.tokens, self.logprobs, self.messages, self.owner, dict(self.extra_sections())))


def _restore(
    tokens: Tokens, logprobs: Logprobs, messages: tuple[Message, ...], owner: str, extras: dict[str, tuple[int, bytes]]
) -> Bulk:
    bulk = Bulk.made(tokens, logprobs, messages, owner)
    bulk.extras = extras
    return bulk


def logprobs_fault(logprobs: Logprobs) -> str | None:
    """Fault of logprobs, which must be finite and at most 0, or None."""
    if not logprobs.size or (np.maximum.reduce(logprobs) <= 0 and np.minimum.reduce(logprobs) > -np.inf):
        return None
    position = int(np.argmax(~((logprobs <= 0) & (logprobs > -np.inf))))
    return f"got {logprobs[position]} at {position}, expected finite values of at most 0"


def token_array(tokens: TokenValues) -> Tokens:
    """A copy as uint32, never wrapped around."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens: got {tokens.dtype} {tokens.shape}, expected integers of one dimension")
        if tokens.dtype != np.uint32 and tokens.size and not 0 <= tokens.min() <= tokens.max() <= 0xFFFFFFFF:
            raise ValueError(f"tokens: got {tokens.min()} to {tokens.max()}, expected 0 to 2**32 - 1")
        ids: Tokens = tokens.astype(np.uint32)
    else:
        try:
            ids = np.frombuffer(struct.pack(f"{len(tokens)}I", *tokens), np.uint32)  # three times faster than numpy
        except struct.error as error:
            raise ValueError(f"tokens: {error}") from error
    return ids


def logprob_array(logprobs: LogprobValues) -> Logprobs:
    """A copy as float32."""
    if not isinstance(logprobs, np.ndarray):
        try:
            found = _as_floats(logprobs) if len(logprobs) >= MANY and isinstance(logprobs, list) else None
            return np.frombuffer(struct.pack(f"{len(logprobs)}f", *logprobs), np.float32) if found is None else found
        except (struct.error, OverflowError) as error:
            raise ValueError(f"logprobs: {error}") from error
    if logprobs.ndim != 1 or logprobs.dtype.kind != "f":
        raise ValueError(f"logprobs: got {logprobs.dtype} {logprobs.shape}, expected floats of one dimension")
    return logprobs.astype(np.float32)


def _as_floats(values: list[float]) -> Logprobs | None:
    """A list as float32 by way of msgpack, for thousands of values in half the time; None where not all are floats.

    >>> _as_floats([-0.5, -1.0])
    array([-0.5, -1. ], dtype=float32)
    >>> _as_floats([-0.5, -1]) is None
    True
    """
    try:
        raw = _encoder.encode(values)
    except (TypeError, ValueError, OverflowError):
        return None
    tagged = np.frombuffer(raw[len(raw) % _TAGGED.itemsize :], _TAGGED)
    if len(tagged) != len(values) or (tagged["tag"] != _FLOAT).any():
        return None
    with np.errstate(over="ignore"):  # a number outside float32 becomes infinite, and is refused as such
        return tagged["value"].astype(np.float32)
