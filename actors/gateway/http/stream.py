"""A response in pieces: the events of a stream while its choices are sampled.

Guarantees: every piece a client gets was sampled; the last events name the finish reasons, then the usage, then
[DONE]; an engine that fails in the middle ends the stream with an error event. A tool call is sent once it is whole.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from actors.gateway.answering.conversation import OPEN
from actors.gateway.answering.sample import OnText
from actors.gateway.answering.serving import Gateway, InFlight
from actors.gateway.answering.text import StopStrings
from actors.gateway.http import responses
from actors.gateway.http.errors import ApiError
from actors.gateway.http.responses import Envelope


class EventStream:
    """Events of one streamed response."""

    def __init__(self, gateway: Gateway, in_flight: InFlight, envelope: Envelope) -> None:
        self._gateway = gateway
        self._in_flight = in_flight
        self._envelope = envelope
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._tools = bool(in_flight.request.prompt.tools)
        self._guards = [StopStrings((OPEN,) if self._tools else ()) for _ in range(in_flight.request.choices)]
        self._streamed = ["" for _ in range(in_flight.request.choices)]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Until the end; closing it ends the sampling."""
        request = self._in_flight.request
        task = asyncio.create_task(self._sample())
        try:
            if self._envelope.chat:
                for index in range(request.choices):
                    opening = responses.chat_delta(index, {"role": "assistant", "content": ""})
                    yield self._envelope.event([opening])
            while (event := await self._events.get()) is not None:
                yield event
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            self._gateway.release(self._in_flight)

    async def _sample(self) -> None:
        try:
            await self._gateway.answer(self._in_flight, watch=self._watch)
            for index in range(self._in_flight.request.choices):
                self._finish(index)
            if self._in_flight.request.usage:
                used = responses.usage(len(self._in_flight.tokens), self._in_flight.num_sampled)
                self._events.put_nowait(self._envelope.event([], used))
            self._events.put_nowait(responses.DONE)
        except ApiError as error:
            self._events.put_nowait(b"data: " + error.body() + b"\n\n")
        except Exception as error:
            hidden = ApiError(500, "the server had an error while answering", kind="server_error")
            self._events.put_nowait(b"data: " + hidden.body() + b"\n\n")
            raise error
        finally:
            self._events.put_nowait(None)

    def _watch(self, index: int) -> OnText:
        def tell(piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            if self._in_flight.request.force:
                return  # the answer is a tool call, sent when it is whole
            streamed = self._guards[index].add(piece)
            if streamed or (tokens and self._in_flight.request.logprobs):
                self._send(index, streamed, tokens, logprobs)

        return tell

    def _send(self, index: int, text: str, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()) -> None:
        request, decode = self._in_flight.request, self._gateway.tokenizer.decode
        self._streamed[index] += text
        if self._envelope.chat:
            found = responses.chat_logprobs(request, decode, tokens, logprobs)
            choice = responses.chat_delta(index, {"content": text}, logprobs=found)
        else:
            found = responses.text_logprobs(request, decode, tokens, logprobs)
            choice = responses.text_choice(self._envelope, index, text, None, found)
        self._events.put_nowait(self._envelope.event([choice]))

    def _finish(self, index: int) -> None:
        finish = self._in_flight.answers[index].finish
        if not self._envelope.chat:
            choice = responses.text_choice(self._envelope, index, "", finish, None)
            self._events.put_nowait(self._envelope.event([choice]))
            return
        text, calls = self._in_flight.content(index, self._tools)
        if calls:
            finish = "tool_calls"
            deltas = responses.call_deltas(self._envelope, index, calls)
            self._events.put_nowait(self._envelope.event([responses.chat_delta(index, deltas)]))
        elif text[len(self._streamed[index]) :]:
            self._send(index, text[len(self._streamed[index]) :])
        last = responses.chat_delta(index, {}, finish) | {"answer_id": self._envelope.answers[index]}
        self._events.put_nowait(self._envelope.event([last]))
