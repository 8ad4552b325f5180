"""An API that clients speak: how its requests are read, and how answers, events and errors are spelled in it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from actors.gateway.answering.conversation import Conversation
from actors.gateway.answering.in_flight import Decode, InFlight, Watch
from actors.gateway.answering.parsing import Parsed
from actors.gateway.answering.requests import ParsedRequest
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError

Recall = Callable[[str], Conversation | None]  # the conversation that ends with an answer, by the answer's id


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Content of an answer. created: seconds of the epoch. version: of the policy when the request began."""

    in_flight: InFlight
    decode: Decode
    created: int
    version: int

    @property
    def request(self) -> ParsedRequest:
        return self.in_flight.request

    @property
    def answer_ids(self) -> Sequence[str]:
        """The id of each choice, which feedback names."""
        return self.in_flight.answer_ids

    def parsed(self, index: int) -> Parsed:
        """The end of a choice, as its client sees it."""
        parsed = self.in_flight.parsed(index)
        return parsed if self.request.shows_thoughts else msgspec.structs.replace(parsed, thought="")

    def call_id(self, index: int, at: int) -> str:
        """The id of a tool call of a choice."""
        return f"call_{self.answer_ids[index].removeprefix('hr-')}_{at}"


class Answerer(Protocol):
    """A sampler of answers: the gateway, or an episode of a program."""

    async def answer(self, in_flight: InFlight, watch: Watch | None = None) -> None:
        """Sample all choices into `in_flight`. Raises ApiError. watch: gives the listener of a choice."""

    def release(self, in_flight: InFlight) -> None:
        """Give back its place; again is fine."""


class EventWriter(Protocol):
    """Spells the events of one streamed response, in their order. Each method returns whole events."""

    def begin(self) -> list[bytes]:
        """Events before the first token."""

    def text(self, index: int, more: Parsed, tokens: Sequence[int], logprobs: Sequence[float]) -> list[bytes]:
        """Events of a piece of a choice. tokens: the tokens of the piece."""

    def finish(self, index: int, rest: Parsed) -> list[bytes]:
        """Events at the end of a choice. rest: text that was held back, and calls."""

    def end(self) -> list[bytes]:
        """Events after all choices."""


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """One API.

    read: parses the body, given limits and the conversations known here. error: writes the body of a refusal. error_event:
    writes the last event of a stream that breaks off. openings: number of events before the first text of a stream, given the
    number of choices. whole: writes the body of a reply that is no stream. events: makes the writer of a stream's events.
    """

    read: Callable[[bytes, GatewayLimits, Recall], ParsedRequest]
    whole: Callable[[Reply], bytes]
    events: Callable[[Reply], EventWriter]
    error: Callable[[ApiError], bytes]
    error_event: Callable[[ApiError], bytes]
    openings: Callable[[int], int]


def named_event(kind: str, **fields: object) -> bytes:
    """One event of a stream whose events say their kind."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
