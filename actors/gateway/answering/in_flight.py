"""A request while it is served, and the sampling of its choices, as text that grows.

Guarantees: the streamed text equals the returned text. A stop string ends the sampling and is not streamed. Every sampled token
is kept with its logprob and version, streamed or not.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from actors.engines.engine import Chunk, Completion, Engine, Sampling
from actors.engines.trace import Start, begin, spans
from actors.gateway.access.concurrency import TakenSlots
from actors.gateway.access.keys import ApiKey
from actors.gateway.answering.conversation import spelled, written
from actors.gateway.answering.parsing import AnswerParser, OwnPieces, Parsed, ParsedPieces, SampledText
from actors.gateway.answering.requests import ParsedRequest
from actors.gateway.answering.text import Detokenizer, StopStrings
from infra.store.images import Pixels
from schemas import Message, Span

Decode = Callable[[Sequence[int]], str]
OnText = Callable[[str, Sequence[int], Sequence[float]], None]
Watch = Callable[[int], OnText]  # gives the listener of a choice


class SampledAnswer(msgspec.Struct):
    """What was sampled so far. text: without stop token and stop string. finish: "" while it runs.

    stopped: a stop token ended it. cut: a stop string did, so the text is shorter than the tokens. tokens: sampled
    ones. logprobs: one for each. starts: of runs of one version.
    """

    tokens: list[int] = []
    logprobs: list[float] = []
    starts: list[Start] = []
    text: str = ""
    finish: str = ""
    stopped: bool = False
    cut: bool = False

    def spans(self, sampling: Sampling) -> tuple[Span, ...]:
        """Runs of one version each, counted from the first sampled token."""
        return spans(self.starts, len(self.tokens), sampling)


class Growing:
    """An answer while it is sampled: takes chunks, tells text. may_stop: a stop string may end it before the engine does."""

    def __init__(self, decode: Decode, sampling: Sampling, stops: Sequence[str], tell: OnText) -> None:
        self.answer = SampledAnswer()
        self.found_stop = asyncio.Event()
        self._sampling = sampling
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._tell = tell
        self.may_stop = bool(stops)

    def take(self, chunk: Chunk) -> None:
        """Take the next sampled tokens."""
        answer = self.answer
        if self._stops.found:
            return
        begin(answer.starts, chunk.version, len(answer.tokens), chunk.kv)
        answer.tokens += chunk.tokens
        answer.logprobs += chunk.logprobs
        answer.stopped = chunk.tokens[-1] in self._sampling.stop
        seen = len(chunk.tokens) - answer.stopped
        piece = self._stops.add(self._detokenizer.add(chunk.tokens[:seen]))
        self._stream(piece, chunk.tokens[:seen], chunk.logprobs[:seen])
        if self._stops.found:
            answer.cut, answer.finish = True, "stop"
            self.found_stop.set()

    def finish(self) -> SampledAnswer:
        """The engine has ended: tell what was held."""
        answer = self.answer
        if not self._stops.found:
            held = self._stops.add(self._detokenizer.flush())
            self._stream(held if self._stops.found else held + self._stops.flush(), (), ())
            answer.cut = self._stops.found
            answer.finish = "stop" if answer.stopped or answer.cut else "length"
        return answer

    def _stream(self, piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.answer.text += piece
        if piece or tokens:
            self._tell(piece, tokens, logprobs)


class InFlight(msgspec.Struct, kw_only=True):
    """One request while it is served.

    place: for its answers. request: as the client asked. key: that asked. group: of its answers, in the log. session:
    "" where the client named none. answer_ids: one for each choice. rendered: the prompt as the template writes it.
    tokens: of the prompt as sampled from, prefix included. prefix: tokens that every answer is made to begin with.
    turn: earlier turns that these tokens go on from exactly. sampling: the same for all choices. trial: the version on
    trial, -1 where none is or the request was not drawn for it. subject: the user whose key it is sealed under, "" for
    none. parser: reads calls and thoughts. images: of the prompt, ready for the engine. reason: why it does not go on
    from earlier turns. growing: one for each choice, None for one that is sampled whole. answers: of choices that
    ended, by index. failed: by the engine. read: what choices say, once it was asked for.
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

    @property
    def num_sampled(self) -> int:
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
        return _sample_whole(engine, decode, in_flight.tokens, sampling, in_flight.images)
    return _sample(engine, growing, in_flight.tokens, sampling, in_flight.images)


def _unheard(piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    return


async def _sample_whole(
    engine: Engine, decode: Decode, prompt: Sequence[int], sampling: Sampling, images: Sequence[Pixels] = ()
) -> SampledAnswer:
    """An answer that is not streamed: the cheapest way, where there is no stop string to look for."""
    completion = await engine.generate(prompt, sampling, images=images)
    text_tokens = completion.tokens[:-1] if completion.stopped else completion.tokens
    return SampledAnswer(
        tokens=list(completion.tokens),
        logprobs=list(completion.logprobs),
        starts=[Start(span.version, span.start, span.kv) for span in completion.spans],
        text=decode(text_tokens),
        finish="stop" if completion.stopped else "length",
        stopped=completion.stopped,
    )


async def _sample(
    engine: Engine, growing: Growing, prompt: Sequence[int], sampling: Sampling, images: Sequence[Pixels] = ()
) -> SampledAnswer:
    """An answer that is streamed as it grows. Cancelling the call frees the engine's request; `growing` keeps the rest."""
    if not growing.may_stop:  # nothing but the engine ends it, so nothing has to watch
        await engine.generate(prompt, sampling, on_chunk=growing.take, images=images)
        return growing.finish()
    running: asyncio.Task[Completion] = asyncio.create_task(
        engine.generate(prompt, sampling, on_chunk=growing.take, images=images)
    )
    stop = asyncio.create_task(growing.found_stop.wait())
    try:
        await asyncio.wait((running, stop), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        stop.cancel()
        if not running.done():
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    return growing.finish()
