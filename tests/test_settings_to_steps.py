"""From settings to three steps through the torch engine: each loss, lane, workflow and kind of feedback source. A distilled run
also runs again, without its teacher.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.engines.torch import TorchEngine
from infra.cli.demo.char_model import Size, build_char_model
from infra.cli.main import app
from infra.cli.run.roles import check_teacher
from infra.cli.settings import Settings
from infra.docs.recipes.teacher import TeacherServer
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_tokenizer
from infra.observe.metrics import Metrics
from infra.store.store import Store
from schemas import Batch, Block, Experience, topics
from schemas.errors import ConfigError
from schemas.wire.teacher import teacher_logprobs
from streams.sources.source import build_sources, run_sources
from tests.actors.gateway.gateway_rig import secret_store, serving
from tests.own_sources import ROOT
from tests.trainer.memory_run import replaying
from tests.whole_run import BASE, run_to_end, trained, written
from trainer.config import LOSSES
from trainer.learners.learner import Learner, open_learner
from trainer.replay.replay import find_start, replay
from trainer.state import whole_hash

PAGE = (
    (ROOT / "infra/docs/howto/distill.md").read_text().partition("```toml\n")[2].partition("```")[0]
)  # what users paste
LANES = {"sft": 'expert = { loss = "sft" }', "dpo": 'human = { loss = "dpo" }'}
BESIDE = {"ppo": "[trainer.critic]\n"}


def settings(loss: str) -> str:
    """Settings that a user adds to a run for a loss."""
    lane = LANES.get(loss) or f'usual = {{ loss = "{loss}" }}'
    return f"[trainer.lanes]\n{lane}\n{BESIDE.get(loss, '')}"


@asynccontextmanager
async def taught(folder: Path, *base: Any) -> AsyncIterator[Settings]:
    """Settings of distill, whose teacher is the recipe's, with a larger model. base: as of `written`."""
    model = build_char_model(folder / "teacher", seed=9, size=Size(hidden=64, layers=2))
    server = TeacherServer(0, str(model))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield written(folder, PAGE.replace("http://teacher:8001", f"http://127.0.0.1:{server.server_port}"), *base)
    finally:
        await asyncio.to_thread(server.shutdown)
        thread.join()
        server.server_close()


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"distill"}))
async def test_three_steps_from_settings_to_weights(tmp_path: Path, loss: str) -> None:
    log, _, _ = await trained(written(tmp_path, settings(loss)))
    assert await steps(log) == [0, 1, 2]


WORKFLOWS = {
    "interact": """
workflow = "actors.rollout.workflows.interact:Interact"
options = { max_turns = 3, environment = { use = "tests.whole_run:Digits" } }
""",
    "tools": """
workflow = "actors.rollout.workflows.tools:Tools"
options = { tools = [{ use = "tests.whole_run:double" }], system = "{tools}" }
""",
    "program": """
workflow = "actors.program.workflow:Program"
options = { use = "tests.whole_run:program" }
""",
}


@pytest.mark.parametrize("name", WORKFLOWS)
async def test_each_workflow_leads_to_steps(tmp_path: Path, name: str) -> None:
    found = written(tmp_path, "", BASE.replace("[explore]\n", f"[explore]{WORKFLOWS[name]}"))
    log, _, _ = await trained(found)
    assert await steps(log) == [0, 1, 2]


async def steps(log: Log) -> list[int]:
    journal = [message.value async for message in log.scan(topics.BATCHES)]
    return [batch.step for batch in journal if isinstance(batch, Batch)]


LIVE = """
[trainer.lanes]
live = { loss = "topr", min_sequences = 2 }
[collect]
session_s = 0.0
[[feedback]]
name = "user"
use = "streams.sources.received:rating"
window = "1s"
"""


WEBHOOK = f'{LIVE}from = {{ webhook = "/v1/feedback" }}\n'


