"""The built-in worlds: what each says to which action, and that its rewards mean what they say."""

import asyncio
import importlib
import inspect
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.environment import EnvironmentFailed, GuardedEnvironment, Outcome
from actors.rollout.environments.grid import MOVES, Grid, draw_map, reachable
from actors.rollout.environments.guess import Guess
from actors.rollout.environments.http import HttpEnvironment
from schemas import Task
from schemas.errors import ConfigError
from tests.actors.turns import issued


def played(environment: Any, actions: Sequence[str], task: Task, seed: int = 0) -> list[Outcome]:
    """What the world said: to reset, and to each action until the end."""

    async def run() -> list[Outcome]:
        said = [await environment.reset(task, seed=seed)]
        for action in actions:
            said.append(await environment.step(action))
            if said[-1].end:
                break
        return said

    return asyncio.run(run())


@pytest.mark.parametrize("turns", [1, 3, 4])
def test_bisection_finds_every_number_within_its_turns_and_no_fewer_suffice(turns: int) -> None:
    high = 2**turns - 1

    def found(secret: int, allowed: int) -> bool:
        low, most = 1, high
        guess = Guess(low=1, high=high, turns=allowed)
        asyncio.run(guess.reset(issued(str(secret)), seed=0))
        while True:
            middle = (low + most) // 2
            said = asyncio.run(guess.step(f"{middle:02d}"))
            if said.end:
                return said.reward == 1.0
            low, most = (middle + 1, most) if said.observation == "higher" else (low, middle - 1)

    assert all(found(secret, turns) for secret in range(1, high + 1))
    assert turns == 1 or not all(found(secret, turns - 1) for secret in range(1, high + 1))


def test_what_is_no_guess_costs_a_turn_and_earns_nothing() -> None:
    said = played(Guess(high=15, turns=3, shaped=0.5), ["eight", "16", "-1"], issued("8"))
    assert [one.reward for one in said[1:]] == [0.0, 0.0, 0.0]
    assert {one.observation for one in said[1:]} == {"that is not a number in the range"}
    assert said[-1].end == "terminal"


def test_a_shaped_guess_is_worth_what_it_rules_out_and_all_of_them_together_the_same() -> None:
    """Of 15 numbers 8 leaves 7, then 12 leaves 3 (9 to 11), 12 again nothing more, 10 leaves one, and 11 is it."""
    said = played(Guess(high=15, turns=9, shaped=0.5), ["8", "12", "12", "10", "11"], issued("11"))
    rewards = [one.reward or 0.0 for one in said[1:]]
    share = [math.log(15 / 7), math.log(7 / 3), 0.0, math.log(3), 0.0]
    assert rewards == pytest.approx([0.5 * one / math.log(15) for one in share[:4]] + [1.0])
    assert sum(rewards) == pytest.approx(1.5)
    assert rewards[-1] >= 1.0, "a sure last guess is a whole hit, to the last bit"
    assert sum(one.reward or 0.0 for one in played(Guess(high=15, shaped=0.5), ["11"], issued("11"))) == 1.5


def test_a_number_outside_the_range_is_the_tasks_fault() -> None:
    for answer in ("16", "eight", ""):
        with pytest.raises(ValueError, match="answer"):
            played(Guess(high=15), [], issued(answer))


MAP = "S.#/..#/.G."


def test_walls_and_edges_leave_you_where_you_are() -> None:
    said = played(Grid(), ["up", "left", "right", "right", "hop"], issued(meta={"map": MAP}))
    assert [one.observation.replace("\n", "/") for one in said] == [
        "@.#/..#/.G.",
        "@.#/..#/.G.",
        "@.#/..#/.G.",
        ".@#/..#/.G.",
        ".@#/..#/.G.",
        "expected one of up, down, left, right/.@#/..#/.G.",
    ]


def test_the_goal_is_worth_its_reward_less_the_steps() -> None:
    said = played(Grid(step_cost=0.1), ["right", "Down ", "down"], issued(meta={"map": MAP}))
    assert [one.reward for one in said] == [None, -0.1, -0.1, 0.9]
    assert said[-1].end == "terminal"


def test_moves_run_out_as_a_truncation() -> None:
    assert played(Grid(steps=2), ["up", "up"], issued(meta={"map": MAP}))[-1].end == "truncated"


@given(st.integers(1, 8), st.integers(2, 8), st.floats(0, 0.95), st.integers(0, 2**32))
def test_the_goal_of_a_drawn_map_can_be_reached_and_the_seed_decides_it(
    rows: int, columns: int, walls: float, seed: int
) -> None:
    cells = draw_map(rows, columns, walls, random.Random(seed))
    assert cells == draw_map(rows, columns, walls, random.Random(seed))
    place = {mark: (r, row.index(mark)) for r, row in enumerate(cells) for mark in "SG" if mark in row}
    blocked = {(r, c) for r, row in enumerate(cells) for c, cell in enumerate(row) if cell == "#"}
    assert len(place) == 2 and reachable(place["S"], place["G"], blocked, rows, columns)
    assert set(MOVES) == {"up", "down", "left", "right"}


def service(answers: Callable[[str, dict[str, Any], int], httpx.Response]) -> tuple[HttpEnvironment, list[str]]:
    """An HTTP environment on a service in this process, and the paths it was asked."""
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        import json

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


def test_a_reset_is_sent_again_and_a_step_that_may_have_happened_is_not() -> None:
    def answers(path: str, body: dict[str, Any], count: int) -> httpx.Response:
        if count == 1:
            raise httpx.ReadTimeout("no answer")
        return httpx.Response(200, json={})

    environment, asked = service(answers)
    with pytest.raises(RuntimeError, match="ReadTimeout"):
        played(environment, ["go"], issued())
    assert asked == ["/v1/reset", "/v1/reset", "/v1/step"]


def test_a_step_that_was_never_sent_is_sent_again() -> None:
    def answers(path: str, body: dict[str, Any], count: int) -> httpx.Response:
        if path == "/v1/step" and count == 1:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"end": "terminal"} if path == "/v1/step" else {})

    environment, asked = service(answers)
    assert played(environment, ["go"], issued())[-1].end == "terminal"
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


def test_a_reward_that_is_no_number_fails_the_episode() -> None:
    async def run() -> None:
        async with GuardedEnvironment(f"{__name__}:Unbounded", {}, timeout_s=5) as world:
            await world.reset(issued(), seed=0)

    with pytest.raises(EnvironmentFailed, match="reward inf"):
        asyncio.run(run())


class Unbounded:
    async def reset(self, task: Task, *, seed: int) -> Outcome:
        return Outcome(reward=float("inf"))

    async def step(self, action: str) -> Outcome:
        return Outcome()


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
