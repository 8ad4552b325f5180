"""Gymnasium: its own environments are played in text, and what is no action is told so and not stepped."""

import asyncio
import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout.environment import EnvironmentFailed, GuardedEnvironment, Outcome
from actors.rollout.environments.gymnasium import Gymnasium
from actors.rollout.workflows.interact import Interact
from infra.settings.config import Use
from schemas import Task
from schemas.errors import ConfigError
from tests.actors.turns import RecordingEngine, issued, play

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


def moved(text: str) -> int:
    return NAMES.index(text.removeprefix("go "))


def seen(observation: Any, info: Any) -> str:
    return f"you stand on {observation}, options {info.get('options')}"


def test_a_lake_is_crossed_by_the_names_of_its_moves() -> None:
    world = Gymnasium(**LAKE, actions=NAMES)  # type: ignore[arg-type]
    first = world.reset(issued(), seed=3)
    assert first.observation.endswith("FHFH\nFFFH\nHFFG")
    said = [world.step(move) for move in ("Down", "down ", "right", "right", "down", "right")]
    world.close()
    assert [one.reward for one in said] == [0.0] * 5 + [1.0]
    assert [one.end for one in said] == [None] * 5 + ["terminal"]


def test_an_episode_over_the_limit_of_the_environment_is_truncated() -> None:
    world = Gymnasium(id="FrozenLake-v1", options={"max_episode_steps": 2}, actions=NAMES)
    assert world.reset(issued(), seed=3).observation == "0"
    assert [world.step("left").end, world.step("left").end] == [None, "truncated"]


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
    assert first["said"] == "ready" and first["on"] == 0 and all(one == round(one, 2) for one in first["heat"])
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


def test_the_seed_of_a_group_or_of_its_task_decides_the_world() -> None:
    def first(task: Task, seed: int) -> str:
        return Gymnasium(id="headrace/Oven-v0", digits=9).reset(task, seed=seed).observation

    assert first(issued(), 3) == first(issued(), 3) != first(issued(), 4)
    assert first(issued(meta={"seed": 9}), 3) == first(issued(meta={"seed": 9}), 4) == first(issued(), 9)


def test_functions_of_ones_own_write_observations_and_read_actions() -> None:
    world = Gymnasium(id="FrozenLake-v1", options={"is_slippery": False}, write=f"{HERE}:seen", read=f"{HERE}:moved")
    assert world.reset(issued(), seed=3).observation == "you stand on 0, options None"
    assert world.step("go right").observation == "you stand on 1, options None"
    assert "not in list" in world.step("go home").observation
    oven = Gymnasium(id="headrace/Oven-v0", write=f"{HERE}:seen")
    assert oven.reset(issued(meta={"reset": {"hot": 1}}), seed=3).observation.endswith("options {'hot': 1}")


def test_a_wrong_setting_is_named_before_the_first_episode_or_in_it() -> None:
    with pytest.raises(ConfigError, match=r"id: .*Atlantis"):
        Gymnasium(id="Atlantis-v1")
    with pytest.raises(ConfigError, match='write: no module "nowhere"'):
        Gymnasium(id="CartPole-v1", write="nowhere:see")
    with pytest.raises(ConfigError, match="actions: got 4 names, expected those of Discrete"):
        Gymnasium(id="CartPole-v1", actions=NAMES).reset(issued(), seed=0)

    async def unknown() -> None:
        async with GuardedEnvironment(
            "actors.rollout.environments.gymnasium:Gymnasium", {"id": "nowhere:Lake-v0"}, timeout_s=5
        ) as world:
            await world.reset(issued(), seed=0)

    with pytest.raises(EnvironmentFailed, match="nowhere"):
        asyncio.run(unknown())


def test_an_episode_of_interact_is_played_in_a_lake() -> None:
    """The map is what the policy reads, turn by turn; the reward is that of the turn that earned it."""
    moves = iter(["down", "down", "right", "right", "hop", "down", "right"])
    world = Use(use="actors.rollout.environments.gymnasium:Gymnasium", options={**LAKE, "actions": NAMES})
    workflow = Interact(environment=world, max_turns=9)
    (one,) = play(workflow, RecordingEngine(lambda prompt: next(moves)), issued())
    assert one.end == "terminal"
    assert [score.value for score in one.scores] == [0.0] * 5 + [1.0]
