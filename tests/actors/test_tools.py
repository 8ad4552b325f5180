"""The tools workflow, its Python tool and MCP servers: whatever goes wrong is told to the policy, not to the operator."""

import asyncio
import gzip
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from actors.rollout.tool import ParsedCall, ToolResult, answer, read_call
from actors.rollout.tools.mcp import McpServer
from actors.rollout.workflow import EpisodeFailed, Workflow
from infra.local.broker import choose_address
from infra.settings.plugin import load
from schemas import Experience
from schemas.errors import ConfigError
from tests.actors.rig import serving_child
from tests.actors.turns import RecordingEngine, issued, play
from tests.infra.sandbox.confining import sandbox_or_skip

HERE = __name__


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


async def shout(text: Annotated[str, msgspec.Meta(min_length=1)], *, mark: str = "!") -> str:
    """Say it louder."""
    return text.upper() + mark


def broken(kind: Literal["value", "key"]) -> str:
    """Always fails."""
    raise ValueError("no such " + kind)


class Slow:
    """Waits for ever. Options are its fields, arguments those of the call."""

    name = "slow"
    released = threading.Event()

    def __call__(self) -> str:
        Slow.released.wait()
        return "late"


class Meeting:
    """Two calls at once see each other; one after the other they would not."""

    name = "meet"

    def __init__(self) -> None:
        self.waiting: list[asyncio.Event] = []

    async def __call__(self, who: str) -> str:
        mine = asyncio.Event()
        self.waiting.append(mine)
        if len(self.waiting) == 2:
            for item in self.waiting:
                item.set()
        await mine.wait()
        return who


def bare(first) -> str:  # type: ignore[no-untyped-def]
    return ""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tools(*names: str, **options: object) -> Workflow:
    uses = [{"use": f"{HERE}:{name}"} for name in names]
    workflow: Workflow = load(
        "actors.rollout.workflows.tools:Tools", {"tools": uses, "system": "t ", **options}, "test"
    )
    return workflow


def talk(workflow: Workflow, *says: str) -> tuple[Experience, list[str]]:
    """The episode, and what the policy was told between its turns."""
    turns = iter(says)
    engine = RecordingEngine(lambda heard: next(turns))
    (experience,) = play(workflow, engine, issued())
    told = [message.content for message in experience.messages if message.role == "user"][1:]
    return experience, told


def test_a_call_is_answered_and_the_next_turn_reads_it() -> None:
    experience, told = talk(tools("add"), call("add", first=3, second=4), "7")
    assert told == ["<tool_response>\n7\n</tool_response>"]
    assert experience.response == "7" and experience.end == "terminal"
    assert (experience.notes["tool_calls"], experience.notes["tool_errors"]) == (1, 0)
    assert len(experience.spans) == 2 and experience.scores == ()


