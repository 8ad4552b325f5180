"""The boxes of the flow in one run on the real broker: tasks, workflows, reward models, pipelines, buffer and trainer."""

import asyncio
import itertools
import json
import os
from pathlib import Path

import msgspec
import pytest

from actors.config import EvalSuite
from actors.engines.scripted import ScriptedEngine
from actors.explorer import run_explorer
from actors.loader import load_experts, load_preferences, load_tasks
from actors.taskset import Demonstration, Preference
from infra.bus.kafka import KafkaBus
from infra.bus.log import Log
from infra.chain.insert import ProcessorConfig
from infra.config import Floor, Kafka, Pacing, Use
from infra.metrics import Metrics
from infra.sandbox.sandbox import Sandbox
from schemas import Batch, DeadLetter, EvalResult, Experience, Message, Task, topics
from schemas.errors import SandboxUnavailable
from streams.app import run_worker
from streams.config import CollectConfig, ScoreConfig, StreamsConfig, SynthesizeConfig
from tests.actors.rig import EOS, EXPLORE, MASTER, Heard, folder_store, master, running, until
from tests.actors.turns import SIZE, TurnTokenizer
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

pytestmark = pytest.mark.slow

# One version for the whole test: the scripted learner's weights mean nothing to the scripted engine.
PACING = Pacing(groups_per_step=2, max_staleness=2, steps_per_version=100_000, straggler_s=0.05, reissue_s=30.0)
TESTS = json.dumps({"function": "double", "calls": [{"args": [4], "equals": 8}]})
# Question to what is said to it, well and badly; a question that is told something later has further turns.
SAYS = {
    "37+45=": ("82", "83"),
    "3 km in m": ("3000 m", "3 m"),
    "circles?": ("3", "4"),
    "7*6": ('<tool_call>{"name": "times", "arguments": {"one": 7, "other": 6}}</tool_call>', "41"),
    "guess": ("3", "1"),
    "double": ("def double(n):\n    return 2 * n", "def double(n):\n    return n"),
}
TASKS = [
    Task(id="add", messages=(Message(role="user", content="37+45="),), answer="82", meta={"success_rate": 0.25}),
    Task(id="again", messages=(Message(role="user", content="37+45="),), answer="82"),
    Task(id="units", messages=(Message(role="user", content="3 km in m"),), answer="3000 m", meta={"kind": "number"}),
    Task(id="shapes", messages=(Message(role="user", content="circles?"),), answer="3", meta={"kind": "count"}),
    Task(id="product", messages=(Message(role="user", content="7*6"),), answer="42", workflow="call"),
    Task(id="secret", messages=(Message(role="user", content="guess"),), answer="3", workflow="play"),
    Task(id="program", messages=(Message(role="user", content="double"),), meta={"tests": TESTS}),
    Task(id="dev-add", messages=(Message(role="user", content="37+45="),), answer="82", split="dev"),
]


def times(one: int, other: int) -> str:
    """Multiply two numbers."""
    return str(one * other)


def confined() -> bool:
    """Whether programs can be run here; HEADRACE_REQUIRE_SANDBOX=1 turns its absence into a failure."""
    try:
        Sandbox()
    except SandboxUnavailable:
        assert os.environ.get("HEADRACE_REQUIRE_SANDBOX") != "1"
        return False
    return True


def streams_config(*, code: bool) -> StreamsConfig:
    scores = ("exact", "k12", "math", "vision", *(["code"] if code else []))
    uses = {"math": "Math", "code": "Code"}
    novelty = ProcessorConfig(use="streams.processors.prioritize_novelty:novelty", stage="collect", after="prioritize")
    return StreamsConfig(
        score=tuple(
            ScoreConfig(name=name, use=f"streams.scores.{name}:{uses.get(name, name)}", timeout_s=60) for name in scores
        ),
        processor=(novelty,),
        collect=CollectConfig(deadline_s=3600, synthesize=SynthesizeConfig(on=True, min_reward=0.5)),
    )


EXPLORING = msgspec.structs.replace(
    EXPLORE,
    workflows={
        "call": Use(
            use="actors.workflows.tools:Tools",
            options={"tools": [{"use": f"{__name__}:times"}], "system": "tools: "},
        ),
        "play": Use(
            use="actors.workflows.interact:Interact",
            options={"max_turns": 2, "environment": {"use": "actors.environments.guess:Guess", "options": {"high": 7}}},
        ),
    },
)  # fmt: skip
TRAINING = TrainerConfig(
    lanes={
        "usual": LaneConfig(weight=0.8),
        "expert": LaneConfig(loss="sft", weight=0.1, share=0.5, max_uses=99, draw="priority", optional=True),
        "human": LaneConfig(loss="dpo", weight=0.1, share=0.5, max_uses=99, optional=True),
    }
)


def speaker() -> ScriptedEngine:
    """Answers every question well and badly in turn."""
    turns = {question: itertools.count() for question in SAYS}

    def script(prompt: tuple[int, ...]) -> list[int]:
        heard = TurnTokenizer().decode(prompt)
        if "<tool_response>\n42" in heard:
            return [*TurnTokenizer().encode("42"), EOS]
        question = next(one for one in SAYS if one in heard)
        return [*TurnTokenizer().encode(SAYS[question][next(turns[question]) % 2]), EOS]

    return ScriptedEngine(script=script, num_vocabulary=SIZE)


