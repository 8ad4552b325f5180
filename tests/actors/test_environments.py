"""Built-in environments, Gymnasium and OpenEnv: what each answers to an action, and faults that stay its episode's alone."""

import asyncio
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.server import ServerConnection, serve

from actors.rollout.environment import EnvironmentFailed, GuardedEnvironment, Outcome
from actors.rollout.environments.gymnasium import Gymnasium
from actors.rollout.environments.http import HttpEnvironment
from actors.rollout.environments.openenv import OpenEnv
from infra.chain.calls import Trouble
from infra.local.broker import choose_address
from infra.settings.plugin import load
from schemas import Task
from schemas.errors import ConfigError
from tests.actors.rig import serving_child
from tests.actors.turns import issued


def played(environment: Any, actions: Sequence[str], task: Task, seed: int = 0) -> list[Outcome]:
    """Observations of the world: at the reset, and at each action until the end."""

    async def run() -> list[Outcome]:
        said = [await environment.reset(task, seed=seed)]
        for action in actions:
            said.append(await environment.step(action))
            if said[-1].end:
                break
        return said

    return asyncio.run(run())


def service(answers: Callable[[str, dict[str, Any], int], httpx.Response]) -> tuple[HttpEnvironment, list[str]]:
    """An HTTP environment on a service in this process, and the paths it was asked."""
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        asked.append(path)
        return answers(path, json.loads(request.content), asked.count(path))

    return HttpEnvironment(url="http://world/v1/", transport=httpx.MockTransport(handle)), asked


def test_any_service_can_be_an_environment() -> None:
    def answers(path: str, body: dict[str, Any], count: int) -> httpx.Response:
        if path == "/v1/reset":
            assert body["task"]["id"] == "t" and body["seed"] == 7 and len(body["episode"]) == 32
            return httpx.Response(200, json={"observation": "hello"})
        assert body["turn"] == count - 1
        end = {"end": "terminal", "reward": 0.5} if body["action"] == "stop" else {}
        return httpx.Response(200, json={"observation": body["action"].upper(), **end})

    environment, asked = service(answers)
    said = played(environment, ["go", "stop"], issued(), seed=7)
    assert said == [
        Outcome(observation="hello"),
        Outcome(observation="GO"),
        Outcome(observation="STOP", reward=0.5, end="terminal"),
    ]
    assert asked == ["/v1/reset", "/v1/step", "/v1/step"]


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (httpx.Response(500, text="boom"), "answered 500"),
        (httpx.Response(302, headers={"location": "http://elsewhere"}), "answered 302"),
        (httpx.Response(200, text="[]"), "expected observation"),
        (httpx.Response(200, json={"end": "failed"}), "expected observation"),
        (httpx.Response(200, json={"reward": "much"}), "expected observation"),
        (httpx.Response(200, content=b"x" * 2_000_000), "more than 1048576 bytes"),
    ],
)
def test_an_answer_that_is_none_is_named(response: httpx.Response, says: str) -> None:
    environment, _ = service(lambda path, body, count: response)
    with pytest.raises(RuntimeError, match=says):
        played(environment, [], issued())


@pytest.mark.slow
def test_reasoning_gym_judges_answers_by_its_own_verifier() -> None:
    from actors.rollout.environments.reasoning_gym import ReasoningGym
    from actors.tasksets.reasoning_gym import reasoning_gym

    (*_, task) = reasoning_gym(generator="chain_sum", size=3, seed=5)
    environment = ReasoningGym(tries=2)
    environment.reset(task, seed=0)
    wrong, right = environment.step("nonsense"), environment.step(task.answer or "")
    assert (wrong.end, right.reward, right.end) == (None, 1.0, "terminal")
    assert wrong.reward is not None and wrong.reward < 1.0


@pytest.mark.slow
def test_no_verifier_of_reasoning_gym_runs_an_answer() -> None:
    from actors.rollout.environments.reasoning_gym import RUNS_ANSWERS, ReasoningGym

    importlib.import_module("actors.tasksets.reasoning_gym").open_dataset("chain_sum", size=1, seed=0, options={})
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    running = {
        name
        for name, (made, _) in datasets.items()
        if re.search(r"\b(eval|exec|parse_expr|sympify)\(answer", inspect.getsource(made))
    }
    assert running == RUNS_ANSWERS, "what the installed release would run"
    for name in RUNS_ANSWERS:
        task = Task(id="t", messages=(), meta={"generator": name, "seed": 0, "index": 0})
        with pytest.raises(ConfigError, match="runs the answer as code"):
            ReasoningGym().reset(task, seed=0)


HERE = __name__
LAKE = {"id": "FrozenLake-v1", "options": {"is_slippery": False, "render_mode": "ansi"}}
NAMES = ["left", "down", "right", "up"]


