"""Servers of chat completions that the gateway benchmark measures: the gateway over an engine, and bare uvicorn.

python -m tests.bench._echo paced|echo|vllm|bare FOLDER
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from actors.engines.engine import Chunk, Completion, Engine, OnChunk, Sampling
from actors.engines.scripted import ScriptedEngine
from actors.gateway.access.keys import create_key
from actors.gateway.config import GatewayConfig, GatewayLimits
from actors.gateway.serve import run_gateway
from infra.cli.demo.char_model import build_char_model
from infra.local.http_server import forget_loaded, new_loop
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_tokenizer
from infra.observe.metrics import Metrics
from infra.roles.role import Role
from infra.settings.config import Floor
from infra.store.images import Pixels
from infra.store.memory import MemoryStore
from schemas import Span

TOKENS = 20
TOKEN_S = 0.01
STREAMS = 240
TEXT = "Eighty-two, of course"[:TOKENS]  # what the echo says, a token a letter
HEAD = {"id": "chatcmpl-0", "created": 0, "model": "m"}


class EchoEngine(ScriptedEngine):
    """Says the same tokens to every prompt: after `wait_s`, or to each listener of a stream a token at every step."""

    def __init__(self, tokens: Sequence[int], wait_s: float = 0.0) -> None:
        super().__init__(max_model_len=10**6)
        self._chunks = [Chunk((token,), (-0.5,), 0) for token in tokens]
        self._whole = Completion(
            tokens=tuple(tokens), logprobs=(-0.5,) * len(tokens), spans=(Span(0, len(tokens), 0),), stopped=False
        )
        self._wait_s = wait_s
        self._streams: dict[asyncio.Future[None], tuple[OnChunk, int]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        if on_chunk is None:
            await asyncio.sleep(self._wait_s)
            return self._whole
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams[done] = on_chunk, 0
        self._stepping = self._stepping or asyncio.create_task(self._step())
        try:
            await done
        finally:
            self._streams.pop(done, None)
        return self._whole

    async def _step(self) -> None:
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while self._streams:
            due_s = max(due_s + TOKEN_S, clock())
            await asyncio.sleep(due_s - clock())
            for done, (on_chunk, at) in list(self._streams.items()):
                on_chunk(self._chunks[at])
                self._streams[done] = on_chunk, at + 1
                if at + 1 == len(self._chunks):
                    del self._streams[done]
                    if not done.done():
                        done.set_result(None)
        self._stepping = None


async def serve_gateway(kind: str, folder: Path) -> None:
    """Keys, tokens, redaction and recording into a log in memory."""
    tokenizer, store = load_tokenizer(build_char_model(folder / "model", seed=0)), MemoryStore()
    _, key = create_key(store, tenant="bench", scopes=("serve", "admin"), train="yes", rpm=0, tpm=0)
    engine: Engine
    if kind == "vllm":
        from actors.engines.vllm.engine import VllmEngine

        engine = VllmEngine(model=str(folder / "model"))
    else:
        tokens = [tokenizer.encode(letter)[0] for letter in TEXT]
        engine = EchoEngine(tokens, wait_s=TOKENS * TOKEN_S if kind == "paced" else 0.0)
    log = Log(MemoryBus(), "bench")
    await log.create_topics(partitions=4, keep_ms=3_600_000)
    role = Role(
        floor=Floor(app="bench", folder=folder), log=log, store=store, metrics=Metrics("serve"),
        stop=asyncio.Event(), instance="serve/bench",
    )  # fmt: skip
    limits = GatewayLimits(concurrency=2 * STREAMS)
    config = GatewayConfig(listen="127.0.0.1:0", train_on="consented", limits=limits)
    await run_gateway(role, config, engine, tokenizer, reads_feedback=True, listening=lambda port: ready(port, key))


class Bare:
    """An ASGI function that reads the request as JSON, asks the echo and writes the answer; no keys, no tokens, no record."""

    def __init__(self) -> None:
        self._engine = EchoEngine(range(len(TEXT)))

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if msgspec.json.decode(body).get("stream"):
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            async for piece in self._pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        completion = await self._engine.generate((), Sampling(max_tokens=TOKENS))
        message = {"role": "assistant", "content": "".join(TEXT[token] for token in completion.tokens)}
        answer = msgspec.json.encode({**HEAD, "choices": [{"index": 0, "message": message, "finish_reason": "length"}]})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _pieces(self) -> AsyncIterator[bytes]:
        said: asyncio.Queue[Chunk | None] = asyncio.Queue()
        sampling = asyncio.create_task(self._engine.generate((), Sampling(max_tokens=TOKENS), on_chunk=said.put_nowait))
        sampling.add_done_callback(lambda _: said.put_nowait(None))
        while (chunk := await said.get()) is not None:
            delta = {"content": "".join(TEXT[token] for token in chunk.tokens)}
            event = msgspec.json.encode({**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
            yield b"data: " + event + b"\n\n"
        yield b"data: [DONE]\n\n"


async def serve_bare() -> None:
    server = uvicorn.Server(
        uvicorn.Config(Bare(), port=0, access_log=False, log_config=None, lifespan="off", ws="none")
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn sets no event
        await asyncio.sleep(0.01)
    ready(server.servers[0].sockets[0].getsockname()[1], "")
    await serving


def ready(port: int, key: str) -> None:
    forget_loaded()
    print(json.dumps({"port": port, "key": key}), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve_bare() if sys.argv[1] == "bare" else serve_gateway(sys.argv[1], Path(sys.argv[2])))