async def filled(log: Log) -> None:
    """Topics, tasks, demonstrations and preferences, as the loaders write them."""
    await log.create_topics(partitions=2, keep_ms=3_600_000)
    question = (Message(role="user", content="1+1="),)
    await load_tasks(log, TASKS)
    shown = [Demonstration(id=f"d{n}", messages=question, response="2", answer="2") for n in range(4)]
    await load_experts(log, shown, TurnTokenizer())
    liked = [Preference(id=f"p{n}", messages=question, chosen="2", rejected="3") for n in range(4)]
    await load_preferences(log, liked, TurnTokenizer())


class Flow:
    """What went through the topics of one run."""

    def __init__(self, log: Log) -> None:
        names = (topics.TASKSET, topics.VERIFIED, topics.BUFFER, topics.BATCHES, topics.EVALS, topics.DEAD_LETTERS)
        self.heard = {topic.name: Heard(log, topic) for topic in names}

    def experiences(self, topic: topics.Topic) -> list[Experience]:
        return self.heard[topic.name].experiences

    def of(self, topic: topics.Topic, kind: type) -> list:  # type: ignore[type-arg]
        return self.heard[topic.name].of(kind)

    def is_whole(self, wanted: set[str]) -> bool:
        """Every task was buffered, every lane was trained, the eval has its result."""
        buffered = {one.group.rpartition(".")[0] for one in self.experiences(topics.BUFFER)}
        lanes = {item.lane for batch in self.of(topics.BATCHES, Batch) for item in batch.items}
        made = any(one.origin == "synthesize" for one in self.experiences(topics.BUFFER))
        return wanted <= buffered and len(lanes) == 3 and made and bool(self.of(topics.EVALS, EvalResult))


async def run_flow(kafka: str, app: str, folder: Path, *, code: bool) -> Flow:
    """All roles in this process, on the broker, until everything came through."""
    floor = Floor(app=app, kafka=Kafka(bootstrap_servers=kafka), pacing=PACING, folder=folder)
    store = folder_store(folder)
    log = Log(KafkaBus(kafka), app, store=store)
    await log.bus.start()
    await filled(log)
    flow = Flow(log)
    config = msgspec.structs.replace(
        MASTER, max_tokens=120, curriculum="success", evals=(EvalSuite(suite="dev", tasks=1),)
    )
    stop = asyncio.Event()
    streams = run_worker(
        floor, streams_config(code=code), bootstrap=kafka, store=store, metrics=Metrics("process"), stop=stop
    )
    explorer = run_explorer(
        floor, EXPLORING, log=log, store=store, engine=speaker(), tokenizer=TurnTokenizer(), stop_tokens=(EOS,),
        metrics=Metrics("explore"), stop=asyncio.Event(), instance="explore/test",
    )  # fmt: skip
    trainer = run_trainer(
        floor, TRAINING, log=log, store=store, learner=ScriptedLearner(), metrics=Metrics("train"), stop=asyncio.Event()
    )
    wanted = {"add", "units", "shapes", "product", "secret", *(["program"] if code else [])}
    listening = [asyncio.create_task(one.listen()) for one in flow.heard.values()]
    working = asyncio.create_task(streams)
    roles = [master(log, config, PACING), asyncio.create_task(explorer), asyncio.create_task(trainer)]
    async with running(*roles, *listening):
        await until(lambda: working.done() or flow.is_whole(wanted), seconds=120)
    stop.set()
    await working
    await log.bus.close()
    return flow


def test_every_box_of_the_flow_does_its_part(kafka: str, app_name: str, tmp_path: Path) -> None:
    code = confined()
    flow = asyncio.run(run_flow(kafka, app_name, tmp_path, code=code))

    taskset = {one.id: one for one in flow.of(topics.TASKSET, Task)}
    assert taskset["add"].difficulty == 0.75 and "again" not in taskset
    assert "duplicate task" in {one.reason for one in flow.of(topics.DEAD_LETTERS, DeadLetter)}

    verdicts: dict[str, dict[str, set[float]]] = {}
    for one in flow.experiences(topics.VERIFIED):
        for score in one.scores:
            verdicts.setdefault(one.group.rpartition(".")[0], {}).setdefault(score.name, set()).add(score.value)
    assert verdicts["add"]["exact"] == verdicts["add"]["math"] == {0.0, 1.0}
    assert verdicts["units"]["k12"] == verdicts["shapes"]["vision"] == {0.0, 1.0}
    assert 1.0 in verdicts["secret"]["environment"]
    assert verdicts["product"]["exact"] == {0.0, 1.0}
    assert not code or verdicts["program"]["code"] == {0.0, 1.0}

    buffered = flow.experiences(topics.BUFFER)
    assert {one.lane for one in buffered} == {"usual", "expert", "human"}
    called = [one for one in buffered if one.group.startswith("product.") and one.lane == "usual"]
    assert {one.meta["tool_calls"] for one in called} == {0, 1}
    judged = [one for one in buffered if one.lane == "usual"]
    assert all(one.advantage is not None and "novelty@1" in one.stamps for one in judged)
    assert len({one.priority for one in judged if one.group.startswith("add.")}) > 1, "the second time is less new"

    (result, *_) = flow.of(topics.EVALS, EvalResult)
    assert (result.suite, result.version, result.num_tasks) == ("dev", 0, 1)