class Oven(gymnasium.Env[Any, Any]):
    """Every kind of space there is in actions and observations; `step` remembers what it was given."""

    observation_space = spaces.Dict(
        {"heat": spaces.Box(0, 1, (2,), np.float32), "said": spaces.Text(20), "on": spaces.Discrete(2)}
    )
    action_space = spaces.Dict({
        "turn": spaces.Box(-1.0, 1.0, (2,), np.float32), "door": spaces.Discrete(2, start=1),
        "lamps": spaces.MultiBinary(3), "both": spaces.Tuple((spaces.Discrete(3), spaces.Text(5))),
    })  # fmt: skip

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        heat = self.np_random.random(2, dtype=np.float32)
        return {"heat": heat, "said": "ready", "on": np.int64(0)}, {"options": options}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        hot = {"heat": np.asarray([1 / 3, 0.5], np.float32), "said": "hot", "on": np.int64(1)}
        return hot, np.float32(0.5), False, True, {}


gymnasium.register("headrace/Oven-v0", entry_point=Oven)


def test_a_lake_is_crossed_by_the_names_of_its_moves() -> None:
    world = Gymnasium(**LAKE, actions=NAMES)  # type: ignore[arg-type]
    first = world.reset(issued(), seed=3)
    assert first.observation.endswith("FHFH\nFFFH\nHFFG")
    said = [world.step(move) for move in ("Down", "down ", "right", "right", "down", "right")]
    world.close()
    assert [outcome.reward for outcome in said] == [0.0] * 5 + [1.0]
    assert [outcome.end for outcome in said] == [None] * 5 + ["terminal"]


def test_what_is_no_action_is_told_so_and_not_stepped() -> None:
    named, numbered = Gymnasium(**LAKE, actions=NAMES), Gymnasium(**LAKE)  # type: ignore[arg-type]
    for world, expected in ((named, "one of left, down, right, up"), (numbered, "a number from 0 to 3")):
        before = world.reset(issued(), seed=3).observation
        for nonsense in ("hop", "4", "-1", "1.5", "true", "[1]", "", "9" * 400, '"' * 5000):
            said = world.step(nonsense)
            assert said.observation.endswith(expected) and said.reward is None and said.end is None
            assert len(said.observation) < 200
        assert world.reset(issued(), seed=3).observation == before


def test_every_kind_of_space_is_written_and_read() -> None:
    world = Gymnasium(id="headrace/Oven-v0", digits=2)
    first = json.loads(world.reset(issued(), seed=3).observation)
    assert first["said"] == "ready" and first["on"] == 0 and all(item == round(item, 2) for item in first["heat"])
    fits: dict[str, Any] = {"turn": [0.5, -1], "door": 2, "lamps": [0, 1, 1], "both": [2, "hey"]}
    assert world.step(json.dumps(fits)) == Outcome(
        observation='{"heat": [0.33, 0.5], "said": "hot", "on": 1}', reward=0.5, end="truncated"
    )
    for name, wrong in {"turn": [0.5], "door": 0, "lamps": [2, 0, 0], "both": [2], "more": 1}.items():
        assert "expected JSON of Dict" in world.step(json.dumps({**fits, name: wrong})).observation


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=50) | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_whatever_the_agent_says_is_stepped_or_answered(said: str) -> None:
    world = Gymnasium(id="headrace/Oven-v0")
    world.reset(issued(), seed=3)
    assert "expected JSON" in world.step(said).observation
    pole = Gymnasium(id="CartPole-v1")
    pole.reset(issued(), seed=3)
    assert pole.step(said).observation


def test_a_wrong_setting_is_named_before_the_first_episode_or_in_it() -> None:
    with pytest.raises(ConfigError, match=r"id: .*Atlantis"):
        Gymnasium(id="Atlantis-v1")
    with pytest.raises(ConfigError, match='write: no module "nowhere"'):
        Gymnasium(id="CartPole-v1", write="nowhere:see")
    with pytest.raises(ConfigError, match="actions: got 4 names, expected one for each action of Discrete"):
        Gymnasium(id="CartPole-v1", actions=NAMES).reset(issued(), seed=0)

    async def unknown() -> None:
        use, options = "actors.rollout.environments.gymnasium:Gymnasium", {"id": "nowhere:Lake-v0"}
        async with GuardedEnvironment(use, options, timeout_s=5, trouble=Trouble()) as world:
            await world.reset(issued(), seed=0)

    with pytest.raises(EnvironmentFailed, match="nowhere"):
        asyncio.run(unknown())


USE = "actors.rollout.environments.openenv:OpenEnv"
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/agents/bin/python"


