"""A request while it is served, and the sampling of its choices."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from actors.engines.engine import Engine, Sampling
from actors.gateway.access.concurrency import TakenSlots
from actors.gateway.access.keys import ApiKey
from actors.gateway.answering.conversation import spelled, written
from actors.gateway.answering.parsing import AnswerParser, OwnPieces, Parsed, ParsedPieces, SampledText
from actors.gateway.answering.requests import ParsedRequest
from actors.gateway.answering.sample import Decode, Growing, OnText, SampledAnswer, sample, sample_whole
from infra.store.images import Pixels
from schemas import Message

Watch = Callable[[int], OnText]  # gives the listener of a choice


class InFlight(msgspec.Struct, kw_only=True):
    """One request while it is served.

    place: for its answers. request: as the client asked. key: that asked. group: of its answers, in the log. session:
    "" where the client named none. answer_ids: one for each choice. rendered: the prompt as the template writes it.
    tokens: of the prompt as sampled from, prefix included. prefix: tokens that every answer is made to begin with.
    turn: earlier turns that these tokens go on from exactly. sampling: the same for all choices. trial: the version on
    trial, -1 where none is or the request was not drawn for it. subject: the user whose key it is sealed under, "" for
    none. parser: reads calls and thoughts. images: of the prompt, ready for the engine. reason: why it does not go on
    from earlier turns. growing: one for each choice, None for one that is sampled whole. answers: of choices that
    ended, by index. failed: by the engine. read: what choices say, once it was asked for. began_ns: by this machine's
    clock.
    """

    place: TakenSlots
    request: ParsedRequest
    key: ApiKey
    group: str
    session: str
    answer_ids: list[str]
    rendered: list[int]
    tokens: list[int]
    prefix: list[int]
    turn: int
    sampling: Sampling
    trial: int
    subject: str
    parser: AnswerParser
    images: tuple[Pixels, ...] = ()
    reason: str = ""
    growing: list[Growing | None] = []
    answers: list[SampledAnswer] = []
    failed: bool = False
    read: dict[int, Parsed] = {}
    began_ns: int = msgspec.field(default_factory=time.time_ns)

    @property
    def num_sampled(self) -> int:
        """Tokens of all choices."""
        return sum([len(answer.tokens) for answer in self.answers])

    def parsed(self, index: int) -> Parsed:
        """Thought, words and calls of a choice that has ended."""
        if index not in self.read:
            answer = self.answers[index]
            seen = len(answer.tokens) - answer.stopped
            written = self._written(answer.text, answer.tokens[:seen])
            self.read[index] = self.parser.parse(written) if self._is_parsed else Parsed(said=written.text)
        return self.read[index]

    def said(self, index: int) -> Message:
        """The same as a message in the one spelling that answers of every model have, so that it can be compared."""
        parsed = self.parsed(index)
        return Message(role="assistant", content=written(spelled(parsed.thought, parsed.said), parsed.calls))

    def pieces(self) -> ParsedPieces:
        """A reader of a choice that is being sampled."""
        return self.parser.pieces(self._written("", ())) if self._is_parsed else OwnPieces(None, ())

    @property
    def _is_parsed(self) -> bool:
        """False for a bare text that is continued, and for JSON that must match a schema."""
        return self.request.prompt.chat is not None and not self.request.json_schema

    def _written(self, text: str, tokens: Sequence[int]) -> SampledText:
        request = self.request
        return SampledText(
            prompt=self.rendered,
            tokens=tokens,
            text=request.force + text,
            stops=request.stops,
            tools=request.prompt.tools,
            force=request.force,
        )


async def sample_choices(engine: Engine, decode: Decode, in_flight: InFlight, watch: Watch | None) -> None:
    """Sample all choices into `in_flight`; cancelled, what there is stays in its `growing`."""
    request = in_flight.request
    in_flight.growing = [_growing(decode, in_flight, index, watch) for index in range(request.choices)]
    if request.choices == 1:
        in_flight.answers = [await _choice(engine, decode, in_flight, 0)]
        return
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_choice(engine, decode, in_flight, index)) for index in range(request.choices)]
    in_flight.answers = [task.result() for task in tasks]


def _growing(decode: Decode, in_flight: InFlight, index: int, watch: Watch | None) -> Growing | None:
    if watch is None and not in_flight.request.stops:
        return None
    tell = watch(index) if watch is not None else _unheard
    return Growing(decode, in_flight.sampling, in_flight.request.stops, tell)


def _choice(engine: Engine, decode: Decode, in_flight: InFlight, index: int) -> Coroutine[Any, Any, SampledAnswer]:
    sampling, growing = in_flight.sampling, in_flight.growing[index]
    if sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index) & (2**63 - 1))
    if growing is None:
        return sample_whole(engine, decode, in_flight.tokens, sampling, in_flight.images)
    return sample(engine, growing, in_flight.tokens, sampling, in_flight.images)


def _unheard(piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    return
