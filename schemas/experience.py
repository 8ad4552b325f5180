"""Experience: a token sequence of an episode, with its sampled tokens and their versions. Its bulk is decoded on first use.

Guarantee: editing header fields (`msgspec.structs.replace`) never decodes or copies tokens, logprobs or text.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypedDict, Unpack

import msgspec
import numpy as np
from msgspec import Meta as Bounds
from msgspec import structs

from schemas.bulk import (
    MAX_MESSAGES,
    Bulk,
    Logprobs,
    LogprobValues,
    Tokens,
    TokenValues,
    logprob_array,
    logprobs_fault,
    token_array,
)
from schemas.errors import BadFrame
from schemas.fields import (
    Count,
    Edit,
    End,
    Finite,
    Id,
    Join,
    Kind,
    Lane,
    Meta,
    Number,
    Score,
    Span,
    Stretch,
    Weight,
    num_sampled,
)
from schemas.records import Message

MAX_TOKENS = 4 * 1024 * 1024
MAX_SPANS = 16_384
MAX_MEMBERS = 256
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_MEMBERS_BYTES = MAX_HEADER_BYTES - 64 * 1024  # the rest of a block's header is where its members lie


class Experience(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One token sequence of an episode.

    id: id, see `schemas.ids`. group: group whose episodes are compared. episode: number of the episode in the group.
    group_size: episodes of the group. part: number of the sequence in the episode. last: True for the episode's last sequence.
    num_tokens: tokens of prompt and answer. end: end of the episode; "truncated" by a limit, "failed" without a result. origin:
    source of the task or request. lane: lane that trains it. attempt: issue number of the task, from 0. revision: number of
    revisions by late feedback; the newest counts. tenant: gateway customer, "" for none. subject: pseudonym of the user, "" for
    none. key_id: key that seals it; derived experiences inherit subject and key_id. sequence: issue order of the group, -1 if
    unpaced. suite: name of the eval suite, "" for rollouts. spans: sampled spans, sorted. stamps: "processor@version" of each
    step that ran. meta: the user's own data, from task to batch; headrace reads a key only if an option names it. scores:
    verdicts. reward: reward, None until it is computed. advantage: advantage of the sequence, None until it is computed.
    priority: relative priority of the draw. bulk: encoded tokens, logprobs and messages; reading them raises BadFrame if the
    bytes are bad. kind: "answer" is scored and compared; a demonstration and the two sides of a preference pair are not; a
    "withdrawal" revokes an older revision. task: id of the task, "" for none. answer: reference answer, None for none.
    held_out: True if it is never trained. turn: number of messages before the answer in a gateway session, else -1. carried:
    earlier answers of the session that the prompt continues token by token. trial: as in `Closure.trial`. parent: id of the
    experience that it was made from. failure: cause of a failed episode. truncated: cause of a truncation. part_reason: reason
    why this part or turn does not continue the previous. edit: users' correction of the answer, only within collect. weight:
    factor of its loss terms, only within the batch chain. retrained: number of retrainings by late feedback. notes: notes of
    the workflow (`Session.note`). advantages: advantages of consecutive runs of tokens up to the last token, if turns have
    their own. `advantage` is then their mean over the sampled tokens, and a change of it by a batch step is added to each. ()
    for one advantage. ends_session: True if the client ended the session. join: turns of its session that were closed together.

    Example: Experience(id="add-3745.2.0-7-0", group="add-3745.2", episode=7, group_size=16, num_tokens=11, answer="280",
                        spans=(Span(start=6, stop=11, version=12),), reward=1.0, meta={"level": "easy"})
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
    kind: Kind = "answer"
    task: str = ""
    answer: str | None = None
    held_out: bool = False
    turn: Number = -1
    carried: Count = 0
    trial: Number = -1
    parent: str = ""
    failure: str = ""
    truncated: str = ""
    part_reason: str = ""
    edit: Edit | None = None
    weight: Weight = 1.0
    retrained: Count = 0
    notes: Meta = {}
    advantages: Annotated[tuple[Stretch, ...], Bounds(max_length=4096)] = ()
    ends_session: bool = False
    join: Join | None = None

    @property
    def tokens(self) -> Tokens:
        """Token ids of prompt and response, uint32 [num_tokens], read-only."""
        return self.held().tokens

    @property
    def logprobs(self) -> Logprobs:
        """Behaviour logprobs of the sampled tokens, in the order of `spans`, float32 [num_sampled], read-only."""
        return self.held().logprobs

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as text, the response last."""
        return self.held().messages

    @property
    def response(self) -> str:
        """Content of the last assistant message, "" if there is none."""
        return next((message.content for message in reversed(self.messages) if message.role == "assistant"), "")

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return sum([span.stop - span.start for span in self.spans])

    @property
    def num_prompt(self) -> int:
        """Number of tokens before the first sampled token."""
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
        """True if the bulk came in sealed sections."""
        sections = None if self.bulk is None else self.bulk.sections
        return sections is not None and bool(sections.sealed_under)

    @property
    def lost(self) -> str:
        """Why the bulk can never be read again ("forgotten"), "" if it can."""
        sections = None if self.bulk is None else self.bulk.sections
        return "" if sections is None or sections.seal is None else sections.seal.fault

    @property
    def is_given(self) -> bool:
        """True for a demonstration or a side of a preference pair, which are neither scored nor compared."""
        return self.lane == "expert" or self.kind in ("demonstration", "chosen", "rejected")

    def reference(self, name: str = "answer") -> str | int | float | bool | None:
        """Reference answer: the task's under "answer", else the entry of that name in the user's `meta`."""
        return self.answer if name == "answer" else self.meta.get(name)

    def score(self, name: str) -> float | None:
        """Value of the newest score called `name`, None if nothing scored it so."""
        return next((score.value for score in reversed(self.scores) if score.name == name), None)

    def with_bulk(
        self,
        *,
        tokens: TokenValues | None = None,
        logprobs: LogprobValues | None = None,
        messages: Iterable[Message] | None = None,
        spans: tuple[Span, ...] | None = None,
    ) -> "Experience":
        """Return the experience with other bulk (redaction); omitted parts stay.

        If the tokens change, sections unknown to this version are dropped, because they may run along the tokens. Raises
        ValueError for bulk that does not fit `spans`.
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
        logprobs = bulk.logprobs  # those of a frame are checked by this read
        if bulk.sections is None and (fault := logprobs_fault(logprobs)) is not None:
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
    except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"group {experiences[0].group}: {with_field(str(error), '')}") from error
    if len(encoded) > MAX_MEMBERS_BYTES:
        raise ValueError(
            f"group {experiences[0].group}: got headers of {len(encoded)} bytes, expected at most {MAX_MEMBERS_BYTES}:"
            " put fewer experiences in the block, or less in meta, notes and answer"
        )
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
    kind: Kind
    task: str
    answer: str | None
    held_out: bool
    turn: int
    carried: int
    trial: int
    parent: str
    failure: str
    truncated: str
    part_reason: str
    edit: Edit | None
    weight: float
    retrained: int
    notes: Meta
    advantages: tuple[Stretch, ...]
    ends_session: bool
    join: Join | None


def make_experience(
    *, tokens: TokenValues, logprobs: LogprobValues, messages: Iterable[Message], **header: Unpack[Header]
) -> Experience:
    """Make an experience from sampled tokens; num_tokens is computed.

    tokens: ids of prompt and response. logprobs: logprobs of the sampled tokens, in the order of `spans`. Raises ValueError for
    ids beyond 32 bits, logprobs that are not finite, above 0 or not one per sampled token, and spans that overlap or leave the
    tokens.
    """
    bulk, num_tokens = _made_bulk(tokens, logprobs, messages, header["spans"], header["id"])
    return Experience(num_tokens=num_tokens, bulk=bulk, **header)


def _made_bulk(
    tokens: TokenValues, logprobs: LogprobValues, messages: Iterable[Message], spans: Sequence[Span], owner: str
) -> tuple[Bulk, int]:
    try:
        ids, values = token_array(tokens), logprob_array(logprobs)
        if len(ids) > MAX_TOKENS:
            raise ValueError(f"tokens: got {len(ids)}, expected at most {MAX_TOKENS}")
        expected = num_sampled(spans, len(ids))
        if len(values) != expected:
            raise ValueError(f"logprobs: got {len(values)}, expected {expected} as in spans")
        if (fault := logprobs_fault(values)) is not None:
            raise ValueError(f"logprobs: {fault}")
        conversation = tuple(messages)
        if len(conversation) > MAX_MESSAGES or not all([isinstance(message, Message) for message in conversation]):
            raise ValueError(f"messages: got {len(conversation)}, expected at most {MAX_MESSAGES}, each a Message")
    except (TypeError, ValueError) as error:
        raise ValueError(f"experience {owner}: {error}") from error
    return Bulk.made(ids, values, tuple([_whole(message) for message in conversation]), owner), len(ids)


def _whole(message: Message) -> Message:
    """The message, with lone surrogates, which UTF-8 cannot encode and tools and tasks write, as U+FFFD."""
    if message.content.isascii():
        return message
    try:
        message.content.encode()
    except UnicodeEncodeError:
        text = message.content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return structs.replace(message, content=text)
    return message


def checked_num_sampled(experience: Experience) -> int:
    """Sampled tokens; ValueError names the header field that contradicts another, which types alone cannot tell."""
    try:
        for score in experience.scores:
            if score.at is not None and score.at >= experience.num_tokens:
                raise ValueError(f"scores: {score.name} is at token {score.at} of {experience.num_tokens}")
        return num_sampled(experience.spans, experience.num_tokens)
    except ValueError as error:
        raise ValueError(f"experience {experience.id}: {error}") from error


Side = Literal["chosen", "rejected"]
CHOSEN: Side = "chosen"
REJECTED: Side = "rejected"


def pair_side(experience: Experience) -> Side | None:
    """CHOSEN, REJECTED, or None where it is not a side of a pair."""
    kind = experience.kind
    return kind if kind in (CHOSEN, REJECTED) else None


def pair_fault(experiences: Sequence[Experience]) -> str:
    """Return the fault of a preference pair; "" if the members are a valid pair, or contain no side of a pair."""
    sides = sorted(pair_side(member) or "" for member in experiences)
    if not any(sides):
        return ""
    if sides != [CHOSEN, REJECTED]:
        return "half a pair"
    first, other = experiences
    num_prompt = first.num_prompt
    if num_prompt != other.num_prompt or not np.array_equal(first.tokens[:num_prompt], other.tokens[:num_prompt]):
        return "pair with different prompts"
    if np.array_equal(first.tokens[num_prompt:], other.tokens[num_prompt:]):
        return "pair with equal sides"
    return ""


WITHDRAWN = "withdrawn"  # the reason it is refused with


def emptied(experience: Experience) -> Experience:
    """The experience without its content. Nothing is left to seal, so it stays readable after the key is destroyed."""
    bare = experience.with_bulk(tokens=(), logprobs=(), messages=(), spans=())
    return structs.replace(
        bare, key_id="", scores=(), reward=None, advantage=None, advantages=(), answer=None, edit=None, notes={}, meta={},
        join=None,
    )  # fmt: skip


def withdrawal_of(experience: Experience, *, lane: Lane, revision: int) -> Experience:
    """Record that takes `experience` back from `lane`, where older revisions than this lie."""
    return structs.replace(emptied(experience), lane=lane, revision=revision, kind="withdrawal")


def is_withdrawal(experience: Experience) -> bool:
    """True if this record takes an experience back, and holds nothing itself."""
    return experience.kind == "withdrawal"
