"""MCP servers as tools, over both transports: real servers, as processes; what they do wrong is an episode's, and no more."""

import asyncio
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from actors.rollout.tool import ParsedCall, ToolResult, answer
from actors.rollout.tools.mcp import McpServer
from actors.rollout.workflow import EpisodeFailed
from infra.settings.plugin import load
from schemas.errors import ConfigError
from tests.actors.turns import RecordingEngine, issued, play

pytestmark = pytest.mark.slow  # each starts a server, which takes a second
SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = [sys.executable, SERVER, "stdio"]
ALL = ["price", "variables", "long", "slow", "die", "flood", "babble"]


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def http_server(port: int, *flags: str) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, SERVER, str(port), *flags], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@contextmanager
def stdio_server(**options: Any) -> Iterator[McpServer]:
    with closing(McpServer(command=STDIO, **options)) as server:
        yield server


@pytest.fixture(params=["stdio", "events", "json"])
def server(request: pytest.FixtureRequest) -> Iterator[McpServer]:
    if request.param == "stdio":
        with stdio_server() as over_pipes:
            yield over_pipes
        return
    with http_server(free_port(), request.param) as url, closing(McpServer(url=url)) as over_http:
        yield over_http


async def ask(server: McpServer, name: str, timeout_s: float = 30.0, **arguments: object) -> ToolResult:
    return await answer(ParsedCall(name=name, arguments=arguments), await server.tools(), timeout_s=timeout_s)


def asked(server: McpServer, name: str, **arguments: object) -> ToolResult:
    return asyncio.run(ask(server, name, **arguments))


def process_of(server: McpServer) -> int:
    return int(asked(server, "variables").text.partition("process=")[2])


def test_a_tool_of_a_server_is_described_and_called_as_our_own_are(server: McpServer) -> None:
    tools = asyncio.run(server.tools())
    assert [tool.name for tool in tools] == ALL
    assert tools[0].description == "What so many pieces cost."
    assert tools[0].parameters["required"] == ["item"]
    assert asked(server, "price", item="chair", pieces=2) == ToolResult("10")
    wrong = asked(server, "price", item="chair", pieces="two")
    assert wrong.failed and "arguments.pieces" in wrong.text and not wrong.broken
    refused = asked(server, "price", item="moon")
    assert refused.failed and "not for sale" in refused.text and not refused.broken


def test_what_a_tool_says_is_bounded(server: McpServer) -> None:
    said = asked(server, "long", characters=100_000)
    assert len(said.text) < 9_000 and said.text.endswith("more characters")
    assert asked(server, "long", characters=5_000_000).broken
    assert asked(server, "price", item="chair").text == "5"


def test_a_call_without_an_answer_ends_in_time_and_the_server_goes_on() -> None:
    with stdio_server(timeout_s=0.5) as server:
        process = process_of(server)
        assert asked(server, "slow") == ToolResult("error: no answer within 0.5 s", failed=True)
        assert process_of(server) == process


def test_a_server_that_leaves_calls_unanswered_is_started_again() -> None:
    with stdio_server(timeout_s=0.5) as server:
        process = process_of(server)
        assert {asked(server, "slow").broken for _ in range(3)} == {""}
        assert process_of(server) != process


@pytest.mark.parametrize(
    ("harm", "says"),
    [("die", "out of cheese"), ("flood", "wrote a line over 4194304 bytes"), ("babble", "lines that are no message")],
)
def test_a_server_that_breaks_fails_the_episode_and_is_started_again(harm: str, says: str) -> None:
    with stdio_server() as server:
        process = process_of(server)
        assert says in asked(server, harm).broken
        assert process_of(server) != process


def test_a_server_that_died_between_two_calls_costs_no_episode() -> None:
    with stdio_server() as server:
        process = process_of(server)
        os.kill(process, 9)
        while Path(f"/proc/{process}").exists():
            time.sleep(0.01)
        assert process_of(server) != process


