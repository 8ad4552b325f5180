"""Experience: one token sequence of an episode, with what was sampled by whom; its bulk is decoded on first use.

Guarantee: editing header fields (`msgspec.structs.replace`) never touches, decodes or copies tokens, logprobs or text.
"""

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypedDict, Unpack

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta as Bounds
from msgspec import structs

from schemas.bulk import MAX_MESSAGES, Bulk, Logprobs, Tokens, logprobs_fault
from schemas.errors import BadFrame
from schemas.fields import Count, End, Finite, Id, Lane, Meta, Number
from schemas.records import Message

MAX_TOKENS = 4 * 1024 * 1024
MAX_SPANS = 16_384
MAX_MEMBERS = 64
PAIR = "pair"  # key in meta of the two sides of a preference pair, see `schemas.pairs`
CHOSEN = "chosen"
REJECTED = "rejected"

TokenValues = Sequence[int] | npt.NDArray[np.integer[Any]]
LogprobValues = Sequence[float] | npt.NDArray[np.floating[Any]]

Version = Annotated[int, Bounds(ge=-1)]


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A run of sampled tokens, start to stop (exclusive) in `Experience.tokens`, by one policy at one temperature.

    version: -1 where no policy of ours sampled them (demonstrations). ratio: the recorded logprobs are the policy's own
    at that temperature, so an importance ratio exists.

    Example: Span(start=6, stop=11, version=12)
    """

    start: Count
    stop: Count
    version: Version
    temperature: Annotated[float, Bounds(ge=0, le=1e6)] = 1.0
    ratio: bool = True


class Score(msgspec.Struct, array_like=True, frozen=True):
    """One named verdict. at: index of the token it judges, None for the whole. version: of what judged, with the model
    behind "+" where there was one. input: hash of what was judged, "" where it is not kept. cost_usd: None where nothing
    is charged.

    Example: Score(name="exact", value=1.0)
    """

    name: Annotated[str, Bounds(min_length=1, max_length=256)]
    value: Finite
    at: Count | None = None
    version: str = ""
    input: str = ""
    cost_usd: Finite | None = None


class Experience(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One token sequence of an episode.

    id: see `schemas.ids`. group_size: episodes of the group. part, last: its place in the episode. origin: who made it.
    subject: whose data, key_id: the key it is sealed under; derivatives inherit both. sequence: issue order of the
    group, -1 unpaced. suite: name of the eval set, "" for rollouts. spans: what was sampled, sorted. stamps:
    "processor@version" of all that ran. meta: "answer" is the task's reference answer, "failure" why an episode failed.
    A read of tokens, logprobs or messages raises BadFrame where the frame's bulk is bad.

    Example: Experience(id="add-3745.2.0-7-0", group="add-3745.2", episode=7, group_size=16, num_tokens=11,
                        spans=(Span(start=6, stop=11, version=12),), reward=1.0, meta={"answer": "280"})
    """

    id: Id
    group: Id
    episode: Count
    group_size: Annotated[int, Bounds(ge=1, le=1_000_000)]
    num_tokens: Annotated[int, Bounds(ge=0, le=MAX_TOKENS)]
    spans: Annotated[tuple[Span, ...], Bounds(max_length=MAX_SPANS)]
    part: Count = 0
    last: bool = True
    end: End = "terminal"
    lane: Lane = "usual"
    origin: str = ""
    tenant: str = ""
    subject: str = ""
    key_id: str = ""
    attempt: Count = 0
    sequence: Number = -1
    suite: str = ""
    scores: Annotated[tuple[Score, ...], Bounds(max_length=4096)] = ()
    reward: Finite | None = None
    advantage: Finite | None = None
    priority: Finite = 1.0
    revision: Count = 0
    stamps: Annotated[tuple[str, ...], Bounds(max_length=1024)] = ()
    meta: Meta = {}
    # Not on the wire (nil in its place): the decoder attaches it, so that an edit of the header carries it along.
    bulk: Bulk | None = None

    @property
    def tokens(self) -> Tokens:
        """Token ids of prompt and response, uint32 [num_tokens], read-only."""
        return self.held().tokens

    @property
    def logprobs(self) -> Logprobs:
        """Behaviour logprobs of the sampled tokens (those of `spans`, in order), float32 [num_sampled], read-only."""
        return self.held().logprobs

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as text, the response last."""
        return self.held().messages

    @property
    def response(self) -> str:
        """Content of the last assistant message, "" if there is none."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message.content
        return ""

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return sum([span.stop - span.start for span in self.spans])

    @property
    def num_prompt(self) -> int:
        """Tokens before the first sampled one."""
        return self.spans[0].start if self.spans else self.num_tokens

    @property
    def min_version(self) -> int:
        """Oldest policy version that sampled a token, -1 without spans."""
        return min([span.version for span in self.spans], default=-1)

    @property
    def max_version(self) -> int:
        """Newest policy version that sampled a token, -1 without spans."""
        return max([span.version for span in self.spans], default=-1)

    @property
    def is_sealed(self) -> bool:
        """Whether the bulk came in sealed sections."""
        sections = None if self.bulk is None else self.bulk.sections
        return sections is not None and bool(sections.sealed_under)

    @property
    def lost(self) -> str:
        """Why the bulk can never be read again ("forgotten"), "" if it can."""
        sections = None if self.bulk is None else self.bulk.sections
        return "" if sections is None or sections.seal is None else sections.seal.fault

    @property
    def is_given(self) -> bool:
        """A demonstration or a side of a preference pair: taken as it is, neither scored nor compared."""
        return self.lane == "expert" or self.meta.get(PAIR) in (CHOSEN, REJECTED)

    def score(self, name: str) -> float | None:
        """Value of the newest score called `name`, None if nothing scored it so."""
        for score in reversed(self.scores):
            if score.name == name:
                return score.value
        return None

    def with_bulk(
        self,
        *,
        tokens: TokenValues | None = None,
        logprobs: LogprobValues | None = None,
        messages: Iterable[Message] | None = None,
        spans: tuple[Span, ...] | None = None,
    ) -> "Experience":
        """The same experience with other bulk (redaction); what is not given stays.

        Sections that this version does not know are dropped where the tokens change, since they may run along them.
        Raises ValueError for bulk that does not fit `spans`.
        """
        old = self.held()
        new_spans = self.spans if spans is None else spans
        bulk, num_tokens = _made_bulk(
            old.tokens if tokens is None else tokens,
            old.logprobs if logprobs is None else logprobs,
            old.messages if messages is None else messages,
            new_spans,
            self.id,
        )
        if tokens is None:
            bulk.extras = old.extra_sections()
        return structs.replace(self, bulk=bulk, spans=new_spans, num_tokens=num_tokens)

    def check_header(self) -> None:
        """Raises ValueError naming the first header field that could not be read back from the wire."""
        encode_headers((self,))

    def check_bulk(self) -> None:
        """Decodes and checks everything that is decoded on first use; raises BadFrame naming field and experience."""
        bulk = self.held()
        if bulk.lengths != (self.num_tokens, self.num_sampled):
            raise BadFrame(
                f"experience {self.id}: got {bulk.lengths[0]} tokens and {bulk.lengths[1]} logprobs, expected"
                f" {self.num_tokens} and {self.num_sampled} as in num_tokens and spans"
            )
        assert len(bulk.tokens) == self.num_tokens
        if (fault := logprobs_fault(bulk.logprobs)) is not None:
            raise BadFrame(f"experience {self.id}: logprobs: {fault}")
        assert isinstance(bulk.messages, tuple)
        bulk.extra_sections()

    def held(self) -> Bulk:
        """The bulk as such: for the codec and for carrying it to a derived experience."""
        if self.bulk is None:
            raise ValueError(f"experience {self.id} has no bulk: build it with make_experience")
        return self.bulk


