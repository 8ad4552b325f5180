"""A chat completion as bare as Python serves one: on uvicorn, with the loop and the parser that the gateway has.

It reads the request as JSON, asks the same engine and writes the same JSON; it knows no keys, tokenizes nothing, redacts and
records nothing. As an ASGI function, or as a route of Starlette, as most would write it.

python -m infra.cli.bench.peers.bare_http asgi|starlette
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from actors.engines.engine import Chunk, Sampling
from infra.cli.bench.serving.echo import EchoEngine
from infra.cli.bench.serving.http_asking import ECHO, PATH, TOKENS

_HEAD = {"id": "chatcmpl-0", "created": 0, "model": "m", "system_fingerprint": "v0"}
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream")]


class Bare:
    """The answers, and an ASGI function that gives them."""

    def __init__(self) -> None:
        self._engine = EchoEngine(range(len(ECHO)))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if msgspec.json.decode(body).get("stream"):
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            async for piece in self.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            answer = await self.whole()
            headers = [*_JSON, (b"content-length", b"%d" % len(answer))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})

    async def route(self, request: Request) -> Response:
        """The same for Starlette."""
        if msgspec.json.decode(await request.body()).get("stream"):
            return StreamingResponse(self.pieces(), media_type="text/event-stream")
        return Response(await self.whole(), media_type="application/json")

    async def whole(self) -> bytes:
        """An answer in one piece."""
        completion = await self._engine.generate((), Sampling(max_tokens=TOKENS))
        return whole("".join(ECHO[token] for token in completion.tokens), len(completion.tokens))

    async def pieces(self) -> AsyncIterator[bytes]:
        """One event a token, each as it comes."""
        said: asyncio.Queue[Chunk | None] = asyncio.Queue()
        sampling = asyncio.create_task(self._engine.generate((), Sampling(max_tokens=TOKENS), on_chunk=said.put_nowait))
        sampling.add_done_callback(lambda _: said.put_nowait(None))
        yield event({"role": "assistant", "content": ""})
        while (chunk := await said.get()) is not None:
            yield event({"content": "".join(ECHO[token] for token in chunk.tokens)})
        yield event({}, "length") + b"data: [DONE]\n\n"


def whole(text: str, num_tokens: int) -> bytes:
    """A chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "length",
        "logprobs": None,
        "answer_id": "0",
    }
    usage = {"prompt_tokens": 0, "completion_tokens": num_tokens, "total_tokens": num_tokens}
    return msgspec.json.encode({**_HEAD, "object": "chat.completion", "choices": [choice], "usage": usage})


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    """An event of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    body = msgspec.json.encode({**_HEAD, "object": "chat.completion.chunk", "choices": [choice]})
    return b"data: " + body + b"\n\n"


async def _serve(kind: str) -> None:
    from actors.gateway.http.listen import forget_loaded

    bare = Bare()
    app = Starlette(routes=[Route(PATH, bare.route, methods=["POST"])]) if kind == "starlette" else bare
    settings = uvicorn.Config(app, port=0, access_log=False, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(settings)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn sets no event)
        await asyncio.sleep(0.01)
    forget_loaded()
    port = server.servers[0].sockets[0].getsockname()[1]
    print(json.dumps({"port": port, "key": ""}), flush=True)
    await serving


if __name__ == "__main__":
    from actors.gateway.http.listen import new_loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(sys.argv[1]))
