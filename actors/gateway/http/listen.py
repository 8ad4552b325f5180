"""The gateway's socket, HTTP server and event loop."""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette

from infra.settings.config import split_address
from schemas.errors import ConfigError

_log = logging.getLogger(__name__)

_TICK_S = 0.1  # uvicorn's: it writes the date of its answers anew every tenth time
_LOOK_S = 0.01


class GatewayServer(uvicorn.Server):
    """Signals are the role's; `began` is set once it accepts. A stop waits for requests only: uvicorn's own looks whether
    it is over every tenth of a second.
    """

    def __init__(self, settings: uvicorn.Config) -> None:
        super().__init__(settings)
        self.began = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Accept no more, and end with what runs."""
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.began.set()

    async def main_loop(self) -> None:
        number = 0
        while not await self.on_tick(number):
            number += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._leaving.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LOOK_S)  # who was accepted a moment ago is among the connections by then
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110 (uvicorn sets no event)
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            _log.warning("requests_cut_off count=%d", len(state.tasks))
            for task in list(state.tasks):
                task.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def new_loop() -> asyncio.AbstractEventLoop:
    """The event loop a gateway runs in: uvloop's, since much of what a short answer costs is the loop's own work."""
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def forget_loaded() -> None:
    """Spare what is loaded by now every further garbage collection. For a process that does nothing but serve.

    A model's libraries are a million objects; each full collection would look at them all and keep every answer waiting
    for as long.
    """
    gc.collect()
    gc.freeze()


def bound(listen: str) -> socket.socket:
    """A socket on host:port. Raises ConfigError where it cannot be had."""
    host, port = split_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: where it is 0, asyncio leaves Nagle on, and each answer on a kept connection waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f'gateway.listen: cannot listen on "{listen}": {error.strerror}') from error
    sock.setblocking(False)
    return sock


async def serve_on(server: GatewayServer, sock: socket.socket, listening: Callable[[int], None]) -> None:
    """Serve until `leave` is called. listening: called with the port once it accepts."""
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await server.began.wait()
        port = sock.getsockname()[1]
        _log.info("serving port=%d", port)
        listening(port)
        await asyncio.shield(serving)
    finally:
        server.leave()
        await serving


def make_server(app: Starlette, drain_s: float, connection: Any) -> GatewayServer:
    """A server of the application. drain_s: at an exit, for requests that run. connection: see `bounded_heads`."""
    settings = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,  # no code here reads a client's address
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        http=connection,
    )
    return GatewayServer(settings)
