"""The address that programs call: one server for all episodes of an explorer; each episode has its own key.

It serves the gateway's APIs through the same code. A key gives access to its episode only, and only until the episode ends.

Guarantee: an episode leaves connections, memory and processors to the others: its unfinished bodies are bounded in number and
in bytes, its concurrent answers are bounded, and its requests to count tokens take turns with the others'.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.gateway.access.concurrency import LONG_AT_ONCE, FairQueue, ReleasingStream, to_its_end
from actors.gateway.answering.conversation import Conversation
from actors.gateway.apis.api import Api, Reply
from actors.gateway.apis.messages import read_messages
from actors.gateway.apis.responses import after
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError
from actors.gateway.http.app import APIS, COUNT_PATH, MODELS_PATH, ROUTES, Handler, api_at, model_list
from actors.gateway.http.body import BodyBudget, json_response, presented, read_body, replied, unless_gone
from actors.gateway.http.stream import EventStream
from actors.program.episode import ProgramEpisode
from infra.local.http_server import HttpBounds, bound, make_server, serve_on

MODEL = "policy"  # the name a program is given; any other will do
MAX_BODIES = 64  # of an episode that have not come whole
# Only memory bounds the requests of a user's own program; the task and the context bound its answers.
LIMITS = GatewayLimits(
    body_bytes=64 * 1024 * 1024,
    prompt_tokens=2**24,
    messages=65_536,
    tools=1024,
    max_tokens=2**24,
    choices=64,
    images=512,
)


EpisodeHandler = Callable[[Request, ProgramEpisode], Awaitable[Response]]


class ProgramSite:
    """listen: host:port, port 0 is any free one. Serves from `start` until the event loop ends."""

    def __init__(self, listen: str) -> None:
        self._listen = listen
        self._episodes: dict[str, ProgramEpisode] = {}
        self._bodies = BodyBudget(LIMITS.body_bytes, 4 * LIMITS.body_bytes, MAX_BODIES)
        self._counting = FairQueue(LONG_AT_ONCE)
        self._serving: asyncio.Task[None] | None = None
        self._starting, self._turns = asyncio.Lock(), asyncio.Lock()
        self.port = 0

    async def start(self) -> None:
        """Begin to serve; again is fine. Raises ConfigError."""
        async with self._starting:
            if self._serving is not None and not self._serving.done():
                return
            began = asyncio.Event()

            def listening(port: int) -> None:
                self.port = port
                began.set()

            sock = bound(self._listen, "explore.workflow.listen")
            server = make_server(self._app(), 1.0, HttpBounds())
            self._serving = asyncio.create_task(serve_on(server, sock, listening))
            await began.wait()

    @property
    def address(self) -> str:
        """Address for programs on this machine."""
        host = self._listen.rpartition(":")[0]
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{self.port}"

    def open(self, episode: ProgramEpisode) -> None:
        self._episodes[episode.key] = episode

    def close(self, episode: ProgramEpisode) -> None:
        self._episodes.pop(episode.key, None)

    def _app(self) -> Starlette:
        handlers: dict[str, EpisodeHandler] = {
            **{path: partial(self._answer, api=api) for path, api in APIS.items()},
            COUNT_PATH: self._count,
            MODELS_PATH: self._models,
        }
        return Starlette(
            routes=[
                Route(path, self._guarded(path, handler), methods=[ROUTES[path][0]])
                for path, handler in handlers.items()
            ]
        )

    def _guarded(self, path: str, handler: EpisodeHandler) -> Handler:
        async def work(request: Request) -> Response:
            return await handler(request, self._require(presented(request.headers).partition(" ")[2].strip()))

        async def handle(request: Request) -> Response:
            return await replied(work(request), api_at(path), path)

        return handle

    async def _answer(self, request: Request, episode: ProgramEpisode, api: Api) -> Response:
        body = await self._body(request, episode)
        async with self._turns:  # one request per round of the event loop, so that thousands at once do not block it
            await asyncio.sleep(0)
        parsed = api.read(body, LIMITS, lambda answer: episode.conversations.find(answer, ""))
        in_flight = await episode.begin(parsed)
        reply = Reply(in_flight=in_flight, decode=episode.decode, created=0, version=episode.version)

        def ended() -> None:
            if parsed.said:
                episode.conversations.put(reply.answer_ids[0], Conversation(messages=after(reply)))

        if parsed.stream:
            response = ReleasingStream(EventStream(episode, reply, api, ended).events())
            response.at_end.callback(episode.release, in_flight)
            return response
        try:
            await unless_gone(request, episode.answer(in_flight))
        finally:
            episode.release(in_flight)
        ended()
        return json_response(api.whole(reply))

    async def _body(self, request: Request, episode: ProgramEpisode) -> bytes:
        """The body of a request. Raises ApiError, also where the episode ended before the body did."""
        body = await read_body(request, LIMITS.body_bytes, self._bodies, episode.key)
        self._require(episode.key)
        return body

    def _require(self, key: str) -> ProgramEpisode:
        episode = self._episodes.get(key)
        if episode is None:
            raise ApiError(401, "no running episode has this key", code="invalid_api_key")
        return episode

    async def _count(self, request: Request, episode: ProgramEpisode) -> Response:
        parsed = read_messages(await self._body(request, episode), LIMITS)
        async with self._counting.turn(episode.key):
            return json_response({"input_tokens": await to_its_end(asyncio.to_thread(episode.count, parsed))})

    async def _models(self, request: Request, episode: ProgramEpisode) -> Response:
        return json_response(model_list([MODEL], episode.version))
