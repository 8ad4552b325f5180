"""The shared HTTP server: whatever a client sends, or does not, costs a bounded amount of memory, time and connections."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from infra.local.http_server import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    BoundedConnection,
    HttpBounds,
    HttpServer,
    bound,
    make_server,
    serve_on,
)
from infra.roles.process import unless

PIECE = 64 * 1024
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
ENDLESS = b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSING = b"POST /refuse HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LONG = b"GET / HTTP/1.1\r\nx-long: " + b"x" * (MAX_HEAD_BYTES + 1)


class Left(Exception):
    """The client disconnected."""


class Running:
    """A server of a small application. /slow answers once `go` is set, /endless never ends, /refuse reads no body."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.go = asyncio.Event()
        self.num_begun = self.num_ended = 0
        self.server: HttpServer
        self.port = 0

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        try:
            num_bytes, more = 0, scope["path"] != "/refuse"
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                num_bytes, more = num_bytes + len(message["body"]), message.get("more_body", False)
            with suppress(Left):
                await unless(receive(), self._answer(scope["path"], num_bytes, send), Left)  # type: ignore[arg-type]
        finally:
            self.num_ended += 1

    async def _answer(self, path: str, num_bytes: int, send: Send) -> None:
        if path == "/slow":
            await self.go.wait()
        if path == "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * PIECE, "more_body": True})
                await asyncio.sleep(0)
        body = json.dumps({"bytes": num_bytes}).encode()
        size = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [size]})
        await send({"type": "http.response.body", "body": body})

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(30):
                yield reader, writer
        finally:
            writer.close()

    def held_bytes(self) -> int:
        """Bytes of unanswered requests that all connections hold."""
        found = 0
        for connection in self.server.server_state.connections:
            assert isinstance(connection, BoundedConnection)
            found += sum(len(cycle.body) + 1024 for cycle, _ in connection.pipeline)
            found += sum(len(name) + len(value) for name, value in connection.headers or ())
        return found


@asynccontextmanager
async def running(limit_s: float = 20.0, connections: int = 100) -> AsyncIterator[Running]:
    served = Running()
    bounds = HttpBounds(
        limit_s=limit_s, connections=connections, refused=lambda reason: served.refused.update([reason])
    )
    served.server = make_server(served.app, 1.0, bounds)
    up = asyncio.Event()

    def listening(port: int) -> None:
        served.port = port
        up.set()

    serving = asyncio.create_task(serve_on(served.server, bound("127.0.0.1:0"), listening))
    await up.wait()
    try:
        yield served
    finally:
        served.server.leave()
        await serving


async def told(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(size))


async def pour(writer: asyncio.StreamWriter, piece: bytes, num_bytes: int) -> int:
    """Send a piece again and again; how much was taken before the other side closed."""
    sent = 0
    with suppress(ConnectionError, OSError):
        while sent < num_bytes:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    return sent


@pytest.mark.parametrize("before", [0, 1], ids=["first", "on a kept connection"])
@pytest.mark.parametrize(
    ("sent", "limit_s", "status", "code"),
    [
        (LONG, 20.0, 431, "request_too_large"),
        (GET[:-4], 0.8, 408, "timeout"),
        (CHUNKED + b"5\r\nhe", 0.8, 408, "timeout"),
        (b"\x16\x03\x01 hello\r\n\r\n", 20.0, 400, "not_http"),
        (CHUNKED + b"2\r\nhi\r\n0\r\nx-a: 1\r\n\r\n", 20.0, 400, "trailers"),
    ],
    ids=["long", "slow", "slow body", "odd", "trailers"],
)
async def test_a_request_that_cannot_be_read_is_an_error_object_and_a_counter_and_the_connection_is_closed(
    before: int, sent: bytes, limit_s: float, status: int, code: str
) -> None:
    async with running(limit_s) as served, served.connection() as (reader, writer):
        for _ in range(before):
            writer.write(GET)
            assert (await told(reader))[0] == 200
        writer.write(sent)
        found, body = await told(reader)
        assert (found, body["error"]["code"], body["error"]["type"]) == (status, code, "invalid_request_error")
        assert await reader.read() == b""
        assert served.refused == {code: 1}
        async with served.connection() as (reader, writer):
            writer.write(GET)
            assert (await told(reader))[0] == 200