def test_calls_of_one_turn_run_at_once_and_are_answered_in_their_order() -> None:
    workflow = tools("Meeting", timeout_s=5)
    _, told = talk(workflow, call("meet", who="a") + "\n" + call("meet", who="b"), "ok")
    assert told == ["<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"]


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("<tool_call>{not json</tool_call>", "not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"first": 1', "not JSON"),
        ('<tool_call>["add"]</tool_call>', "expected {"),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "arguments: expected an object"),
        (call("subtract", first=1), "there is no tool 'subtract'; expected one of add, shout, broken"),
        (call("add", first="one", second=2), "arguments.first: 'one' is not of type 'integer'"),
        (call("add", first=1), "'second' is a required property"),
        (call("add", first=1, second=2, third=3), "'third' was unexpected"),
        (call("shout", text=""), "arguments.text"),
        (call("broken", kind="other"), "'other' is not one of"),
        (call("broken", kind="key"), "broken failed: ValueError: no such key"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_policy(says: str, told: str) -> None:
    turns = iter((says, "done"))
    heard: list[str] = []

    def answers(prompt: str) -> str:
        heard.append(prompt)
        return next(turns)

    workflow = tools("add", "shout", "broken")
    engine = RecordingEngine(answers)
    (experience,) = play(workflow, engine, issued())
    assert told in heard[1] and experience.response == "done"
    assert experience.end == "terminal" and experience.notes["tool_errors"] == 1


@pytest.mark.parametrize("text", ["[" * 90_000, "9" * 200_000, '{"name": "add", "arguments": ' + '{"a":' * 20_000])
def test_absurd_calls_are_refused_in_words(text: str) -> None:
    result = asyncio.run(answer(read_call(text), [], timeout_s=1))
    assert result.failed and len(result.text) < 300


def test_a_tool_that_hangs_is_given_up_and_told() -> None:
    try:
        experience, (told,) = talk(tools("Slow", timeout_s=0.2), call("slow"), "never mind")
        assert "slow timed out" in told and experience.end == "terminal"
    finally:
        Slow.released.set()


def test_the_policy_is_told_names_descriptions_and_schemas() -> None:
    workflow = load("actors.rollout.workflows.tools:Tools", {"tools": [{"use": f"{HERE}:shout"}]}, "test")
    (experience,) = play(workflow, RecordingEngine(lambda heard: "ok"), issued())
    system = experience.messages[0].content
    signature = json.loads(system.partition("<tools>\n")[2].partition("\n</tools>")[0])
    assert signature["function"]["name"] == "shout"
    assert signature["function"]["description"] == "Say it louder."
    assert signature["function"]["parameters"]["required"] == ["text"]


def test_a_tool_that_cannot_be_described_stops_the_role_at_its_start() -> None:
    with pytest.raises(ConfigError, match="annotation"):
        tools("bare")
    with pytest.raises(ConfigError, match="each once"):
        tools("add", "add")
    with pytest.raises(ConfigError, match="max_round"):
        tools("add", max_round=3)


USE = "actors.rollout.tools.python:Python"


@pytest.fixture(scope="module")
def workflow() -> Workflow:
    sandbox_or_skip()
    tool = {"use": USE, "options": {"limits": {"wall_s": 20.0, "output_bytes": 1000}}}
    loaded: Workflow = load("actors.rollout.workflows.tools:Tools", {"tools": [tool]}, "test")
    return loaded


def ran(workflow: Workflow, code: str) -> tuple[str, Experience]:
    """The result of a program that the policy reads, and the episode."""
    turns = iter((call("python", code=code), "done"))
    (experience,) = play(workflow, RecordingEngine(lambda heard: next(turns)), issued())
    return experience.messages[-2].content, experience


def test_a_program_is_told_what_it_printed(workflow: Workflow) -> None:
    told, experience = ran(workflow, "print(sum(n * n for n in range(1, 101)))")
    assert told == "<tool_response>\n338350\n\n</tool_response>"
    assert (experience.notes["tool_calls"], experience.notes["tool_errors"]) == (1, 0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('before')\nraise KeyError('seven')", "KeyError: 'seven'"),
        ("print(", "SyntaxError"),
        ("import sys\nsys.exit(3)", "exit code 3"),
        ("while True: print('x' * 100)", "output"),
    ],
)
def test_a_program_that_fails_is_told_why_and_counted(workflow: Workflow, code: str, words: str) -> None:
    told, experience = ran(workflow, code)
    assert words in told and told.startswith("<tool_response>\nerror: python failed")
    assert experience.end == "terminal" and experience.notes["tool_errors"] == 1


def test_a_program_sees_no_file_of_the_host_and_no_network(workflow: Workflow) -> None:
    told, _ = ran(workflow, f"import os\nprint(os.path.exists({str(Path(__file__))!r}))")
    assert "False" in told
    told, _ = ran(workflow, "import socket\nsocket.create_connection(('127.0.0.1', 80), timeout=1)")
    assert "error: python failed" in told


def test_nothing_is_kept_between_calls(workflow: Workflow) -> None:
    ran(workflow, "open('/tmp/kept', 'w').write('1')")
    told, _ = ran(workflow, "import os\nprint(os.listdir('/tmp'))")
    assert "[]" in told


SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = [sys.executable, SERVER, "stdio"]
ALL = ["price", "variables", "long", "slow", "die"]


@contextmanager
def http_server(port: int, *flags: str) -> Iterator[str]:
    command = [sys.executable, SERVER, str(port), *flags]
    with serving_child(command, port, patience_s=60, stderr=subprocess.DEVNULL):
        yield f"http://127.0.0.1:{port}/mcp"


def stdio_server(**options: Any) -> AbstractAsyncContextManager[McpServer]:
    return closing(McpServer(command=STDIO, **options))


@asynccontextmanager
async def closing(server: McpServer) -> AsyncIterator[McpServer]:
    try:
        yield server
    finally:
        await server.close()


async def asked(server: McpServer, name: str, **arguments: object) -> ToolResult:
    return await answer(ParsedCall(name=name, arguments=arguments), await server.tools(), timeout_s=30.0)


