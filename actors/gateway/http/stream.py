"""A response in pieces: the events of a stream while its choices are sampled.

Guarantees: every piece a client gets was sampled; thoughts are kept apart from the answer; the last events say why
each choice ended; an engine that fails in the middle ends the stream with an error event. A tool call is sent once it is
whole. An event goes out at once if the stream was still for GATHER_S; events that follow sooner are written together, so that a
fast stream costs one write for several tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from actors.gateway.answering.in_flight import OnText
from actors.gateway.answering.parsing import Parsed
from actors.gateway.apis.api import Answerer, Api, Reply
from actors.gateway.errors import ApiError, server_error

GATHER_S = 0.02


class EventStream:
    """Events of one streamed response, as its API spells them. ended: called when every choice has ended, before the
    last event. began: called at the first token.
    """

    def __init__(
        self,
        answerer: Answerer,
        reply: Reply,
        api: Api,
        ended: Callable[[], None],
        began: Callable[[], None] | None = None,
    ) -> None:
        self._answerer = answerer
        self._reply = reply
        self._ended = ended
        self._began = began
        self._error_event = api.error_event
        self._writer = api.events(reply)
        self._waiting: list[bytes] = []  # events that were not written yet
        self._came = asyncio.Event()
        self._ends = False
        self._pieces = [reply.in_flight.pieces() for _ in range(reply.request.choices)]
        self._sent = [Parsed() for _ in range(reply.request.choices)]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events until the end; closing the generator ends the sampling."""
        task = asyncio.create_task(self._sample())
        try:
            for opening in self._writer.begin():
                yield opening
            clock = asyncio.get_running_loop().time
            while True:
                await self._came.wait()
                self._came.clear()
                ends, waiting, self._waiting = self._ends, self._waiting, []
                wrote_s = clock()
                if waiting:
                    yield b"".join(waiting)
                if ends:
                    return
                if (left_s := wrote_s + GATHER_S - clock()) > 0:
                    await asyncio.sleep(left_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            self._answerer.release(self._reply.in_flight)

    async def _sample(self) -> None:
        try:
            await self._answerer.answer(self._reply.in_flight, watch=self._watch)
            self._ended()
            for index, sent in enumerate(self._sent):
                self._send(self._writer.finish(index, _rest(self._reply.parsed(index), sent)))
            self._send(self._writer.end())
        except ApiError as error:
            self._send([self._error_event(error)])
        except Exception as error:
            self._send([self._error_event(server_error())])
            raise error
        finally:
            self._ends = True
            self._came.set()

    def _watch(self, index: int) -> OnText:
        request = self._reply.request

        def tell(piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            if self._began is not None and tokens:
                self._began()
                self._began = None
            if request.force:
                return  # the answer is a tool call, sent when it is whole
            thought, said = self._pieces[index].add(piece, tokens)
            more = Parsed(thought if request.shows_thoughts else "", said)
            if more.thought or said or (tokens and request.logprobs):
                sent = self._sent[index]
                self._sent[index] = Parsed(sent.thought + more.thought, sent.said + said)
                self._send(self._writer.text(index, more, tokens, logprobs))

        return tell

    def _send(self, events: Sequence[bytes]) -> None:
        self._waiting += events
        self._came.set()


def _rest(whole: Parsed, sent: Parsed) -> Parsed:
    return Parsed(_left(whole.thought, sent.thought), _left(whole.said, sent.said), whole.calls)


def _left(whole: str, sent: str) -> str:
    """The rest of `whole` behind `sent`. Parsers may leave out blanks at the end that were sent before.

    >>> _left("Look, a bird", "\\nLook, ")
    ' a bird'
    """
    if whole.startswith(sent):
        return whole[len(sent) :]
    bare, core = whole.lstrip(), sent.strip()
    return bare[len(core) :] if bare.startswith(core) else ""