@pytest.mark.parametrize("behind", [LONG, GET[:-4], CHUNKED + b"0\r\nx-a: 1\r\n\r\n", GET * 9, b"\x00\x01\r\n"])
async def test_no_answer_is_cut_off_for_what_follows_its_request(behind: bytes) -> None:
    async with running(0.3) as served, served.connection() as (reader, writer):
        writer.write(SLOW + behind)
        await asyncio.sleep(0.6)
        served.go.set()
        assert await told(reader) == (200, {"bytes": 0})
        await reader.read()


async def test_pipelined_requests_are_few_and_their_connection_holds_no_more() -> None:
    async with running() as served, served.connection() as (reader, writer):
        writer.write(SLOW)
        sent = asyncio.create_task(pour(writer, GET * 2000, 32 * 1024 * 1024))
        while not served.refused:  # noqa: ASYNC110 (the server sets no event)
            await asyncio.sleep(0.01)
        assert served.num_begun <= 1
        assert served.held_bytes() < 256 * 1024
        served.go.set()
        assert (await told(reader))[0] == 200
        assert await sent < 32 * 1024 * 1024
        assert served.refused["pipelined"] == 1 and served.num_begun <= 2


async def test_a_few_pipelined_requests_are_each_answered_in_their_order() -> None:
    async with running() as served, served.connection() as (reader, writer):
        served.go.set()
        posts = [f"POST / HTTP/1.1\r\ncontent-length: {n}\r\n\r\n".encode() + b"x" * n for n in range(MAX_PIPELINED)]
        writer.write(SLOW + b"".join(posts))
        assert [(await told(reader))[1]["bytes"] for _ in range(1 + MAX_PIPELINED)] == [0, *range(MAX_PIPELINED)]
        assert not served.refused


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (CHUNKED + b"0\r\n", b"x-a: 1\r\n" * 8192),
        (CHUNKED + b"0\r\nx-a: ", b"1" * PIECE),
        (CHUNKED + b"1;", b"e" * PIECE),
        (REFUSING, b"10000\r\n" + b"x" * PIECE + b"\r\n"),
        (b"GET /", b"a" * PIECE),
        (b"GET / HTTP/1.1\r\n", b"x-a: " + b"1" * 1000 + b"\r\n"),
    ],
    ids=["trailers", "long trailer", "chunk extension", "body after its answer", "url", "head"],
)
async def test_nothing_is_read_without_an_end(head: bytes, piece: bytes) -> None:
    async with running() as served, served.connection() as (reader, writer):
        writer.write(head)
        assert await pour(writer, piece, 64 * 1024 * 1024) < 32 * 1024 * 1024, "it was read on and on"
        with suppress(ConnectionError):
            await reader.read()
        assert served.refused.total() == 1


@pytest.mark.parametrize("sent", [b"", b"\r\n", GET, GET + b"\r\n", REFUSING + b"5\r\nhel"])
async def test_an_idle_connection_is_closed_after_the_limit(sent: bytes) -> None:
    async with running(0.2) as served, served.connection() as (reader, writer):
        writer.write(sent)
        await reader.read()
        assert not served.server.server_state.connections


async def test_an_answer_that_is_never_read_ends() -> None:
    async with running(0.2) as served, served.connection() as (_, writer):
        writer.write(ENDLESS)
        async with asyncio.timeout(20):
            while not served.num_ended:  # noqa: ASYNC110 (the application sets no event)
                await asyncio.sleep(0.02)
        assert served.refused == {"answer_not_read": 1}


async def test_silent_connections_keep_nobody_out() -> None:
    async with running(connections=20) as served:
        silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(50)]
        async with served.connection() as (reader, writer):
            writer.write(GET)
            assert (await told(reader))[0] == 200
        assert served.refused["too_many_connections"] >= 30
        assert len(served.server.server_state.connections) <= 20
        for _, writer in silent:
            writer.close()
