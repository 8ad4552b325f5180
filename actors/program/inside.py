"""Runs inside the sandbox, before a program and beside it: the policy's address on the loopback there. Nothing but the standard
library is there to import.

    program ─> 127.0.0.1:PORT ─> this, a process of its own ─> Unix socket ─> policy

Called with the socket's path; the first line of its standard input says what to run, the rest is the program's.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable

PORT = 8000


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def joined_to(opened: Callable[[], Awaitable[Ends]]) -> Callable[..., Awaitable[None]]:
    """A server's handler that joins each connection to another."""

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await opened()
        except OSError:  # the policy is gone, and so is the caller
            writer.close()
            return
        await asyncio.gather(copied(reader, back), copied(there, writer))

    return joined


async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy bytes until either side has gone."""
    try:
        while piece := await source.read(65_536):
            target.write(piece)
            await target.drain()
    except ConnectionError:
        pass
    finally:
        target.close()


async def forward(path: str, listening: socket.socket) -> None:
    """Lead every connection to the socket at `path`, until the sandbox ends."""
    server = await asyncio.start_server(joined_to(lambda: asyncio.open_unix_connection(path)), sock=listening)
    await server.serve_forever()


def main() -> None:
    """Listen, forward in a child, and become the program."""
    first = bytearray()
    while not first.endswith(b"\n") and (byte := os.read(0, 1)):  # no further: the rest is not ours
        first += byte
    start = json.loads(first)
    listening = socket.create_server(("127.0.0.1", PORT))
    if not os.fork():
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        asyncio.run(forward(sys.argv[1], listening))
    listening.close()
    if os.path.isdir(start["folder"]):
        os.chdir(start["folder"])
    try:
        os.execvpe(start["command"][0], start["command"], {**os.environ, **start["environment"]})
    except OSError as error:
        sys.exit(f"cannot be started: {start['command'][0]}: {error.strerror}")


if __name__ == "__main__":
    main()
