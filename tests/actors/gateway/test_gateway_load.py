"""What one client does to another: while one does its worst, the answers of another come about as fast as before."""

import asyncio
import base64
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.gateway.config import GatewayLimits
from infra.local.http_server import new_loop
from infra.store.images import MAX_SCANS
from tests.actors.gateway.gateway_rig import ASK, VOCABULARY, serving
from tests.actors.gateway.test_gateway_images import Eyes
from tests.actors.rig import Looking
from tests.infra.test_images import scans

SPAWN = multiprocessing.get_context("spawn")
ASKED = 60
FLOOR_S = 0.1  # what a busy machine may add to an answer by itself
PROMPT = "Hi" * 2050  # long enough to be tokenized in a thread, as the prompts of others


def says_x(prompt: tuple[int, ...]) -> list[int]:
    return [120] * 64


def serve(pipe: Any) -> None:
    """A gateway in a process of its own, until it is killed."""

    async def main() -> None:
        sampler = Looking(kept=0, num_vocabulary=VOCABULARY, max_model_len=8192, script=says_x, token_s=0.001)
        limits = GatewayLimits(prompt_tokens=100_000, body_s=5.0)
        async with serving(Path(tempfile.mkdtemp()), sampler, tokenizer=Eyes(), limits=limits) as served:
            keys = await served.new_key(rpm=600), await served.new_key()
            pipe.send((served.port, *keys))
            await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def head(path: str, key: str, num_bytes: int, header: str = "x-other: 1") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{header}\r\ncontent-length: {num_bytes}"
    return f"{lines}\r\n\r\n".encode()


async def sends(port: int, data: bytes) -> None:
    """Sends something, and then neither reads nor sends more, until it is closed."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    with suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
        await writer.wait_closed()


async def pipelined(port: int, key: str, number: int) -> None:
    await sends(port, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 200_000)


async def bodies_without_key(port: int, key: str, number: int) -> None:
    await sends(port, head("/v1/feedback", "", 2**20, "x-other: anything") + b"x" * (2**20 - 1))


async def bodies(port: int, key: str, number: int) -> None:
    await sends(port, head("/v1/chat/completions", key, 2**20) + b"x" * (2**20 - 1))


async def silence(port: int, key: str, number: int) -> None:
    await sends(port, b"")


async def unread(port: int, key: str, number: int) -> None:
    body = json.dumps(
        {"model": "m", "messages": ASK, "n": 8, "stream": True, "logprobs": True, "max_tokens": 512}
    ).encode()
    await sends(port, head("/v1/chat/completions", key, len(body)) + body)


async def asks(port: int, key: str, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as http:
        headers = {"authorization": f"Bearer {key}"}
        await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"model": "m", **body}, headers=headers)


async def choices(port: int, key: str, number: int) -> None:
    await asks(port, key, {"messages": [{"role": "user", "content": "x"}], "n": 8, "max_tokens": 64})


async def long_prompts(port: int, key: str, number: int) -> None:
    await asks(port, key, {"messages": [{"role": "user", "content": "x" * 500_000}]})


async def schemas(port: int, key: str, number: int) -> None:
    schema = {"type": "object", "properties": {f"p{number}{at}": {"type": "string"} for at in range(60)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await asks(port, key, {"messages": [{"role": "user", "content": "x"}], "response_format": form, "max_tokens": 4})


async def pictures(port: int, key: str, number: int) -> None:
    """The slowest picture that the gateway decodes, and every second time one that it refuses."""
    picture = scans(arithmetic=True, count=4000 if number % 2 else MAX_SCANS)
    url = f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
    await asks(
        port, key, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    )


ATTACKS: list[tuple[Callable[[int, str, int], Coroutine[Any, Any, None]], int]] = [
    (pipelined, 4), (bodies_without_key, 100), (bodies, 100), (silence, 500), (unread, 60), (choices, 32), (long_prompts, 64),
    (schemas, 24), (pictures, 32),
]  # fmt: skip


def attack(name: str, port: int, key: str) -> None:
    """Does it again and again, so many at once, until it is killed."""

    async def again(act: Callable[[int, str, int], Coroutine[Any, Any, None]], number: int) -> None:
        while True:
            number += 1000
            with suppress(OSError, httpx.HTTPError):
                await act(port, key, number)
            await asyncio.sleep(0.05)

    async def main() -> None:
        act, count = next(found for found in ATTACKS if found[0].__name__ == name)
        await asyncio.gather(*(again(act, number) for number in range(count)))

    asyncio.run(main())


def p95_s(port: int, key: str) -> float:
    """The 95th percentile of the time to a short answer; all are given, one after the other."""
    took = []
    with httpx.Client(timeout=60, trust_env=False, verify=False, headers={"authorization": f"Bearer {key}"}) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
        for _ in range(ASKED):
            began_s = time.perf_counter()
            answer = http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
            took.append(time.perf_counter() - began_s)
            assert answer.status_code == 200, answer.text
    return sorted(took)[int(0.95 * ASKED)]


@pytest.mark.full
@pytest.mark.parametrize("name", [act.__name__ for act, _ in ATTACKS])
def test_while_one_client_does_its_worst_another_is_served_about_as_fast(name: str) -> None:
    ours, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port, greedy, other = ours.recv()
    attacker = SPAWN.Process(target=attack, args=(name, port, greedy), daemon=True)
    try:
        alone_s = p95_s(port, other)
        attacker.start()
        time.sleep(2.0)
        assert attacker.is_alive()
        during_s = p95_s(port, other)
        assert during_s <= 3 * max(alone_s, FLOOR_S), f"alone {alone_s:.3f} s, beside {name} {during_s:.3f} s"
    finally:
        for process in (attacker, server):
            if process.is_alive():
                process.kill()
