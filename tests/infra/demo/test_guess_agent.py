"""The agent of the OpenAI Agents SDK that plays the demo's task guess: turn by turn what the built-in workflow makes of it."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from actors.engines.engine import Sampling
from actors.engines.scripted import ScriptedEngine
from actors.program.workflow import Program
from actors.rollout.session import CachedTokenizer, Session
from actors.rollout.workflow import Workflow
from actors.tasksets.guess import HIGH, guess
from infra.cli.demo.char_model import VOCABULARY_SIZE, build_char_model
from infra.cli.demo.settings import TASKS, DemoOptions, demo_toml
from infra.model.model import load_tokenizer
from infra.settings.config import read_toml
from infra.settings.plugin import load
from schemas import Experience, Score, Task
from tests.frameworks import frameworks_or_skip

pytestmark = pytest.mark.slow

SERVICE = Path(__file__).parents[3] / "infra" / "cli" / "examples" / "openai_agents" / "guess_service.py"


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([frameworks_or_skip(), SERVICE, str(port)])
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert process.poll() is None and time.monotonic() < deadline, "the service did not start"
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


def built_in(folder: Path) -> Workflow:
    """The workflow of `headrace demo --task guess`."""
    (folder / "headrace.toml").write_text(demo_toml(DemoOptions(directory=folder, task="guess")))
    explore = read_toml(folder / "headrace.toml")["explore"]
    workflow: Workflow = load(explore["workflow"], explore["options"])
    return workflow


async def test_the_agent_s_games_are_recorded_and_rewarded_as_those_of_the_built_in_workflow(
    service: str, tmp_path: Path
) -> None:
    folder = build_char_model(tmp_path / "model", 0, TASKS["guess"].vocabulary, TASKS["guess"].size)
    tokenizer = load_tokenizer(folder)
    random = Random(4)
    says = [
        [random.choice(("?", "99", *(f"{n:02d}" for n in range(1, HIGH + 1)))) for _ in range(5)] for _ in range(16)
    ]

    async def play(workflow: Workflow, task: Task, words: list[str]) -> tuple[list[Experience], tuple[Score, ...]]:
        left = iter(words)
        engine = ScriptedEngine(
            num_vocabulary=VOCABULARY_SIZE,
            max_model_len=64,
            script=lambda _: [*tokenizer.encode(next(left)), *tokenizer.eos_ids],
        )
        await engine.start()
        session = Session(engine, CachedTokenizer(tokenizer), Sampling(max_tokens=3, stop=tokenizer.eos_ids))
        scores = await workflow(task, session)
        await engine.close()
        return session.experiences(group="g.0", attempt=0, episode=0), tuple(scores)

    workflow, agent = built_in(tmp_path), Program(url=service)
    for task, words in zip(guess(), says, strict=False):
        ((ours,), none), ((theirs,), also_none) = await play(workflow, task, words), await play(agent, task, words)
        assert none == also_none == ()
        assert theirs.tokens.tolist() == ours.tokens.tolist()
        assert (theirs.end, [one.at for one in theirs.scores]) == (ours.end, [one.at for one in ours.scores])
        values = [[round(one.value, 9) for one in side.scores] for side in (theirs, ours)]
        assert values[0] == values[1] and {one.name for one in theirs.scores} == {"environment"}


async def test_a_game_in_which_nothing_is_said_ends_without_a_reward(service: str, tmp_path: Path) -> None:
    folder = build_char_model(tmp_path / "model", 0, TASKS["guess"].vocabulary, TASKS["guess"].size)
    tokenizer = load_tokenizer(folder)
    engine = ScriptedEngine(num_vocabulary=VOCABULARY_SIZE, max_model_len=64, script=lambda _: tokenizer.eos_ids)
    await engine.start()
    session = Session(engine, CachedTokenizer(tokenizer), Sampling(max_tokens=3, stop=tokenizer.eos_ids))
    scores = await Program(url=service)(next(iter(guess())), session)
    await engine.close()
    assert tuple(scores) == (Score(name="environment", value=0.0),)
