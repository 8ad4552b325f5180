"""A response in pieces: the events of a stream while its choices are sampled.

Guarantees: every piece a client gets was sampled; the last events say why each choice ended; an engine that fails in the
middle ends the stream with an error event. A tool call is sent once it is whole.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from actors.gateway.answering.conversation import OPEN
from actors.gateway.answering.sample import OnText
from actors.gateway.answering.text import StopStrings
from actors.gateway.apis.api import Answerer, Api, Reply
from actors.gateway.http.errors import ApiError


class EventStream:
    """Events of one streamed response, as its API spells them. ended: called when every choice has, before it is told."""

    def __init__(self, answerer: Answerer, reply: Reply, api: Api, ended: Callable[[], None]) -> None:
        self._answerer = answerer
        self._reply = reply
        self._ended = ended
        self._error_event = api.error_event
        self._writer = api.events(reply)
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        stops = (OPEN,) if reply.request.prompt.tools else ()
        self._guards = [StopStrings(stops) for _ in range(reply.request.choices)]
        self._num_streamed = [0] * reply.request.choices  # characters

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Until the end; closing it ends the sampling."""
        task = asyncio.create_task(self._sample())
        try:
            for opening in self._writer.begin():
                yield opening
            while (event := await self._events.get()) is not None:
                yield event
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            self._answerer.release(self._reply.in_flight)

    async def _sample(self) -> None:
        try:
            await self._answerer.answer(self._reply.in_flight, watch=self._watch)
            self._ended()
            for index, num_streamed in enumerate(self._num_streamed):
                text, calls = self._reply.content(index)
                self._send(self._writer.finish(index, "" if calls else text[num_streamed:], calls))
            self._send(self._writer.end())
        except ApiError as error:
            self._send([self._error_event(error)])
        except Exception as error:
            hidden = ApiError(500, "the server had an error while answering", kind="server_error")
            self._send([self._error_event(hidden)])
            raise error
        finally:
            self._events.put_nowait(None)

    def _watch(self, index: int) -> OnText:
        request = self._reply.request

        def tell(piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            if request.force:
                return  # the answer is a tool call, sent when it is whole
            text = self._guards[index].add(piece)
            if text or (tokens and request.logprobs):
                self._num_streamed[index] += len(text)
                self._send(self._writer.text(index, text, tokens, logprobs))

        return tell

    def _send(self, events: Sequence[bytes]) -> None:
        for event in events:
            self._events.put_nowait(event)