Experiences = Annotated[tuple[Experience, ...], Bounds(min_length=1, max_length=MAX_MEMBERS)]


def _plain(value: object) -> object:
    """What msgspec does not know: bulk is not part of the header, numpy numbers are their Python ones."""
    if isinstance(value, Bulk):
        return None
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"got {type(value).__name__}, expected a plain value")


encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_headers_decoder = msgspec.msgpack.Decoder(Experiences)


def encode_headers(experiences: tuple[Experience, ...]) -> bytes:
    """Encoded headers, once they are known to decode; ValueError names the field that would not."""
    try:
        encoded = encoder.encode(experiences)
        _headers_decoder.decode(encoded)
    except msgspec.ValidationError as error:
        raise ValueError(f"group {experiences[0].group}: {with_field(str(error), '')}") from error
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"group {experiences[0].group}: {error}") from error
    for experience in experiences:
        num_sampled, bulk = checked_num_sampled(experience), experience.bulk
        if bulk is not None and bulk.lengths != (experience.num_tokens, num_sampled):
            raise ValueError(
                f"experience {experience.id}: num_tokens and spans say {experience.num_tokens} tokens, {num_sampled}"
                f" sampled, but its bulk has {bulk.lengths[0]} tokens and {bulk.lengths[1]} logprobs"
            )
    return encoded


def with_field(message: str, prefix: str) -> str:
    """msgspec's message about the experiences at path `prefix`, with the name of the field before its position."""
    match = re.search(re.escape("$" + prefix) + r"\[(?:\d+|\.\.\.)\]\[(\d+)\]", message)
    if match is None or int(match[1]) >= len(Experience.__struct_fields__):
        return message
    return f"{Experience.__struct_fields__[int(match[1])]}: {message}"


