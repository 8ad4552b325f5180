"""One answer from the engine, as text that grows.

Guarantees: the text streamed while it grows is the text that is returned; a stop string ends the sampling and is not
streamed; every token that was sampled is kept with its logprob and version, streamed or not.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from actors.engines.engine import Chunk, Completion, Engine, Sampling
from actors.engines.trace import Start, begin, spans
from actors.gateway.answering.text import Detokenizer, StopStrings
from infra.store.images import Pixels
from schemas import Span

Decode = Callable[[Sequence[int]], str]
OnText = Callable[[str, Sequence[int], Sequence[float]], None]


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
        """Take what was sampled next."""
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


async def sample_whole(
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


async def sample(
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
