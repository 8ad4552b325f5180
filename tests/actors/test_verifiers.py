"""Environments of verifiers run their own rollouts against an episode; their examples are tasks, their rewards scores."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.program.workflow import Program
from actors.tasksets.files import tasks
from schemas import Experience, Score, Task
from tests.actors.gateway.gateway_rig import EOS
from tests.actors.test_program import episode

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/agents/bin/python"
SCRIPT = ROOT / "infra/cli/examples/verifiers/serve_verifiers.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv/agents with verifiers: make agents"),
]


def command(what: str, kind: str) -> list[str]:
    return [str(PYTHON), str(SCRIPT), what, "verifiers_environment", "--options", json.dumps({"kind": kind})]


def surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


@contextmanager
def started(kind: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    process = subprocess.Popen(
        [*command("serve", kind), "--listen", "127.0.0.1:0"], env=surroundings(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def single_process() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    with started("single") as found:
        yield found


@pytest.fixture
def single(single_process: tuple[str, "subprocess.Popen[str]"]) -> str:
    return single_process[0]


@pytest.fixture(scope="module")
def tool() -> Iterator[str]:
    with started("tool") as (url, _):
        yield url


def asked(number: int, of: str = "train") -> Task:
    return Task(id=f"e-{number}", messages=(), meta={"example": number, "of": of})


def played(url: str, task: Task, *texts: str) -> tuple[tuple[Score, ...], list[Experience]]:
    scores, experiences, _ = asyncio.run(episode(Program(url=url), task, *texts, max_tokens=200))
    return scores, experiences


def test_the_examples_of_an_environment_are_tasks(tmp_path: Path) -> None:
    done = subprocess.run(command("tasks", "single"), env=surroundings(), stdout=subprocess.PIPE, check=True)
    (tmp_path / "tasks.jsonl").write_bytes(done.stdout)
    found = list(tasks(path=str(tmp_path / "tasks.jsonl")))
    assert [(entry.split, entry.meta["example"]) for entry in found] == [("train", n) for n in range(4)] + [
        ("held-out", n) for n in range(2)
    ]
    assert [message.content for message in found[1].messages] == ["Be brief.", "What is 1 + 1?"]
    assert all(entry.answer is None for entry in found), "answers stay with the environment"
    assert len({entry.id for entry in found}) == 6


def test_a_rollout_of_one_turn_is_recorded_and_its_rubric_scores_it(single: str) -> None:
    scores, (experience,) = played(single, asked(1), "It is 2.")
    assert {score.name: score.value for score in scores} == {
        "program": 1.5,
        "right": 1.0,
        "brief": 1.0,
        "num_turns": 1.0,
    }
    assert experience.tokens.tolist()[experience.num_prompt :] == [*b"It is 2.", EOS]
    assert [message.content for message in experience.messages] == ["Be brief.", "What is 1 + 1?", "It is 2."]
    scores, _ = played(single, asked(1, "held-out"), "It is three, I would say.")
    assert {score.name: score.value for score in scores if score.value} == {"num_turns": 1.0}


def test_a_rollout_with_tools_is_one_sequence(tool: str) -> None:
    call = '<tool_call>\n{"name": "successor", "arguments": {"number": 2}}\n</tool_call>'
    scores, (experience,) = played(tool, asked(2), call, "It is 3.")
    assert {score.name: score.value for score in scores}["right"] == 1.0
    assert {score.name: score.value for score in scores}["total_tool_calls"] == 1.0
    assert experience.num_sampled == len(call) + 1 + len("It is 3.") + 1
    assert experience.end == "terminal"


async def test_many_rollouts_at_once_share_one_service(single: str) -> None:
    program = Program(url=single)
    played = await asyncio.gather(*(episode(program, asked(n % 4), f"It is {n % 4 + 1}.") for n in range(16)))
    assert [int(scores[0].value) for scores, _, _ in played] == [1] * 16