def test_a_service_that_is_away_fails_the_episode_and_is_found_again() -> None:
    port = free_port()
    with closing(McpServer(url=f"http://127.0.0.1:{port}/mcp")) as server:
        with pytest.raises(EpisodeFailed, match=str(port)) as away:
            asyncio.run(server.tools())
        assert away.value.cause == "tool"
        with http_server(port):
            assert asked(server, "price", item="chair").text == "5"
        assert asked(server, "price", item="chair").broken
        with http_server(port):
            results = [asked(server, "price", item="chair") for _ in range(2)]
            assert results[-1].text == "5"


class Bomb(BaseHTTPRequestHandler):
    """Answers all with 64 MiB, compressed to some 64 KiB."""

    def do_POST(self) -> None:
        body = gzip.compress(bytes(64 * 2**20))
        self.send_response(200)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Encoding": "gzip",
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def test_a_compressed_answer_is_refused_before_it_is_decoded() -> None:
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Bomb) as service,
        closing(McpServer(url=f"http://127.0.0.1:{service.server_port}/mcp")) as server,
    ):
        threading.Thread(target=service.serve_forever, daemon=True).start()
        with pytest.raises(EpisodeFailed, match="Content-Encoding 'gzip'"):
            asyncio.run(server.tools())
        service.shutdown()


def test_many_calls_at_once_share_one_server() -> None:
    async def run(server: McpServer) -> list[str]:
        results = await asyncio.gather(*(ask(server, "price", item="a" * n) for n in range(1, 51)))
        return [result.text for result in results]

    with stdio_server() as server:
        assert asyncio.run(run(server)) == [str(n) for n in range(1, 51)]


def test_a_server_sees_no_variable_but_those_it_is_given() -> None:
    os.environ["HEADRACE_TEST_SECRET"] = "s3cret"
    try:
        with stdio_server(environment={"SHOP": "open"}) as server:
            said = asked(server, "variables").text
    finally:
        del os.environ["HEADRACE_TEST_SECRET"]
    assert "SHOP" in said and "HEADRACE_TEST_SECRET" not in said


def test_a_server_ends_with_what_started_it() -> None:
    with stdio_server() as server:
        process = process_of(server)
    assert not Path(f"/proc/{process}").exists()


def test_only_the_tools_that_are_named_can_be_called() -> None:
    with stdio_server(only=["price"]) as server:
        assert "there is no tool 'die'" in asked(server, "die").text
    with stdio_server(only=["prize"]) as server, pytest.raises(EpisodeFailed, match="has no prize; it offers price"):
        asyncio.run(server.tools())


def test_a_wrong_setting_is_named() -> None:
    for options, says in (
        ({}, "expected one of them"),
        ({"command": ["x"], "url": "http://x"}, "expected one of them"),
        ({"url": "ftp://x"}, "expected http"),
        ({"url": "http://x", "token_env": "HEADRACE_NO_SUCH"}, "has no HEADRACE_NO_SUCH"),
    ):
        with pytest.raises(ConfigError, match=says):
            McpServer(**options)  # type: ignore[arg-type]
    with closing(McpServer(command=["/nowhere/server"])) as server, pytest.raises(EpisodeFailed, match="/nowhere"):
        asyncio.run(server.tools())


def test_an_episode_calls_a_server_and_one_whose_server_breaks_fails() -> None:
    def says(name: str, **arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    def playing(replies: Sequence[str]) -> Callable[[str], str]:
        left = iter(replies)
        return lambda prompt: next(left)

    server = {"use": "actors.rollout.tools.mcp:McpServer", "options": {"command": STDIO, "only": ["price", "die"]}}
    workflow = load("actors.rollout.workflows.tools:Tools", {"servers": [server], "system": "{tools}"}, "test")
    (one,) = play(workflow, RecordingEngine(playing([says("price", item="chair"), "5"])), issued())
    assert one.notes["tool_calls"] == 1 and one.notes["tool_errors"] == 0 and one.response.endswith("5")
    with pytest.raises(EpisodeFailed, match="out of cheese") as broken:
        play(workflow, RecordingEngine(playing([says("die")])), issued())
    assert broken.value.cause == "tool"
