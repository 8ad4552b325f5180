"""The HTTP server of the gateway, the programs' site and the console: uvicorn with bounds in bytes, connections and time.

A client needs no key to open a connection, so nothing here trusts it.

Guarantees:
- Besides the request that is being answered a connection holds at most MAX_HEAD_BYTES of an unfinished head or of a body's
  framing, MAX_PIPELINED whole requests, and one read of the socket. A request with trailers is refused.
- A head, a body, the pause between two requests and an answer that is not read may each take `limit_s`; then the connection
  is closed. Above `connections` connections, the server closes the connection that has waited longest for its client.
- Each of these is counted; a client that is refused gets an error object if no answer has begun.
- Data behind a request never cuts off the answer to it.
"""

import asyncio
import gc
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from infra.settings.config import split_address
from schemas.errors import ConfigError

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_REST_BYTES = 4 * 1024 * 1024  # of a body whose answer was given, so that a client that sends too much can read why
MAX_PIPELINED = 4
MAX_CONNECTIONS = 4096
MAX_DESCRIPTORS = 65_536


class HttpBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a server's clients. limit_s: seconds of each wait for a client. connections: most open connections.
    refused: called with a reason for each connection that a bound ends.
    """

    limit_s: float = 30.0
    connections: int = MAX_CONNECTIONS
    refused: Callable[[str], None] = lambda reason: None


class BoundedConnection(HttpToolsProtocol):
    """One connection. httptools parses it: with h11 a short answer takes 1.6 times the CPU time.

    since_s: when its client's turn, or the server's, began.
    """

    def __init__(self, *args: Any, bounds: HttpBounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._refusal: tuple[int, str, str] | None = None
        self._is_refused = False
        self._in_body = False
        self._framing_bytes = 0  # since the last whole head or piece of a body that is answered
        self.since_s = self._unsent_since_s = self.loop.time()
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._bounds.connections:
            others = [other for other in self.connections if isinstance(other, BoundedConnection)]
            waiting = [other for other in others if other.is_waiting and not other.transport.is_closing()]
            self._bounds.refused("too_many_connections")
            min(waiting, key=lambda connection: connection.since_s, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self.flow.pause_reading()  # `receive` of an application resumed it
            return
        self._framing_bytes += len(data)
        super().data_received(data)
        left = self._in_body and not self._is_answering
        if self._framing_bytes > (MAX_REST_BYTES if left else MAX_HEAD_BYTES) and not self._is_refused:
            message = f"more than {MAX_HEAD_BYTES} bytes of a head, or around a piece of a body"
            self._refuse(413 if left else 431, message, "request_too_large")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            self._stop(400, "got trailers behind the body, expected none", "trailers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body, self._framing_bytes, self.since_s = True, 0, self.loop.time()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self._stop(429, f"more than {MAX_PIPELINED} requests behind one that is being answered", "pipelined")

    def on_body(self, body: bytes) -> None:
        if self._is_answering:
            self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._framing_bytes = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.since_s = self.loop.time()
        if self._is_refused:
            self.transport.close()
            return
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # uvicorn resumes it after each answer, however many requests wait

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP, or that `_stop` ended."""
        self._refuse(*(self._refusal or (400, msg, "not_http")))

    @property
    def is_waiting(self) -> bool:
        """True if the client's turn is next: to send a head, or the rest of a body."""
        return not self._is_answering or (self._in_body and not self.pipeline)

    def check(self, now_s: float) -> None:
        """Close the connection if its client was waited for long enough."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent, now_s
        if unsent and now_s - self._unsent_since_s > self._bounds.limit_s:
            self._bounds.refused("answer_not_read")
            self.transport.abort()
        elif self.is_waiting and not self.transport.is_closing() and now_s - self.since_s > self._bounds.limit_s:
            if self._framing_bytes or self._in_body:
                self._refuse(408, f"the request took longer than {self._bounds.limit_s:g} s", "timeout")
            else:
                self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop(self, status: int, message: str, code: str) -> None:
        """End the parsing: the parser hands the error to `send_400_response`."""
        self._refusal = status, message, code
        raise ValueError(message)

    def _refuse(self, status: int, message: str, code: str) -> None:
        """End the connection: at once, or once an earlier request is answered."""
        self._is_refused = True
        self._bounds.refused(code)
        if not self.is_waiting:
            self._in_body = False
            self.pipeline.clear()
            self.flow.pause_reading()
            return
        if not (self._in_body and self.cycle.response_started):
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = msgspec.json.encode({"error": error})
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        if self._is_answering:
            self.cycle.disconnected = True  # nothing more is written behind this
            self.cycle.message_event.set()
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves until `leave`. Signals are the process's own matter. began: set once it accepts connections."""

    def __init__(self, settings: uvicorn.Config, limit_s: float) -> None:
        super().__init__(settings)
        self.began = asyncio.Event()
        self._ticks = max(1, min(10, int(limit_s)))  # a tick is a tenth of a second

    def leave(self) -> None:
        """Accept no more connections, and end once the running requests have."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        allow_descriptors()
        await super().startup(sockets)
        self.began.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % self._ticks == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, BoundedConnection)
                connection.check(now_s)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, drain_s: float, bounds: HttpBounds) -> HttpServer:
    """A server of an ASGI application. drain_s: at a stop, for the requests that run."""
    connection: Any = partial(BoundedConnection, bounds=bounds)
    settings = uvicorn.Config(
        app,
        interface="asgi3",
        access_log=False,
        log_config=None,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,  # no code here reads a client's address from a header
        timeout_keep_alive=max(1, round(bounds.limit_s)),
        timeout_graceful_shutdown=max(1, round(drain_s)),
        http=connection,
    )
    return HttpServer(settings, bounds.limit_s)


async def serve_on(server: HttpServer, sock: socket.socket, listening: Callable[[int], None]) -> None:
    """Serve until `leave` is called. listening: called with the port once it accepts connections."""
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    port = sock.getsockname()[1]
    try:
        await server.began.wait()
        _log.info("serving port=%d", port)
        listening(port)
        await asyncio.shield(serving)
    finally:
        server.leave()
        await serving


def bound(listen: str, setting: str = "gateway.listen") -> socket.socket:
    """A socket on host:port. setting: names the address in errors. Raises ConfigError where the address cannot be had."""
    try:
        host, port = split_address(listen, setting)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: where it is 0, asyncio leaves Nagle on, and each answer on a kept connection waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f'{setting}: cannot listen on "{listen}": {error.strerror}; set another address') from error
    sock.setblocking(False)
    return sock


def allow_descriptors() -> None:
    """Raise this process's limit of open files to MAX_DESCRIPTORS, or as far as its user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop, since the loop's own work is much of the cost of a short answer."""
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def forget_loaded() -> None:
    """Exempt all objects so far from garbage collection, for a process that only serves.

    A model's libraries are a million objects; each full collection would keep every answer waiting while it visits them.
    """
    gc.collect()
    gc.freeze()