class Header(TypedDict, total=False):
    """Header fields that `make_experience` takes, named and typed as in Experience."""

    id: str
    group: str
    episode: int
    group_size: int
    spans: tuple[Span, ...]
    part: int
    last: bool
    end: End
    lane: Lane
    origin: str
    tenant: str
    subject: str
    key_id: str
    attempt: int
    sequence: int
    suite: str
    scores: tuple[Score, ...]
    reward: float | None
    advantage: float | None
    priority: float
    revision: int
    stamps: tuple[str, ...]
    meta: Meta


def make_experience(
    *, tokens: TokenValues, logprobs: LogprobValues, messages: Iterable[Message], **header: Unpack[Header]
) -> Experience:
    """An experience from what was just sampled; num_tokens is filled in.

    tokens: ids of prompt and response. logprobs: of the sampled tokens only, those of `spans` in their order.
    Raises ValueError for ids that do not fit 32 bits, logprobs that are not finite, above 0 or not one per sampled
    token, and spans that overlap or leave the tokens.
    """
    bulk, num_tokens = _made_bulk(tokens, logprobs, messages, header["spans"], header["id"])
    return Experience(num_tokens=num_tokens, bulk=bulk, **header)


def _made_bulk(
    tokens: TokenValues, logprobs: LogprobValues, messages: Iterable[Message], spans: Sequence[Span], owner: str
) -> tuple[Bulk, int]:
    """Checked bulk, and its number of tokens."""
    try:
        ids, values = _token_array(tokens), _logprob_array(logprobs)
        num_sampled = _num_sampled(spans, len(ids))
        if len(values) != num_sampled:
            raise ValueError(f"logprobs: got {len(values)}, expected {num_sampled} as in spans")
        if (fault := logprobs_fault(values)) is not None:
            raise ValueError(f"logprobs: {fault}")
        conversation = tuple(messages)
        if len(conversation) > MAX_MESSAGES or not all([isinstance(message, Message) for message in conversation]):
            raise ValueError(f"messages: got {len(conversation)}, expected at most {MAX_MESSAGES}, each a Message")
    except (TypeError, ValueError) as error:
        raise ValueError(f"experience {owner}: {error}") from error
    return Bulk.made(ids, values, conversation, owner), len(ids)


def _token_array(tokens: TokenValues) -> Tokens:
    """A copy as uint32, never wrapped around."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens: got {tokens.dtype} {tokens.shape}, expected integers of one dimension")
        if tokens.dtype != np.uint32 and tokens.size and not 0 <= tokens.min() <= tokens.max() <= 0xFFFFFFFF:
            raise ValueError(f"tokens: got {tokens.min()} to {tokens.max()}, expected 0 to 2**32 - 1")
        ids: Tokens = tokens.astype(np.uint32)
    else:
        try:
            ids = np.frombuffer(struct.pack(f"={len(tokens)}I", *tokens), np.uint32)  # three times faster than numpy
        except struct.error as error:
            raise ValueError(f"tokens: {error}") from error
    if len(ids) > MAX_TOKENS:
        raise ValueError(f"tokens: got {len(ids)}, expected at most {MAX_TOKENS}")
    return ids


def _logprob_array(logprobs: LogprobValues) -> Logprobs:
    """A copy as float32."""
    if not isinstance(logprobs, np.ndarray):
        try:
            return np.frombuffer(struct.pack(f"={len(logprobs)}f", *logprobs), np.float32)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"logprobs: {error}") from error
    if logprobs.ndim != 1 or logprobs.dtype.kind != "f":
        raise ValueError(f"logprobs: got {logprobs.dtype} {logprobs.shape}, expected floats of one dimension")
    return logprobs.astype(np.float32)


def _num_sampled(spans: Sequence[Span], num_tokens: int) -> int:
    """Tokens in spans, once these are known to be sorted, not empty, not overlapping and within the tokens."""
    end = sampled = 0
    for span in spans:
        start, stop = span.start, span.stop
        if not end <= start < stop <= num_tokens:
            raise ValueError(
                f"spans: got {start} to {stop}, expected a non-empty run within {end} and {num_tokens} (sorted, without"
                " overlap, inside the tokens)"
            )
        end = stop
        sampled += stop - start
    return sampled


def checked_num_sampled(experience: Experience) -> int:
    """Sampled tokens; ValueError names the header field that contradicts another, which types alone cannot tell."""
    try:
        for score in experience.scores:
            if score.at is not None and score.at >= experience.num_tokens:
                raise ValueError(f"scores: {score.name} is at token {score.at} of {experience.num_tokens}")
        return _num_sampled(experience.spans, experience.num_tokens)
    except ValueError as error:
        raise ValueError(f"experience {experience.id}: {error}") from error
