"""interact: what was sampled is what is recorded, every end has its name, and a broken world breaks one episode."""

import asyncio
import itertools
import threading

import pytest

from actors.engines.engine import ContextFull
from actors.rollout.environment import EnvironmentFailed, Outcome
from actors.rollout.session import Session
from actors.rollout.workflow import Workflow
from infra.chain.calls import MAX_HUNG
from infra.settings.plugin import load
from schemas import Task
from schemas.errors import ConfigError
from tests.actors.rig import EOS
from tests.actors.turns import SAMPLING, RecordingEngine, TurnTokenizer, issued, play

HERE = __name__
GUESS = {"use": "tests.actors.turns:Guess", "options": {"high": 15, "turns": 4}}


class Crashes:
    """Falls over at the second action."""

    def __init__(self) -> None:
        self.actions = 0

    def reset(self, task: Task, *, seed: int) -> Outcome:
        return Outcome(observation="ready")

    def step(self, action: str) -> Outcome:
        self.actions += 1
        if self.actions == 2:
            raise KeyError("cell")
        return Outcome(observation="on")


class Hangs(Crashes):
    """Never answers an action; `released` lets its thread end with the test."""

    released = threading.Event()

    def step(self, action: str) -> Outcome:
        self.released.wait()
        return Outcome()


class Nonsense(Crashes):
    def step(self, action: str) -> Outcome:
        return {"observation": "on"}  # type: ignore[return-value]


class Endless(Crashes):
    """Goes on for ever, and counts how often it is closed."""

    closed = 0

    def step(self, action: str) -> Outcome:
        return Outcome(observation=action)

    def close(self) -> None:
        Endless.closed += 1


def interact(environment: object, **options: object) -> Workflow:
    use = environment if isinstance(environment, dict) else {"use": f"{HERE}:{environment}"}
    workflow: Workflow = load("actors.rollout.workflows.interact:Interact", {"environment": use, **options}, "test")
    return workflow


