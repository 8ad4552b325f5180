"""Tools of an MCP server.

    first call ─> start or connect ─> list ─┬─> call ─> its text, or its error, for the policy
                        ^                   └─> call ─> the server is gone: the episode fails, its cause is `tool`
                        └── the next call, RESTART_S after the last start at the earliest

All episodes of an explorer share a server. It may request nothing: no sampling, no files, no questions to people. The
process of a command gets no variable of the explorer but a few such as PATH, shares its standard error, and ends with it.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
import mcp
import mcp_types
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from actors.rollout.tool import ToolResult, ToolSpec, sound_tool
from actors.rollout.workflow import EpisodeFailed
from infra.settings.outside import IDENTITY, AnswerRefused, bounded_pieces, checked_url
from infra.settings.plugin import describe
from infra.settings.secret import bearer
from schemas.errors import ConfigError, causes

MAX_TOOLS = 256
MAX_PAGES = 32
MAX_DESCRIPTION_CHARS = 4_000
MAX_ANSWER_BYTES = 4 * 1024 * 1024
RESTART_S = 1.0
MAX_SILENT = 3  # calls in a row that a server may leave unanswered
OF_THE_CALL = (mcp_types.INVALID_PARAMS, mcp_types.METHOD_NOT_FOUND)
LOST = (mcp_types.CONNECTION_CLOSED, mcp_types.INVALID_REQUEST)  # the latter: a session that the server knows no more


class McpServer:
    """The tools of an MCP server, for the policy.

    command: Command of a server that speaks over standard input and output. url: URL of a server that speaks streamable HTTP,
    in place of a command. environment: Variables of the command, in addition to a few such as PATH. token_env: Environment
    variable with a bearer token for the url, which is never logged. token_file: File with the bearer token, as an absolute
    path, in place of the variable. only: Names of the tools that the policy may call. Default: all. timeout_s: Maximum seconds
    of a call. start_s: Maximum seconds until the server has listed its tools.

    Example: McpServer(command=["npx", "-y", "@modelcontextprotocol/server-filesystem", "/data"], only=["read_text_file"])
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str = "",
        environment: Mapping[str, str] | None = None,
        token_env: str = "",
        token_file: str = "",
        only: Sequence[str] = (),
        timeout_s: float = 20.0,
        start_s: float = 30.0,
    ) -> None:
        if url:
            checked_url(url)
        if bool(command) == bool(url):
            raise ConfigError(f"got command {list(command)} and url {url!r}, expected one of them")
        self._name = url or command[0]
        self._command, self._url, self._environment = command, url, dict(environment or {})
        self._headers = bearer(token_env, token_file)
        self._only, self._timeout_s, self._start_s = tuple(only), timeout_s, start_s
        self._connection: _Connection | None = None
        self._silent = 0
        self._started_s = -RESTART_S
        self._tools: tuple[ToolSpec, ...] = ()

    async def tools(self) -> tuple[ToolSpec, ...]:
        """Tools that the server offered when it was first asked. Raises EpisodeFailed where it cannot be reached."""
        if not self._tools:
            listed = (await self._connected()).listed
            self._tools = tuple(self._tool(tool) for tool in listed if not self._only or tool.name in self._only)
            if missing := set(self._only) - {tool.name for tool in self._tools}:
                names = ", ".join(tool.name for tool in listed)
                raise EpisodeFailed("tool", f"{self._name} has no {', '.join(sorted(missing))}; it offers {names}")
        return self._tools

    async def close(self) -> None:
        """End the server, or leave it. A later call starts it again."""
        if self._connection is not None:
            self._connection.leave.set()
            await asyncio.wait([self._connection.task])

    def _tool(self, listed: mcp_types.Tool) -> ToolSpec:
        async def call(**arguments: Any) -> ToolResult:
            return await self._call(listed.name, arguments)

        try:
            return sound_tool(
                f"{self._name}: {listed.name}",
                ToolSpec(
                    name=listed.name,
                    description=(listed.description or "")[:MAX_DESCRIPTION_CHARS],
                    parameters=listed.input_schema,
                    function=call,
                ),
            )
        except ConfigError as error:
            raise EpisodeFailed("tool", str(error)) from error

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. The result is `broken` where the server is to blame."""
        try:
            connection = await self._connected()
        except EpisodeFailed as error:
            return ToolResult("", failed=True, broken=str(error))
        try:
            result = await connection.client.call_tool(name, arguments, self._timeout_s)
        except mcp.MCPError as error:
            return self._failed(connection, error)
        except Exception as error:  # pydantic's, for an answer that it cannot read; a stream's, where it closes
            connection.leave.set()
            return ToolResult("", failed=True, broken=f"{self._name}: {name}: {describe(error)}")
        self._silent = 0
        return ToolResult(result_text(result), failed=result.is_error)

    def _failed(self, connection: "_Connection", error: mcp.MCPError) -> ToolResult:
        if error.code in OF_THE_CALL:
            return ToolResult(f"error: {error.message}", failed=True)
        if error.code == mcp_types.REQUEST_TIMEOUT:
            self._silent += 1
            if self._silent >= MAX_SILENT:
                connection.leave.set()
            return ToolResult(f"error: no answer within {self._timeout_s:g} s", failed=True)
        if error.code in LOST:
            connection.leave.set()
        return ToolResult("", failed=True, broken=f"{self._name}: {error.message}")

    async def _connected(self) -> "_Connection":
        """The open connection, or a new one; concurrent callers share it. Raises EpisodeFailed."""
        if self._connection is None or self._connection.leave.is_set():
            self._connection = _Connection()
            self._connection.task = asyncio.create_task(self._hold(self._connection))
        connection = self._connection
        try:
            await asyncio.shield(connection.ready)
        except Exception as error:
            raise EpisodeFailed("tool", f"{self._name}: {describe(error)}") from error
        return connection

    async def _hold(self, connection: "_Connection") -> None:
        """Keep a connection open until it is left: its contexts begin and end in one task."""
        now_s = asyncio.get_running_loop().time
        await asyncio.sleep(self._started_s + RESTART_S - now_s())
        self._started_s = now_s()
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._start_s):
                    client = mcp.Client(self._transport(), read_timeout_seconds=self._timeout_s)
                    connection.client = await stack.enter_async_context(client)
                    connection.listed = await _listed(connection.client)
                self._silent = 0
                connection.ready.set_result(None)
                await connection.leave.wait()
        except Exception as error:
            if not connection.ready.done():
                connection.ready.set_exception(causes(error)[0])
        finally:
            connection.leave.set()
            connection.ready.cancel()

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[Any, Any]]:
        if self._command:
            program, *arguments = self._command
            started = StdioServerParameters(command=program, args=arguments, env=self._environment)
            async with stdio_client(started) as streams:
                yield streams
        else:
            limits = httpx2.Timeout(self._start_s, read=None)
            async with (
                httpx2.AsyncClient(transport=_BoundedTransport(), headers=self._headers, timeout=limits) as client,
                streamable_http_client(self._url, http_client=client) as streams,
            ):
                yield streams


class _Connection:
    """One connection. ready: done once its tools are listed. leave: it is to end, or has."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.leave = asyncio.Event()
        self.task: asyncio.Task[None]
        self.client: mcp.Client
        self.listed: list[mcp_types.Tool] = []


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Asks for uncompressed answers and bounds their bodies. The reader of a stream of events bounds each event."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers.update(IDENTITY)
        response = await super().handle_async_request(request)
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _BoundedStream(response, sys.maxsize if is_stream else MAX_ANSWER_BYTES)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, response: httpx2.Response, limit: int) -> None:
        self._headers, self._raw, self._limit = response.headers, response.stream, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in bounded_pieces(self._headers, cast(AsyncIterable[bytes], self._raw), self._limit):
                yield piece
        except AnswerRefused as error:
            raise httpx2.ReadError(str(error)) from error

    async def aclose(self) -> None:
        await cast(httpx2.AsyncByteStream, self._raw).aclose()


def result_text(result: mcp_types.CallToolResult) -> str:
    """A tool's answer as text; content other than text is replaced by its kind."""
    parts = []
    for block in result.content:
        if isinstance(block, mcp_types.TextContent):
            parts.append(block.text)
        elif isinstance(block, mcp_types.EmbeddedResource) and isinstance(
            block.resource, mcp_types.TextResourceContents
        ):
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type}]")
    if not parts and result.structured_content is not None:
        return mcp_types.CallToolResult(content=[], structured_content=result.structured_content).model_dump_json(
            include={"structured_content"}
        )
    return "\n".join(parts)


async def _listed(client: mcp.Client) -> list[mcp_types.Tool]:
    tools: list[mcp_types.Tool] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None and len(tools) <= MAX_TOOLS:
            return tools
    raise ValueError(f"it lists over {MAX_TOOLS} tools, or over {MAX_PAGES} pages of them")
