"""OpenEnv: a server of its own package is played over its protocol, and what it does wrong is its episode's alone."""

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from actors.rollout.environment import EnvironmentFailed, GuardedEnvironment, Outcome
from actors.rollout.environments.openenv import OpenEnv
from actors.rollout.workflows.interact import Interact
from infra.settings.config import Use
from schemas.errors import ConfigError
from tests.actors.turns import RecordingEngine, issued, play

HERE = __name__
USE = "actors.rollout.environments.openenv:OpenEnv"
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/agents/bin/python"
needs_openenv = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv/agents with openenv-core: make agents")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([PYTHON, Path(__file__).with_name("openenv_server.py"), str(port)])
    try:
        until = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def said_to(environment: OpenEnv, *actions: str, **meta: Any) -> list[Outcome]:
    try:
        said = [await environment.reset(issued(meta=meta), seed=3)]
        return said + [await environment.step(action) for action in actions]
    finally:
        await environment.close()


def pushed(text: str) -> dict[str, Any]:
    return {"floors": int(text.split()[-1])}


def seen(observation: dict[str, Any]) -> str:
    return f"you see {observation['text']}"


@pytest.mark.slow
@needs_openenv
def test_a_world_is_played_by_json_or_by_one_field_or_by_functions_of_ones_own(url: str) -> None:
    async def run() -> None:
        whole = await said_to(OpenEnv(url=url), '{"floors": 1}', '{"floors": 2}')
        assert json.loads(whole[0].observation) == {"text": "floor 0 of 3", "floor": 0, "seed": 3, "height": 3}
        assert [(one.reward, one.end) for one in whole] == [(None, None), (0.0, None), (1.0, "terminal")]
        one_field = OpenEnv(url=url, field="how", action={"floors": 1}, shown="text")
        assert [one.observation for one in await said_to(one_field, "gently")] == ["floor 0 of 3", "floor 1"]
        own = OpenEnv(url=url, read=f"{HERE}:pushed", write=f"{HERE}:seen")
        said = await said_to(own, "up by 2", "up by much")
        assert [one.observation for one in said[:2]] == ["you see floor 0 of 3", "you see floor 2"]
        assert "invalid literal" in said[2].observation and said[2].end is None
        named = await said_to(OpenEnv(url=url), seed=9, reset={"height": 7})
        assert json.loads(named[0].observation) == {"text": "floor 0 of 7", "floor": 0, "seed": 9, "height": 7}

    asyncio.run(run())


@pytest.mark.slow
@needs_openenv
def test_what_is_no_action_is_told_so_and_the_world_goes_on(url: str) -> None:
    async def run() -> None:
        wrong = ["up", "[1]", '{"floors": "many"}', '{"floors": 1, "speed": 2}', '{"floors": 1}']
        said = await said_to(OpenEnv(url=url, shown="text"), *wrong)
        assert [one.observation for one in said[1:3]] == [f"got '{one}', expected a JSON object" for one in wrong[:2]]
        assert "floors: Input should be a valid integer" in said[3].observation
        assert "speed: Extra inputs are not permitted" in said[4].observation
        assert said[5].observation == "floor 1" and not any(one.end for one in said)

    asyncio.run(run())


@pytest.mark.slow
@needs_openenv
def test_more_episodes_than_the_server_has_room_for_wait_for_each_other(url: str) -> None:
    async def run() -> None:
        played = await asyncio.gather(*(said_to(OpenEnv(url=url, shown="text"), '{"floors": 3}') for _ in range(6)))
        assert [one[-1].end for one in played] == ["terminal"] * 6

    asyncio.run(run())


@pytest.mark.slow
@needs_openenv
@pytest.mark.parametrize(("how", "says"), [("wildly", "the rope broke"), ("slowly", "timed out"), ("widely", "step: ")])
def test_a_world_that_breaks_hangs_or_floods_fails_its_episode(url: str, how: str, says: str) -> None:
    async def run() -> None:
        options = {"url": url, "field": "how", "action": {"floors": 1}, "shown": "text"}
        async with GuardedEnvironment(USE, options, timeout_s=3) as world:
            await world.reset(issued(), seed=3)
            with pytest.raises(EnvironmentFailed, match=says):
                await world.step(how)

    asyncio.run(run())


@pytest.mark.slow
@needs_openenv
def test_an_episode_of_interact_is_played_on_a_server(url: str) -> None:
    moves = iter(['{"floors": 1}', "up", '{"floors": 2}'])
    world = Use(use=USE, options={"url": url, "shown": "text"})
    (one,) = play(Interact(environment=world, max_turns=5), RecordingEngine(lambda prompt: next(moves)), issued())
    assert one.end == "terminal" and [score.value for score in one.scores] == [0.0, 1.0]


@pytest.mark.parametrize(
    "answer", ["[]", "no JSON", '{"type": "observation", "data": {}}', '{"type": "state"}', "[" * 100_000, b"\xff"]
)
def test_an_answer_that_is_none_is_named(answer: str | bytes) -> None:
    async def run() -> None:
        async def nonsense(connection: ServerConnection) -> None:
            await connection.recv()
            await connection.send(answer)

        async with serve(nonsense, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            environment = OpenEnv(url=f"http://127.0.0.1:{port}")
            with pytest.raises(RuntimeError, match=r"ws://.*: reset: "):
                await said_to(environment)

    asyncio.run(run())


def test_the_token_of_a_file_is_sent(tmp_path: Path) -> None:
    heard: list[str | None] = []

    async def run() -> None:
        async def listen(connection: ServerConnection) -> None:
            assert connection.request is not None
            heard.append(connection.request.headers.get("Authorization"))

        (tmp_path / "token").write_text("s3cret\n")
        async with serve(listen, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            with pytest.raises(RuntimeError) as failed:
                await said_to(OpenEnv(url=f"http://127.0.0.1:{port}", token_file=str(tmp_path / "token"), retries=0))
        assert "s3cret" not in str(failed.value)

    asyncio.run(run())
    assert heard == ["Bearer s3cret"]


def test_a_server_that_is_away_or_a_wrong_setting_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"ws://127.0.0.1:9/ws"):
        asyncio.run(said_to(OpenEnv(url="http://127.0.0.1:9", retries=1)))
    with pytest.raises(ConfigError, match="expected http"):
        OpenEnv(url="ws://x")
    with pytest.raises(ConfigError, match="has no HEADRACE_NO_SUCH"):
        OpenEnv(url="http://x", token_env="HEADRACE_NO_SUCH")