def is_running(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


async def process_of(server: McpServer) -> int:
    return int((await asked(server, "variables")).text.partition("process=")[2])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stdio", "events", "json"])
async def test_a_tool_of_a_server_is_described_and_called_as_our_own_are(transport: str) -> None:
    with ExitStack() as stack:
        url = "" if transport == "stdio" else stack.enter_context(http_server(choose_address().port, transport))
        async with closing(McpServer(url=url)) if url else stdio_server() as server:
            tools = await server.tools()
            assert [tool.name for tool in tools] == ALL
            assert tools[0].description == "Price of this many pieces."
            assert tools[0].parameters["required"] == ["item"]
            assert await asked(server, "price", item="chair", pieces=2) == ToolResult("10")
            wrong = await asked(server, "price", item="chair", pieces="two")
            assert wrong.failed and "arguments.pieces" in wrong.text and not wrong.broken
            refused = await asked(server, "price", item="moon")
            assert refused.failed and "not for sale" in refused.text and not refused.broken


@pytest.mark.slow
async def test_a_server_that_dies_or_leaves_calls_unanswered_is_started_again_and_gone_once_it_is_left() -> None:
    async with stdio_server(timeout_s=3.0) as server:
        first = await process_of(server)
        assert "closed" in (await asked(server, "die")).broken.lower()
        second = await process_of(server)
        assert {(await asked(server, "slow")).broken for _ in range(3)} == {""}
        third = await process_of(server)
    assert len({first, second, third}) == 3
    assert not any(is_running(process) for process in (first, second, third))


@pytest.mark.slow
async def test_a_service_that_is_away_fails_the_episode_and_is_found_again() -> None:
    port = choose_address().port
    async with closing(McpServer(url=f"http://127.0.0.1:{port}/mcp")) as server:
        with pytest.raises(EpisodeFailed, match=str(port)) as away:
            await server.tools()
        assert away.value.cause == "tool"
        with http_server(port):
            assert (await asked(server, "price", item="chair")).text == "5"
        assert (await asked(server, "price", item="chair")).broken
        with http_server(port):
            results = [await asked(server, "price", item="chair") for _ in range(2)]
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


@pytest.mark.slow
async def test_a_compressed_answer_is_refused_before_it_is_decoded() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Bomb) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        async with closing(McpServer(url=f"http://127.0.0.1:{service.server_port}/mcp")) as server:
            with pytest.raises(EpisodeFailed, match="Content-Encoding 'gzip'"):
                await server.tools()
        service.shutdown()


@pytest.mark.slow
async def test_a_server_sees_no_variable_but_those_it_is_given_and_the_policy_no_tool_but_those_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_TEST_SECRET", "s3cret")
    async with stdio_server(environment={"SHOP": "open"}, only=["variables"]) as server:
        said = (await asked(server, "variables")).text
        assert "SHOP" in said and "HEADRACE_TEST_SECRET" not in said
        assert "there is no tool 'die'" in (await asked(server, "die")).text
    async with stdio_server(only=["prize"]) as server:
        with pytest.raises(EpisodeFailed, match="has no prize; it offers price"):
            await server.tools()


@pytest.mark.slow
async def test_a_wrong_setting_is_named() -> None:
    for options, says in (
        ({}, "expected one of them"),
        ({"command": ["x"], "url": "http://x"}, "expected one of them"),
        ({"url": "ftp://x"}, 'got url = "ftp://x", expected a URL such as "http'),
        ({"url": "http://x", "token_env": "HEADRACE_NO_SUCH"}, "has no HEADRACE_NO_SUCH"),
    ):
        with pytest.raises(ConfigError, match=says):
            load("actors.rollout.tools.mcp:McpServer", options)
    async with closing(McpServer(command=["/nowhere/server"])) as server:
        with pytest.raises(EpisodeFailed, match="/nowhere"):
            await server.tools()


@pytest.mark.slow
def test_an_episode_calls_a_server_and_one_whose_server_breaks_fails() -> None:
    server = {"use": "actors.rollout.tools.mcp:McpServer", "options": {"command": STDIO, "only": ["price", "die"]}}
    workflow = load("actors.rollout.workflows.tools:Tools", {"servers": [server], "system": "{tools}"}, "test")
    one, _ = talk(workflow, call("price", item="chair"), "5")
    assert one.notes["tool_calls"] == 1 and one.notes["tool_errors"] == 0 and one.response.endswith("5")
    workflow = load("actors.rollout.workflows.tools:Tools", {"servers": [server], "system": "{tools}"}, "test")
    with pytest.raises(EpisodeFailed, match=r"(?i)closed") as broken:
        talk(workflow, call("die"))
    assert broken.value.cause == "tool"