async def rated(found: Settings, folder: Path, place: str = "webhook", listens: str = "") -> tuple[Log, Store, Learner]:
    """A finished run on eight answers of a gateway, each of which is rated at a webhook, in a file or in a topic."""
    tokenizer = load_tokenizer(found.model_path)
    store, bus = secret_store(), MemoryBus()
    await bus.create_topic("ratings", 1, {})
    engine = TorchEngine(model=found.model_path)
    async with serving(folder / "gateway", engine, bus=bus, store=store, tokenizer=tokenizer) as served:
        client = served.http(await served.new_key())
        log = served.log
        for number in range(8):
            body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": f"{number}"}]}
            answer = (await client.post("/v1/chat/completions", json=body)).json()["id"]
            rating = {"answer_id": answer, "id": f"r{number}", "value": number % 2}
            if place == "webhook":
                await client.post("/v1/feedback", json=rating)
            elif place == "file":
                with (folder / listens).open("a") as file:
                    file.write(json.dumps(rating) + "\n")
            else:
                await bus.send(listens, json.dumps(rating).encode(), key=answer.encode())
        await served.recorded(8)
        sources = run_sources(build_sources(found.feedback, folder), log, Metrics("process"), folder)
        return log, store, await run_to_end(found, log, store, roles=[sources])


@pytest.mark.parametrize("place", ["webhook", "file", "topic"])
async def test_rated_answers_of_each_kind_of_source_lead_to_steps(tmp_path: Path, place: str) -> None:
    listens = {"webhook": "/v1/feedback", "file": "ratings.jsonl", "topic": "ratings"}[place]
    found = written(tmp_path, f'{LIVE}from = {{ {place} = "{listens}" }}\n')
    log, _, _ = await rated(found, tmp_path, place, listens)
    assert await steps(log) == [0, 1, 2]


async def test_a_distilled_run_replays_to_the_bit_without_its_teacher(tmp_path: Path) -> None:
    async with taught(tmp_path) as found:
        log, store, learner = await trained(found)
    buffered = [
        experience
        async for message in log.scan(topics.BUFFER)
        if isinstance(message.value, Block)
        for experience in message.value.experiences
    ]
    assert len(buffered) >= 12 and all(teacher_logprobs(experience) is not None for experience in buffered)
    assert {teacher_of(experience) for experience in buffered} == {"1+Qwen/Qwen3-8B"}
    start = await find_start(log, store, found.app, from_step=-1, to_step=None)
    again = open_learner(found.trainer, found.model_path)
    run = replaying(again, found.trainer, found)
    compared = [checkpoint async for checkpoint in replay(run, found.app, log, store, start)]
    assert compared and all(checkpoint.equal for checkpoint in compared)
    assert whole_hash(again.save()) == whole_hash(learner.save())


def teacher_of(experience: Experience) -> str:
    return next(score.version for score in experience.scores if score.name == "teacher")


def test_distillation_without_a_teacher_is_refused_by_check_and_by_the_trainer_before_a_step(tmp_path: Path) -> None:
    found = written(tmp_path, '[trainer.lanes]\nusual = { loss = "distill" }\n')
    with pytest.raises(
        ConfigError, match=r"needs the log-probabilities of a teacher.*expected a table \[verify\.teacher\]"
    ):
        check_teacher(found)
    result = CliRunner().invoke(app, ["check", "-c", str(tmp_path / "headrace.toml")])
    assert result.exit_code == 2 and "[verify.teacher]" in result.output


def test_a_temperature_at_which_no_endpoint_answers_is_refused(tmp_path: Path) -> None:
    written(tmp_path, PAGE)
    refused = ["check", "-c", str(tmp_path / "headrace.toml"), "--set", "master.temperature=0.7"]
    result = CliRunner().invoke(app, refused)
    assert result.exit_code == 2 and "master.temperature: got 0.7, expected 1" in result.output
    assert CliRunner().invoke(app, refused[:3]).exit_code == 0
