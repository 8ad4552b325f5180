"""A proxy before a server, which slows each connection to a given rate and counts the bytes that pass."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import msgspec

from infra.local.address import HOST

CHUNK_BYTES = 64 * 1024
LATE_S = 0.05  # that a connection may catch up, where the machine was busy


class ThrottledPort(msgspec.Struct):
    """One port of the proxy. port: number. bytes_read: that came back through it from the server (HTTP's headers are
    among them). bytes_written: that went there. connections: opened so far.
    """

    port: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    connections: int = 0

    @property
    def url(self) -> str:
        """Where a client finds it."""
        return f"http://{HOST}:{self.port}"


@contextmanager
def throttled(port: int, bytes_per_s: float, count: int) -> Iterator[list[ThrottledPort]]:
    """So many doors to a server on a port of this machine; in each direction a connection passes `bytes_per_s`."""
    opened: Future[list[ThrottledPort]] = Future()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(_serve(port, bytes_per_s, count, opened, ended),))
    thread.start()
    try:
        yield opened.result()
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


async def _serve(
    port: int, bytes_per_s: float, count: int, opened: "Future[list[ThrottledPort]]", ended: asyncio.Event
) -> None:
    doors, servers = [ThrottledPort() for _ in range(count)], []
    running: set[asyncio.Task[None]] = set()
    try:
        for door in doors:

            async def passes(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, door: ThrottledPort = door
            ) -> None:
                task = asyncio.current_task()
                assert task is not None
                running.add(task)
                with suppress(asyncio.CancelledError):  # of the end, which waits for it below
                    await _connection(reader, writer, door, port, bytes_per_s)
                running.discard(task)

            server = await asyncio.start_server(passes, HOST, 0, limit=CHUNK_BYTES, backlog=1024)
            door.port = server.sockets[0].getsockname()[1]
            servers.append(server)
        opened.set_result(doors)
    except OSError as error:
        opened.set_exception(error)
    await ended.wait()
    for server in servers:
        server.close()
    for task in (left := [*running]):
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _connection(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, door: ThrottledPort, port: int, bytes_per_s: float
) -> None:
    door.connections += 1
    try:
        from_server, to_server = await asyncio.open_connection(HOST, port, limit=CHUNK_BYTES)
    except OSError:
        writer.close()
        return

    def was_read(num_bytes: int) -> None:
        door.bytes_read += num_bytes

    def was_written(num_bytes: int) -> None:
        door.bytes_written += num_bytes

    up = asyncio.create_task(_pump(reader, to_server, bytes_per_s, was_written))
    down = asyncio.create_task(_pump(from_server, writer, bytes_per_s, was_read))
    try:
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        for one in (writer, to_server):
            one.close()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float, passed: Callable[[int], None]
) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time()
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            passed(len(data))
            writer.write(data)
            await writer.drain()
            due = max(due, loop.time() - LATE_S) + len(data) / bytes_per_s
            if (early := due - loop.time()) > 0:
                await asyncio.sleep(early)
