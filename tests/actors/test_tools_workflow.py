"""tools: what a policy calls is checked and run, and whatever goes wrong is told to the policy, not to the operator."""

import asyncio
import json
import threading
from typing import Annotated, Literal

import msgspec
import pytest

from actors.rollout.tool import ToolSpec, answer, load_tool, read_call
from actors.rollout.workflow import Workflow
from infra.settings.plugin import load
from schemas import Experience
from schemas.errors import ConfigError
from tests.actors.turns import RecordingEngine, issued, play

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
            for one in self.waiting:
                one.set()
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


def test_rounds_are_bounded() -> None:
    asks = call("add", first=1, second=1)
    experience, told = talk(tools("add", max_rounds=2), asks, asks, asks)
    assert (experience.end, experience.truncated) == ("truncated", "max_rounds")
    assert len(told) == 2 and experience.notes["tool_calls"] == 2


def test_too_many_calls_in_one_turn_are_refused_by_name() -> None:
    one = call("add", first=1, second=1)
    _, (told,) = talk(tools("add", max_calls=1), one + one, "ok")
    assert told.count("<tool_response>") == 2 and "not called: at most 1 calls" in told


def test_the_policy_is_told_names_descriptions_and_schemas() -> None:
    workflow = load("actors.rollout.workflows.tools:Tools", {"tools": [{"use": f"{HERE}:shout"}]}, "test")
    (experience,) = play(workflow, RecordingEngine(lambda heard: "ok"), issued())
    system = experience.messages[0].content
    signature = json.loads(system.partition("<tools>\n")[2].partition("\n</tools>")[0])
    assert signature["function"]["name"] == "shout"
    assert signature["function"]["description"] == "Say it louder."
    assert signature["function"]["parameters"]["required"] == ["text"]


def test_bound_options_are_not_the_policys_to_choose() -> None:
    tool: ToolSpec = load_tool(f"{HERE}:shout", {"mark": "?"})
    assert set(tool.parameters["properties"]) == {"text"}
    turns = iter((call("shout", text="a"), "ok"))
    workflow = load(
        "actors.rollout.workflows.tools:Tools",
        {"tools": [{"use": f"{HERE}:shout", "options": {"mark": "?"}}], "system": "t "},
        "test",
    )
    (experience,) = play(workflow, RecordingEngine(lambda heard: next(turns)), issued())
    assert "A?" in experience.messages[-2].content


def test_a_tool_that_cannot_be_described_stops_the_role_at_its_start() -> None:
    with pytest.raises(ConfigError, match="annotation"):
        tools("bare")
    with pytest.raises(ConfigError, match="each once"):
        tools("add", "add")
    with pytest.raises(ConfigError, match="max_round"):
        tools("add", max_round=3)
