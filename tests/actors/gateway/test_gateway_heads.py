"""Heads of requests that never end, are too long or are none: an error object, a counter, and nobody else notices."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from actors.gateway.config import GatewayLimits
from actors.gateway.http.heads import MAX_HEAD_BYTES
from tests.actors.gateway.gateway_rig import RunningGateway, engine, says, serving
from tests.actors.rig import until

LONG = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * (MAX_HEAD_BYTES + 1)
SHORT_S = 0.1
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def connection(served: RunningGateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()


async def told(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(size))


TOLD = [
    (LONG, 431, "request_too_large"),
    (HEALTH[:-4], 408, "timeout"),
    (b"\x16\x03\x01 hello\r\n\r\n", 400, "not_http"),
]


@pytest.mark.parametrize(
    ("before", "sent", "status", "code"),
    [*((before, *one) for before in (0, 1) for one in TOLD), (0, b"", 408, "timeout")],
    ids=[
        *(f"{what}, {when}" for when in ("at first", "on a kept connection") for what in ("too long", "slow", "odd")),
        "none",
    ],
)
def test_a_head_that_cannot_be_read_is_an_error_object_and_a_counter_and_the_connection_is_let_go(
    tmp_path: Path, before: int, sent: bytes, status: int, code: str
) -> None:
    async def check() -> None:
        async with (
            serving(tmp_path, limits=GatewayLimits(body_s=SHORT_S if code == "timeout" else 60.0)) as served,
            connection(served) as (reader, writer),
        ):
            for _ in range(before):
                writer.write(HEALTH)
                assert (await told(reader))[0] == 200
            writer.write(sent)
            found, answer = await told(reader)
            assert (found, answer["error"]["code"], answer["error"]["type"]) == (status, code, "invalid_request_error")
            assert await reader.read() == b""
            assert served.metrics.counters()[f"refused{{reason={code},route=}}"] == 1
            async with served.http() as http:
                assert (await http.get("/healthz")).status_code == 200

    asyncio.run(check())


@pytest.mark.parametrize("behind", [LONG, HEALTH[:-4]], ids=["too long", "never whole"])
def test_no_answer_is_cut_off_for_the_head_behind_it(tmp_path: Path, behind: bytes) -> None:
    async def check() -> None:
        sampler = engine(says("x" * 60), token_s=0.004)
        async with (
            serving(tmp_path, sampler, limits=GatewayLimits(body_s=SHORT_S)) as served,
            connection(served) as (reader, writer),
        ):
            key = served.key()
            await served.keys_read()
            body = json.dumps({"model": "m", "prompt": "Hi"}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: sampler.num_running == 1)
            writer.write(behind)
            status, answer = await told(reader)
            assert status == 200 and answer["choices"][0]["text"] == "x" * 60

    asyncio.run(check())


def test_a_body_in_chunks_that_grows_beyond_its_bound_is_refused_as_one_that_says_so(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, limits=GatewayLimits(body_bytes=2000)) as served:
            key = served.key()
            await served.keys_read()

            async def chunks() -> AsyncIterator[bytes]:
                for _ in range(30):
                    yield b"x" * 100

            async with served.http(key) as http:
                answer = await http.post("/v1/completions", content=chunks())
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    asyncio.run(check())


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
PIECE = 64 * 1024


def post(path: str, key: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n".encode()


async def pour(writer: asyncio.StreamWriter, piece: bytes, num_bytes: int) -> int:
    """Send a piece again and again; how much was taken before the other side closed."""
    sent = 0
    try:
        while sent < num_bytes:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    except (ConnectionError, OSError):
        pass
    return sent


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/feedback", "/healthz", "/no-such-thing"])
@pytest.mark.parametrize("known", [True, False], ids=["key", "no key"])
@pytest.mark.parametrize(
    "trailers", [b"x-a: 1\r\n" * 8192, b"x-a: " + b"1" * PIECE, b"1;" + b"e" * PIECE], ids=["many", "long", "extension"]
)
def test_what_stands_behind_a_body_is_neither_kept_nor_read_without_end(
    tmp_path: Path, path: str, known: bool, trailers: bytes
) -> None:
    async def check() -> None:
        async with (
            serving(tmp_path, limits=GatewayLimits(body_s=20.0)) as served,
            connection(served) as (reader, writer),
        ):
            key = served.key()
            await served.keys_read()
            writer.write(post(path, key if known else "nobody") + CHUNKED + b"0\r\n" * (trailers[:1] == b"x"))
            begun, piece = trailers[:4096], trailers[4096:]
            writer.write(begun)
            sent = await pour(writer, piece, 400 * PIECE)
            assert sent < 200 * PIECE, "it was read on and on"
            with suppress(ConnectionError):
                await reader.read()
            refused = served.metrics.counters()
            assert (
                sum(refused.get(f"refused{{reason={one},route=}}", 0) for one in ("trailers", "request_too_large")) == 1
            )

    asyncio.run(check())


def test_trailers_are_an_error_object_where_no_answer_has_begun_and_hold_no_place(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path) as served, connection(served) as (reader, writer):
            key = served.key()
            await served.keys_read()
            body = json.dumps({"model": "m", "prompt": "Hi"}).encode()
            chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n"
            writer.write(post("/v1/completions", key) + CHUNKED + chunk + b"0\r\nx-a: 1\r\n\r\n")
            status, answer = await told(reader)
            assert (status, answer["error"]["code"]) == (400, "trailers")
            assert await reader.read() == b""
            assert served.engine.num_running == 0
        assert not await served.experiences()

    asyncio.run(check())


def test_an_answer_is_whole_where_the_request_behind_it_has_trailers(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, engine(says("x" * 30), token_s=0.01)) as served:
            key = served.key()
            await served.keys_read()
            async with connection(served) as (reader, writer):
                body = json.dumps({"model": "m", "prompt": "Hi"}).encode()
                head = post("/v1/completions", key)
                writer.write(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
                writer.write(head + CHUNKED + b"0\r\nx-a: 1\r\n\r\n")
                status, answer = await told(reader)
                assert status == 200 and answer["choices"][0]["text"] == "x" * 30
                assert (await told(reader))[1]["error"]["code"] == "trailers"

    asyncio.run(check())


@pytest.mark.parametrize("ends", [False, True])
def test_a_request_that_goes_on_behind_its_answer_has_a_bound_of_bytes_and_of_time(tmp_path: Path, ends: bool) -> None:
    async def check() -> None:
        async with serving(tmp_path, limits=GatewayLimits(body_s=SHORT_S)) as served:
            async with connection(served) as (reader, writer):
                writer.write(post("/no-such-thing", "") + CHUNKED)
                assert (await told(reader))[0] == 404
                chunk = b"10000\r\n" + b"x" * PIECE + b"\r\n"
                if ends:
                    writer.write(chunk + b"0\r\n\r\n")  # whole at last, and silent from then on
                    assert await reader.read() == b""
                else:
                    assert await pour(writer, chunk, 1000 * PIECE) < 500 * PIECE
            async with connection(served) as (reader, writer):
                writer.write(post("/no-such-thing", "") + CHUNKED + b"5\r\nhel")
                assert (await told(reader))[0] == 404
                assert await reader.read() == b"", "it waited for the rest"

    asyncio.run(check())


def test_line_ends_alone_keep_no_connection(tmp_path: Path) -> None:
    async def check() -> None:
        async with (
            serving(tmp_path, limits=GatewayLimits(body_s=SHORT_S)) as served,
            connection(served) as (reader, writer),
        ):
            writer.write(HEALTH)
            assert (await told(reader))[0] == 200
            writer.write(b"\r\n")
            assert await reader.read() == b""

    asyncio.run(check())
