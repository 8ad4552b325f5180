"""A process that speaks MCP over its standard input and output, within bounds that mcp's own client does not keep.

Guarantees: the process gets no variable of this one but a few like PATH; a line over MAX_LINE_BYTES, and more than MAX_NONSENSE
lines that are no message, end it; what it complains is read and all but its end forgotten; its group is ended with it.
"""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types
from mcp.shared.message import SessionMessage

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_NONSENSE = 100  # some servers print a greeting, or their log
LAST_WORDS = 300
GRACE_S = 2.0
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER")


class StdioServer:
    """One run of a server's command. ended: set once it has closed its output; fault: why, and its last words."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = {**{name: os.environ[name] for name in INHERITED if name in os.environ}, **environment}
        self._pid = 0
        self._words = b""
        self._why = "closed its output"
        self.ended = asyncio.Event()

    def is_gone(self) -> bool:
        """True if its process has ended, whether the loop has heard of it or not."""
        try:
            return bool(self._pid and os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        except ChildProcessError:
            return True

    @property
    def fault(self) -> str:
        """The reason of the end and the last words, in one line."""
        words = " ".join(self._words.decode(errors="replace").split())
        return f"{self._command[0]} {self._why}{f'; its last words: {words}' if words else ''}"

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """Start it; its messages, as mcp.Client takes them, until the context ends. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_LINE_BYTES, env=self._environment,
            start_new_session=True,
        )  # fmt: skip
        self._pid = process.pid
        came, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, leaving = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.create_task(work)
            for work in (self._read(process, came), self._write(process, leaving), self._listen(process))
        ]
        try:
            yield incoming, outgoing
        finally:
            await asyncio.shield(_end(process))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (came, incoming, outgoing, leaving):
                stream.close()

    async def _read(self, process: Process, came: Any) -> None:
        assert process.stdout is not None
        nonsense = 0
        try:
            while line := await process.stdout.readline():
                try:
                    message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    nonsense += bool(line.strip())
                    if nonsense > MAX_NONSENSE:
                        self._why = f"wrote over {MAX_NONSENSE} lines that are no message"
                        break
                    continue
                await came.send(SessionMessage(message))
        except ValueError:  # what readline makes of a line over the limit
            self._why = f"wrote a line over {MAX_LINE_BYTES} bytes"
        except anyio.BrokenResourceError:
            pass
        finally:
            came.close()
            self.ended.set()

    async def _write(self, process: Process, leaving: Any) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError, anyio.ClosedResourceError):
            async for sent in leaving:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()

    async def _listen(self, process: Process) -> None:
        assert process.stderr is not None
        while piece := await process.stderr.read(65_536):
            self._words = (self._words + piece)[-LAST_WORDS:]


async def _end(process: Process) -> None:
    """Close its input, which asks it to end; then end its group."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            while process.returncode is None:  # noqa: ASYNC110  (wait() also waits for whoever else holds its output)
                await asyncio.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Output without a reader keeps it open otherwise; asyncio has no other way.
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()