needs_openenv = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv/agents with openenv-core: make agents")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = choose_address().port
    with serving_child([PYTHON, Path(__file__).with_name("openenv_server.py"), str(port)], port, patience_s=120):
        yield f"http://127.0.0.1:{port}"


async def said_to(environment: OpenEnv, *actions: str, **meta: Any) -> list[Outcome]:
    try:
        said = [await environment.reset(issued(meta=meta), seed=3)]
        return said + [await environment.step(action) for action in actions]
    finally:
        await environment.close()


def pushed(text: str) -> dict[str, Any]:
    return {"floors": int(text.split()[-1])}


def seen_floor(observation: dict[str, Any]) -> str:
    return f"you see {observation['text']}"


@pytest.mark.slow
@needs_openenv
async def test_a_world_is_played_by_json_or_by_one_field_or_by_functions_of_ones_own(url: str) -> None:
    whole = await said_to(OpenEnv(url=url), '{"floors": 1}', '{"floors": 2}')
    assert json.loads(whole[0].observation) == {"text": "floor 0 of 3", "floor": 0, "seed": 3, "height": 3}
    assert [(item.reward, item.end) for item in whole] == [(None, None), (0.0, None), (1.0, "terminal")]
    one_field = OpenEnv(url=url, field="how", action={"floors": 1}, shown="text")
    assert [item.observation for item in await said_to(one_field, "gently")] == ["floor 0 of 3", "floor 1"]
    own = OpenEnv(url=url, read=f"{HERE}:pushed", write=f"{HERE}:seen_floor")
    said = await said_to(own, "up by 2", "up by much")
    assert [outcome.observation for outcome in said[:2]] == ["you see floor 0 of 3", "you see floor 2"]
    assert "invalid literal" in said[2].observation and said[2].end is None
    named = await said_to(OpenEnv(url=url), seed=9)
    assert json.loads(named[0].observation)["seed"] == 9


@pytest.mark.slow
@needs_openenv
async def test_what_is_no_action_is_told_so_and_the_world_goes_on(url: str) -> None:
    wrong = ["up", "[1]", '{"floors": "many"}', '{"floors": 1, "speed": 2}', '{"floors": 1}']
    said = await said_to(OpenEnv(url=url, shown="text"), *wrong)
    assert [outcome.observation for outcome in said[1:3]] == [
        f"got '{item}', expected a JSON object" for item in wrong[:2]
    ]
    assert "floors: Input should be a valid integer" in said[3].observation
    assert "speed: Extra inputs are not permitted" in said[4].observation
    assert said[5].observation == "floor 1" and not any(outcome.end for outcome in said)


@pytest.mark.slow
@needs_openenv
async def test_more_episodes_than_the_server_has_room_for_wait_for_each_other(url: str) -> None:
    played = await asyncio.gather(*(said_to(OpenEnv(url=url, shown="text"), '{"floors": 3}') for _ in range(6)))
    assert [outcome[-1].end for outcome in played] == ["terminal"] * 6


@pytest.mark.slow
@needs_openenv
@pytest.mark.parametrize(("how", "says"), [("wildly", "the rope broke"), ("slowly", "timed out"), ("widely", "step: ")])
async def test_a_world_that_breaks_hangs_or_floods_fails_its_episode(url: str, how: str, says: str) -> None:
    options = {"url": url, "field": "how", "action": {"floors": 1}, "shown": "text"}
    async with GuardedEnvironment(USE, options, timeout_s=3, trouble=Trouble()) as world:
        await world.reset(issued(), seed=3)
        with pytest.raises(EnvironmentFailed, match=says):
            await world.step(how)


@pytest.mark.parametrize(
    "answer", ["[]", "no JSON", '{"type": "observation", "data": {}}', '{"type": "state"}', "[" * 100_000, b"\xff"]
)
async def test_a_message_that_is_no_answer_is_named(answer: str | bytes) -> None:
    async def nonsense(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(answer)

    async with serve(nonsense, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        environment = OpenEnv(url=f"http://127.0.0.1:{port}")
        with pytest.raises(RuntimeError, match=r"ws://.*: reset: "):
            await said_to(environment)


def test_a_server_that_is_away_or_a_wrong_setting_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"ws://127.0.0.1:9/ws"):
        asyncio.run(said_to(OpenEnv(url="http://127.0.0.1:9", retries=1)))
    with pytest.raises(ConfigError, match='got url = "ws://x", expected a URL such as "http'):
        load(USE, {"url": "ws://x"})
    with pytest.raises(ConfigError, match="has no HEADRACE_NO_SUCH"):
        OpenEnv(url="http://x", token_env="HEADRACE_NO_SUCH")
