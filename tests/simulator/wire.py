"""HTTP without sockets: the real server's protocol is fed bytes and answers with bytes, in the simulated process's time.

One connection per request. A process that dies resets its connections, one that stalls leaves them open.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.simulator.virtual_loop import Process, VirtualLoop


class ClientReply:
    """What a client got. seconds: from its first byte to the last of the answer."""

    def __init__(self, data: bytes, seconds: float) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        self.status = int(head.split(b" ", 2)[1])
        self.seconds = seconds


class Wire:
    """Who listens, and who waits for an answer."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self._open: dict[Process, list[Connection]] = {}

    def listeners(self) -> list[Process]:
        """Processes that take connections, stalled ones too."""
        return [one for one, server in self.loop.servers.items() if server.is_open and not one.is_dead]

    async def ask(self, process: Process, path: str, body: bytes, headers: dict[str, str]) -> ClientReply:
        """POST to a process. Raises ConnectionError where it dies, or does not listen any more."""
        fields = {"host": "gateway", "connection": "close", "content-length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        server = self.loop.servers[process]
        if process.is_dead or not server.is_open:
            raise ConnectionRefusedError(process.name)
        connection = Connection(self.loop, process, server.factory)
        self._open.setdefault(process, []).append(connection)
        begin_s = self.loop.time()
        try:
            connection.begin(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            return ClientReply(await connection.answer, self.loop.time() - begin_s)
        finally:
            self._open[process].remove(connection)

    def reset(self, process: Process) -> None:
        """The process is dead."""
        for connection in self._open.get(process, ()):
            if not connection.answer.done():
                connection.answer.set_exception(ConnectionResetError(process.name))


class Connection(asyncio.Transport):
    """The server's end of one connection. answer: all it wrote, once it has closed."""

    def __init__(self, loop: VirtualLoop, process: Process, factory: Callable[[], Any]) -> None:
        super().__init__()
        self.answer: asyncio.Future[bytes] = loop.create_future()
        self._loop = loop
        self._process = process
        self._factory = factory
        self._protocol: Any = None
        self._written = bytearray()
        self._is_closing = False

    def begin(self, request: bytes) -> None:
        """Connect and send, in the server's own process."""
        self._loop.call_soon(self._arrive, request, context=self._process.context)

    def _arrive(self, request: bytes) -> None:
        self._protocol = self._factory()
        self._protocol.connection_made(self)
        self._protocol.data_received(request)

    def write(self, data: Any) -> None:
        """See asyncio.Transport."""
        self._written += data

    def get_write_buffer_size(self) -> int:
        """Nothing: the peer reads at once."""
        return 0

    def is_closing(self) -> bool:
        """See asyncio.Transport."""
        return self._is_closing

    def close(self) -> None:
        """See asyncio.Transport."""
        if self._is_closing:
            return
        self._is_closing = True
        self._loop.call_soon(self._protocol.connection_lost, None, context=self._process.context)
        if not self.answer.done():
            self.answer.set_result(bytes(self._written))

    def abort(self) -> None:
        """See asyncio.Transport."""
        self.close()

    def pause_reading(self) -> None:
        """The request is in already."""

    def resume_reading(self) -> None:
        """The request is in already."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See asyncio.Transport."""
        self._protocol = protocol
