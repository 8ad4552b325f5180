"""A request while it is served, and the sampling of its choices, as text that grows.

Guarantees: the streamed text equals the returned text. A stop string ends the sampling and is not streamed. Every sampled token
is kept with its logprob and version, streamed or not.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from actors.engines.engine import Chunk, Completion, Engine, Sampling
from actors.engines.trace import Trace
from actors.gateway.access.concurrency import TakenSlots
from actors.gateway.access.keys import ApiKey
from actors.gateway.answering.conversation import spelled, written
from actors.gateway.answering.parsing import AnswerParser, ForeignPieces, OwnPieces, Parsed, SampledText
from actors.gateway.answering.requests import ParsedRequest
from actors.gateway.answering.text import Detokenizer, StopStrings
from infra.roles.process import unless
from infra.store.images import Pixels
from schemas import Message

Decode = Callable[[Sequence[int]], str]
OnText = Callable[[str, Sequence[int], Sequence[float]], None]
Watch = Callable[[int], OnText]  # gives the listener of a choice


class SampledAnswer(msgspec.Struct, frozen=True):
    """An answer so far. text: without stop token and stop string. finish: "" while it runs. cut: a stop string ended
    it, so the text is shorter than the tokens.
    """

    completion: Completion
    text: str = ""
    finish: str = ""
    cut: bool = False


NOT_SAMPLED = SampledAnswer(Completion(tokens=(), logprobs=(), spans=(), stopped=False))


class Growing:
    """An answer in progress: takes chunks, passes text on. may_stop: a stop string may end it before the engine does."""

    def __init__(self, decode: Decode, sampling: Sampling, stops: Sequence[str], tell: OnText) -> None:
        self.found_stop = asyncio.Event()
        self._trace = Trace(sampling)
        self._text = ""
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._tell = tell
        self.may_stop = bool(stops)

    def take(self, chunk: Chunk) -> None:
        """Take the next sampled tokens."""
        if self._stops.found:
            return
        for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=True):
            self._trace.add(token, logprob, chunk.version, chunk.kv)
        seen = len(chunk.tokens) - (chunk.tokens[-1] in self._trace.sampling.stop)
        piece = self._stops.add(self._detokenizer.add(chunk.tokens[:seen]))
        self._stream(piece, chunk.tokens[:seen], chunk.logprobs[:seen])
        if self._stops.found:
            self.found_stop.set()

    def answer(self, *, ended: bool) -> SampledAnswer:
        """The answer so far. ended: the engine has ended, so pass held text on."""
        if ended and not self._stops.found:
            held = self._stops.add(self._detokenizer.flush())
            self._stream(held if self._stops.found else held + self._stops.flush(), (), ())
        completion, cut = self._trace.completion(), self._stops.found
        finish = "stop" if cut or (ended and completion.stopped) else "length" if ended else ""
        return SampledAnswer(completion, self._text, finish, cut)

    def _stream(self, piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._text += piece
        if piece or tokens:
            self._tell(piece, tokens, logprobs)


class InFlight(msgspec.Struct, kw_only=True):
    """One request while it is served.

    group: of its answers, in the log. session: "" where the client named none. rendered: the prompt as the template writes it.
    tokens: of the sampled prompt, with the prefix. prefix: tokens that every answer must begin with. turn: number of earlier
    turns whose exact tokens these continue; reason: why there are none. trial: the version on trial, -1 if none is or the
    request was not drawn for it. subject: user whose key seals it, "" for none. growing: one for each choice, empty if it
    neither streams nor has stop strings. failed: the engine failed. read: parsed choices, by index.
    """

    place: TakenSlots
    request: ParsedRequest
    key: ApiKey
    group: str
    session: str = ""
    answer_ids: list[str]
    rendered: list[int]
    tokens: list[int]
    prefix: list[int]
    sampling: Sampling
    parser: AnswerParser
    turn: int = 0
    trial: int = -1
    subject: str = ""
    images: tuple[Pixels, ...] = ()
    reason: str = ""
    growing: list[Growing] = []
    answers: list[SampledAnswer] = []
    failed: bool = False
    read: dict[int, Parsed] = {}

    @property
    def num_sampled(self) -> int:
        answers = self.answers or [growing.answer(ended=False) for growing in self.growing]
        return sum(len(answer.completion.tokens) for answer in answers)

    def parsed(self, index: int) -> Parsed:
        """Thought, words and calls of a choice that has ended."""
        if index not in self.read:
            written = self._written(self.answers[index].text, self.seen(index)[0])
            self.read[index] = self.parser.parse(written) if self._is_parsed else Parsed(said=written.text)
        return self.read[index]

    def seen(self, index: int) -> tuple[Sequence[int], Sequence[float]]:
        """Tokens of a choice that has ended, without its stop token, and their logprobs."""
        completion = self.answers[index].completion
        seen = len(completion.tokens) - completion.stopped
        return completion.tokens[:seen], completion.logprobs[:seen]

    def said(self, index: int) -> Message:
        """The same as a message in the one spelling that answers of every model have, so that it can be compared."""
        parsed = self.parsed(index)
        return Message(role="assistant", content=written(spelled(parsed.thought, parsed.said), parsed.calls))

    def pieces(self) -> OwnPieces | ForeignPieces:
        return self.parser.pieces(self._written("", ())) if self._is_parsed else OwnPieces(None, ())

    @property
    def _is_parsed(self) -> bool:
        """False for JSON that must match a schema."""
        return not self.request.json_schema

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
    """Sample all choices into `in_flight`. If it is cancelled, partial answers stay in its `growing`."""
    request = in_flight.request
    if watch is not None or request.stops:
        in_flight.growing = [
            Growing(decode, in_flight.sampling, request.stops, watch(index) if watch is not None else _unheard)
            for index in range(request.choices)
        ]
    if request.choices == 1:
        in_flight.answers = [await _choice(engine, decode, in_flight, 0)]
        return
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_choice(engine, decode, in_flight, index)) for index in range(request.choices)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    in_flight.answers = [task.result() for task in tasks]


async def _choice(engine: Engine, decode: Decode, in_flight: InFlight, index: int) -> SampledAnswer:
    sampling = in_flight.sampling
    if sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index) & (2**63 - 1))
    generate = partial(engine.generate, in_flight.tokens, sampling, images=in_flight.images)
    if not in_flight.growing:  # the cheapest way, where nobody listens and there is no stop string to look for
        completion = await generate()
        text = decode(completion.tokens[:-1] if completion.stopped else completion.tokens)
        return SampledAnswer(completion, text, "stop" if completion.stopped else "length")
    growing = in_flight.growing[index]
    if growing.may_stop:
        with suppress(_StopFound):
            await unless(growing.found_stop.wait(), generate(on_chunk=growing.take), _StopFound)
    else:  # nothing but the engine ends it, so nothing has to watch
        await generate(on_chunk=growing.take)
    return growing.answer(ended=True)


class _StopFound(Exception): ...


def _unheard(piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    return
