"""The Python tool: what the policy writes runs confined, and whatever becomes of it is told to the policy."""

from pathlib import Path

import pytest

from actors.rollout.workflow import Workflow
from infra.settings.plugin import load
from schemas import Experience
from schemas.errors import ConfigError
from tests.actors.test_tools_workflow import call
from tests.actors.turns import RecordingEngine, issued, play
from tests.infra.sandbox.confining import sandbox_or_skip

USE = "actors.rollout.tools.python:Python"


@pytest.fixture(scope="module")
def workflow() -> Workflow:
    sandbox_or_skip()
    tool = {"use": USE, "options": {"limits": {"wall_s": 20.0, "output_bytes": 1000}}}
    loaded: Workflow = load("actors.rollout.workflows.tools:Tools", {"tools": [tool]}, "test")
    return loaded


def ran(workflow: Workflow, code: str) -> tuple[str, Experience]:
    """What the policy was told of a program, and the episode."""
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


def test_the_policy_is_told_how_to_call_it(workflow: Workflow) -> None:
    _, experience = ran(workflow, "print(1)")
    system = experience.messages[0].content
    assert '"name": "python"' in system and "without network" in system and '"required": ["code"]' in system


def test_limits_that_are_none_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="wall_second"):
        load(USE, {"limits": {"wall_second": 1}}, "test")
