"""The policy's address as a Unix socket, for programs whose network is their own."""

import asyncio
import os
import tempfile
from pathlib import Path

from actors.program.inside import joined_to


class ProgramSocket:
    """path: of the socket, in a folder that this user alone enters; a sandbox shows it to one program."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-")
        self._server: asyncio.Server | None = None
        self.path = str(Path(self._folder.name) / "policy.sock")

    async def open(self, port: int) -> None:
        """Lead to this port of the loopback until the event loop ends; again is fine."""
        if (
            self._server is not None
            and self._server.is_serving()
            and self._server.get_loop() is asyncio.get_running_loop()
        ):
            return

        async def inward() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection("127.0.0.1", port)

        self._server = await asyncio.start_unix_server(joined_to(inward), self.path, backlog=1024)
        os.chmod(self.path, 0o666)  # a program in a sandbox is another user