def bisect(heard: str) -> str:
    """The number in the middle of what is left, read from the conversation (of single words)."""
    low, high, guess = 1, 15, 8
    for word in heard.replace("go ", "").replace("higher", " h ").replace("lower", " l ").split():
        if word.isdigit():
            guess = int(word)
        elif word == "h":
            low = guess + 1
        else:
            high = guess - 1
    return str((low + high) // 2)


@pytest.mark.parametrize("secret", range(1, 16))
@pytest.mark.parametrize("reloads", [False, True])
def test_the_tokens_of_an_episode_are_those_sampled_across_turns_and_reloads(secret: int, reloads: bool) -> None:
    engine = RecordingEngine(bisect, reloads=reloads)
    (experience,) = play(interact(GUESS), engine, issued(str(secret)))
    turns = engine.talk.turns
    last_prompt, last = turns[-1]
    assert experience.tokens.tolist() == [*last_prompt, *last.tokens]
    assert [token for span in experience.spans for token in experience.tokens[span.start : span.stop]] == [
        token for _, completion in turns for token in completion.tokens
    ]
    assert experience.logprobs.tolist() == pytest.approx(
        [value for _, completion in turns for value in completion.logprobs]
    )
    assert [span.version for span in experience.spans] == [s.version for _, item in turns for s in item.spans]
    assert len({span.version for span in experience.spans}) == (2 * len(turns) if reloads else 1)
    for before, after in itertools.pairwise(turns):  # each prompt is the exact tokens before it, and a tail
        assert after[0][: len(before[0]) + len(before[1].tokens)] == (*before[0], *before[1].tokens)
    assert experience.end == "terminal"
    assert experience.score("environment") == 1.0


def test_rewards_lie_at_the_last_token_of_the_turn_that_earned_them() -> None:
    engine = RecordingEngine(bisect)
    (experience,) = play(interact(GUESS), engine, issued("11"))
    ends = [len(prompt) + len(completion.tokens) - 1 for prompt, completion in engine.talk.turns]
    assert [(score.name, score.value, score.at) for score in experience.scores] == [
        ("environment", value, at) for value, at in zip([0.0, 0.0, 0.0, 1.0], ends, strict=True)
    ]  # 8 higher, 12 lower, 10 higher, 11
    assert all(experience.tokens[score.at] == EOS for score in experience.scores if score.at is not None)


def test_a_template_that_does_not_extend_earlier_turns_gives_several_experiences_that_say_so() -> None:
    engine = RecordingEngine(lambda heard: "8")
    parts = play(interact(GUESS), engine, issued("11"), TurnTokenizer(forgets=True))
    assert [(part.part, part.last) for part in parts] == [(0, False), (1, False), (2, False), (3, True)]
    reason = "the template does not extend earlier turns"
    assert [part.part_reason for part in parts] == ["", reason, reason, reason]
    for part, (prompt, completion) in zip(parts, engine.talk.turns, strict=True):
        assert part.tokens.tolist() == [*prompt, *completion.tokens]
        assert [score.at for score in part.scores] == [part.num_tokens - 1]
    assert {part.end for part in parts} == {"terminal"}


def test_used_up_turns_truncate_the_episode() -> None:
    (experience,) = play(interact("Endless", max_turns=3), RecordingEngine(lambda heard: "a"), issued())
    assert (experience.end, experience.truncated) == ("truncated", "max_turns")
    assert experience.num_sampled == 3 * 2


def test_a_full_context_truncates_the_episode_and_keeps_what_was_sampled() -> None:
    engine = RecordingEngine(lambda heard: "abc", max_model_len=230)  # 200 of it are kept free for a turn
    (experience,) = play(interact("Endless", max_turns=50), engine, issued())
    assert (experience.end, experience.truncated) == ("truncated", "context is full")
    assert 0 < experience.num_tokens <= 230
    with pytest.raises(ContextFull):
        play(interact("Endless"), RecordingEngine(lambda heard: "abc", max_model_len=200), issued())


@pytest.mark.parametrize(
    ("environment", "says"), [("Crashes", "step failed: KeyError: 'cell'"), ("Nonsense", "returned dict")]
)
def test_a_broken_environment_is_named(environment: str, says: str) -> None:
    with pytest.raises(EnvironmentFailed, match=says):
        play(interact(environment), RecordingEngine(lambda heard: "a"), issued())


async def test_an_environment_that_hangs_is_named_and_not_called_while_too_many_episodes_hang() -> None:
    workflow, engine = interact("Hangs", timeout_s=1), RecordingEngine(lambda heard: "a")
    await engine.start()
    episodes = [workflow(issued(), Session(engine, TurnTokenizer(), SAMPLING)) for _ in range(MAX_HUNG + 1)]
    try:
        faults = await asyncio.gather(*episodes[1:], return_exceptions=True)
        assert {str(fault) for fault in faults} == {"environment Hangs: step timed out: no answer within 1 s"}
        with pytest.raises(EnvironmentFailed, match="not called: 16 earlier calls still hang"):
            await episodes[0]
    finally:
        Hangs.released.set()


def test_an_environment_is_closed_whatever_happens() -> None:
    before = Endless.closed
    play(interact("Endless", max_turns=1), RecordingEngine(lambda heard: "a"), issued())
    with pytest.raises(ContextFull):
        play(interact("Endless"), RecordingEngine(lambda heard: "a", max_model_len=100), issued())
    assert Endless.closed == before + 2


def test_an_environment_that_is_none_stops_the_role_at_its_start() -> None:
    with pytest.raises(ConfigError, match="no module"):
        interact({"use": "nowhere.at_all:World"})
    with pytest.raises(ConfigError, match="reset and step"):
        interact({"use": "schemas:Task", "options": {"id": "a", "messages": []}})
    with pytest.raises(ConfigError, match="turns"):
        interact({"use": "tests.actors.turns:Guess", "options": {"turn": 3}})


def test_a_system_message_comes_before_the_messages_of_the_task() -> None:
    (experience,) = play(interact(GUESS, system="act. "), RecordingEngine(lambda heard: "8"), issued("8"))
    assert [(message.role, message.content) for message in experience.messages[:2]] == [
        ("system", "act. "),
        ("user", "go "),
    ]
    assert experience.score("environment") == 1.0 and experience.end == "terminal"
