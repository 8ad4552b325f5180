"""Every box of the flow at once on the real broker: from the rows of a file to the weights that are loaded again."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from string import Template
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from actors.engines.engine import Chunk, Completion, OnChunk, Sampling
from actors.engines.torch import TorchEngine
from actors.master.master import run_master
from actors.rollout.explorer import run_explorer
from infra.cli.demo.char_model import Size, build_char_model
from infra.cli.main import app
from infra.cli.options import SettingsFile
from infra.cli.run.up import role_child
from infra.cli.settings import Settings, load_settings
from infra.local.supervisor import Supervisor
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.model.model import Tokenizer, folder_tensors, load_tokenizer
from infra.store.images import Pixels
from infra.store.store import Store
from schemas import Batch, Closure, DeadLetter, DropMarker, EvalResult, Experience, Progress, Span, Task, topics
from schemas.ids import task_of
from tests.actors.rig import TopicArrivals, folder_store, running, until
from tests.e2e.crash_loop import last_words
from tests.http_endpoint import http_endpoint
from tests.infra.sandbox.confining import sandbox_or_skip
from tests.role import role_of
from tests.streams.scores.test_judge_scores import classifier
from tests.tiny_models import TURNS
from trainer.batch.assemble import build_batch
from trainer.journal.checkpoint import load_newest
from trainer.learners.torch import TorchLearner
from trainer.train import run_trainer

pytestmark = pytest.mark.slow

TESTS = json.dumps({"function": "double", "calls": [{"args": [4], "equals": 8}]})
# What is said in answer to a prompt that holds a text, in turn; the last one of the list that fits.
SAYS = (
    ("37+45=", ("82", "83")),
    ("10+1=", ("11",)),
    ("double", ("def double(n):\n    return 2 * n", "def double(n):\n    return n")),
    ("price?", ("7", "8")),
    ("arithmetic problem", ("-4", "4")),
    ("walk", ("right", "left")),
    (
        "7*6",
        (
            '<tool_call>{"name": "python", "arguments": {"code": "print(7*6)"}}</tool_call>',
            '<tool_call>{"name": python}</tool_call>',
        ),
    ),
    ("<tool_response>\n42", ("42",)),
    ("<tool_response>\nerror: not JSON", ("41",)),
)
TASKS: tuple[dict[str, Any], ...] = (
    {"id": "add", "prompt": " 37+45= ", "answer": "82", "meta": {"success_rate": 0.25}},
    {"id": "twin", "prompt": "37+45=", "answer": "82"},  # in the partition of add, behind it
    {"id": "untested", "prompt": "halve", "answer": "n / 2", "workflow": "check"},
    {"id": "program", "prompt": "double", "workflow": "check", "meta": {"tests": TESTS}},
    {"id": "product", "prompt": "7*6", "answer": "42", "workflow": "call"},
    {"id": "walk", "prompt": "walk", "workflow": "walk"},
    {"id": "shop", "prompt": "price?", "answer": "7", "workflow": "shop"},
    {"id": "lost", "prompt": "lost", "workflow": "lost"},
    {"id": "dev-add", "prompt": "10+1=", "answer": "11", "split": "dev"},
)  # fmt: skip
ASKED = {"prompt": "1+1="}
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "tasks": TASKS,
    "experts": (
        *({**ASKED, "id": f"shown-{n}", "response": "2", "answer": "2"} for n in range(4)),
        {**ASKED, "id": "long", "response": "2" * 600},
    ),
    "pairs": (
        *({**ASKED, "id": f"liked-{n}", "chosen": "2", "rejected": "3"} for n in range(4)),
        {**ASKED, "id": "alike", "chosen": "2", "rejected": "2"},
    ),
}
RIDDLE = "chain_sum-1-0"  # "4 - 1 - 7 ="
DRAWN = frozenset({"add", "program", "product", "walk", "shop", RIDDLE})
PLUGIN = '''
import msgspec
from headrace import Experience, Outcome, Task, processor

@processor(version=1)
def arranged(task: Task) -> Task:
    """A generator's tasks are asked by its environment."""
    return msgspec.structs.replace(task, workflow="riddle" if "generator" in task.meta else task.workflow)

@processor(version=1)
def reserved(experience: Experience) -> Experience:
    """What a file shows is drawn half as often as what was made of rollouts."""
    return msgspec.structs.replace(experience, priority=0.5) if experience.origin == "load" else experience

@processor(version=3)
def noticed(experience: Experience) -> Experience:
    """Passes everything; its stamp says from when on."""
    return experience

class Corridor:
    """The goal is one step to the right; every step costs."""

    async def reset(self, task: Task, *, seed: int) -> Outcome:
        return Outcome(observation="@G")

    async def step(self, action: str) -> Outcome:
        arrives = action == "right"
        return Outcome(
            observation="" if arrives else "@G",
            reward=0.8 if arrives else -0.2,
            end="terminal" if arrives else None,
        )
'''
NOTICED = '\n[[processor]]\nuse = "whole:noticed"\nstage = "verify"\nafter = "validate"\n'


def change_chain(file: Path) -> None:
    """Insert a processor behind `validate`, as with an editor."""
    file.write_text(file.read_text() + NOTICED)


def prepare(folder: Path, app: str, broker: str, services: str) -> Path:
    """Write settings, plugin, rows and models. Returns the TOML."""
    (folder / "plugins").mkdir()
    (folder / "plugins" / "whole.py").write_text(PLUGIN)
    file = folder / "headrace.toml"
    settings = Template(Path(__file__).with_name("whole_system.toml").read_text())
    file.write_text(settings.substitute(app=app, broker=broker, services=services, folder=folder))
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{no row\n")
    build_char_model(folder / "model", 3, TURNS, Size(hidden=64, layers=2))
    classifier(folder / "quality", 0.01, TURNS)
    return file


@contextmanager
def services() -> Iterator[str]:
    """A judge, a grader by rubric and a shop to play in, at /judge, /rubric and /shop of the address."""
    wanted: dict[str, str] = {}  # by episode

    def answered(path: str, asked: Any) -> object:
        if path == "/shop/reset":
            wanted[asked["episode"]] = asked["task"]["answer"]
            return {}
        if path == "/shop/step":
            return {"reward": float(asked["action"] == wanted[asked["episode"]]), "end": "terminal"}
        reply = {"/judge/chat/completions": {"grade": 8}, "/rubric/chat/completions": {"met": [True, False]}}[path]
        return {"choices": [{"message": {"role": "assistant", "content": json.dumps(reply)}}]}

    with http_endpoint(lambda path, _, body: (200, json.dumps(answered(path, json.loads(body))).encode())) as address:
        yield address


class RecitingEngine(TorchEngine):
    """Says `answer_to` a prompt, or samples where that is ""; logprobs, versions and reloads are those of the model."""

    def __init__(self, *, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(model=model, threads=1)
        self._tokenizer = tokenizer

    def answer_to(self, heard: str) -> str:
        raise NotImplementedError

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        text = self.answer_to(self._tokenizer.decode(prompt))
        if not text:
            return await super().generate(prompt, sampling, on_chunk=on_chunk, images=images)
        tokens = (*self._tokenizer.encode(text), *self._tokenizer.eos_ids)
        version = -1
        while version != self.version:  # a reload in between: once more, under one policy
            version = self.version
            logprobs = (await self.score_tokens([*prompt, *tokens]))[-len(tokens) :]
        if on_chunk is not None:
            on_chunk(Chunk(tokens, logprobs, version))
        span = Span(0, len(tokens), version, sampling.temperature, sampling.temperature == 1.0)
        return Completion(tokens=tokens, logprobs=logprobs, spans=(span,), stopped=True)


class WholeEngine(RecitingEngine):
    """Says what SAYS has for a prompt, its answers in turn."""

    def __init__(self, *, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(model=model, tokenizer=tokenizer)
        self._turns: dict[str, int] = {}

    def answer_to(self, heard: str) -> str:
        texts = [says for mark, says in SAYS if mark in heard][-1]
        turn = self._turns[heard] = self._turns.get(heard, -1) + 1
        return texts[turn % len(texts)]


HEARD = (
    topics.TASKSET, topics.EXPERIENCES, topics.VERIFIED, topics.BUFFER, topics.BATCHES, topics.EVALS, topics.PROGRESS,
    topics.REPORTS, topics.POLICIES, topics.DEAD_LETTERS,
)  # fmt: skip
LANES = {"usual", "expert", "human"}


class Flow:
    """Records of the topics."""

    def __init__(self, log: Log) -> None:
        self.heard = {topic: TopicArrivals(log, topic) for topic in HEARD}

    def of(self, topic: topics.Topic, kind: type) -> list:  # type: ignore[type-arg]
        return self.heard[topic].of(kind)

    def experiences(self, topic: topics.Topic, task: str = "") -> list[Experience]:
        return [
            experience for experience in self.heard[topic].experiences if not task or task_of(experience.group) == task
        ]

    def scores(self, task: str, name: str) -> set[float]:
        """Values of a score on the answers to a task, to two digits."""
        found = (item.score(name) for item in self.experiences(topics.VERIFIED, task))
        return {round(value, 2) for value in found if value is not None}

    @property
    def sampled(self) -> list[Experience]:
        """Buffered rollouts."""
        return [item for item in self.experiences(topics.BUFFER) if item.lane == "usual"]

    def turned(self) -> bool:
        """Every task was buffered, every lane trained, experts by priority; an eval has its result, a new policy sampled."""
        items = [item for batch in self.of(topics.BATCHES, Batch) for item in batch.items]
        return (
            {task_of(entry.group) for entry in self.sampled} >= DRAWN
            and any(task_of(each.group) == "lost" for each in self.of(topics.PROGRESS, Closure))
            and {item.lane for item in items} == LANES
            and any(item.weight != 1.0 for item in items if item.lane == "expert")
            and bool(self.of(topics.EVALS, EvalResult))
            and any(span.version > 0 for one in self.sampled for span in one.spans)
        )

    def noticed(self) -> bool:
        """True if the trainer used records of the changed chain."""
        trained = {item.id for batch in self.of(topics.BATCHES, Batch) for item in batch.items}
        return any("noticed@3" in entry.stamps and entry.id in trained for entry in self.sampled)


def command(file: Path, *arguments: str) -> Result:
    """Run a command of the command line."""
    result = CliRunner().invoke(app, [*arguments, "-c", str(file)], env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result


def load(file: Path) -> None:
    """Topics and rows, as a person brings them in; rows that are no good are named, and the others loaded."""
    command(file, "check", "--create")
    passed_over = {"tasks": "", "experts": "demonstration long: got 606 tokens", "pairs": "pair alike: got equal sides"}
    for kind, named in passed_over.items():
        rows = file.with_name(f"{kind}.jsonl")
        said = command(file, "load", kind, str(rows)).output
        assert named in said and f"{rows}:{len(ROWS[kind]) + 1}: " in said and "broken and passed over" in said
    gym = "actors.tasksets.reasoning_gym:reasoning_gym"
    options = [argument for item in ("generator=chain_sum", "size=1", "seed=1") for argument in ("--option", item)]
    command(file, "load", "tasks", "--use", gym, *options)


@asynccontextmanager
async def roles(settings: Settings, log: Log, store: Store) -> AsyncIterator[None]:
    """Master, explorer and trainer; they stop in order when the block ends."""
    tokenizer = load_tokenizer(settings.model_path)
    stop = asyncio.Event()
    role = lambda name: role_of(name, settings, log, store, stop=stop)  # noqa: E731
    master = run_master(role("master"), settings.master)
    engine = WholeEngine(model=settings.model_path, tokenizer=tokenizer)
    explorer = run_explorer(role("explore"), settings.explore, engine, tokenizer, tokenizer.eos_ids)
    learner = TorchLearner(settings.model_path, settings.trainer, device="cpu")
    trainer = run_trainer(role("train"), settings.trainer, learner, chain=build_batch(settings.processor))
    tasks = [asyncio.create_task(role) for role in (master, explorer, trainer)]
    async with running(*tasks):
        yield
        stop.set()
        await asyncio.wait(tasks, timeout=60)


async def turn(file: Path, settings: Settings, store: Store) -> tuple[Flow, Result]:
    """Let the loop turn, change a chain under it, and let it turn on; what went through, and the status then."""
    log = Log(KafkaBus(settings.kafka.bootstrap_servers), settings.app, store=store)
    await log.bus.start()
    flow = Flow(log)
    worker = role_child(settings, SettingsFile(file), "process")
    listening = [asyncio.create_task(item.listen()) for item in flow.heard.values()]
    async with running(*listening), Supervisor([worker]) as first:
        await until(lambda: len(flow.of(topics.TASKSET, Task)) == len(DRAWN) + 2, seconds=90)
        async with roles(settings, log, store):
            await until(flow.turned, seconds=90)
            await first.stop()
            change_chain(file)
            async with Supervisor([worker]):
                await until(flow.noticed, seconds=90)
                async with asyncio.timeout(60):  # the worker says what it holds in its next report
                    status = await asyncio.to_thread(command, file, "status", "--json")
                    while "verify" not in json.loads(status.stdout)["chains"]:
                        status = await asyncio.to_thread(command, file, "status", "--json")
    await log.bus.close()
    return flow, status


def test_every_box_does_its_part_and_a_chain_is_changed_while_the_others_run(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    sandbox_or_skip()
    store = folder_store(tmp_path / "store")
    with services() as address:
        file = prepare(tmp_path, app_name, kafka, address)
        load(file)
        try:
            flow, status = asyncio.run(turn(file, load_settings(file), store))
        except AssertionError as error:
            raise AssertionError(f"{error}{last_words(tmp_path)}") from error
    tasks_were_prepared(flow)
    workflows_ran(flow)
    answers_were_judged(flow)
    experiences_were_arranged(flow)
    batches_were_trained(flow)
    critic_and_reference_took_part(store, app_name, tmp_path / "model")
    chain_was_changed(flow, json.loads(status.stdout))
    assert json.loads(command(file, "audit", "--json").stdout)["clean"]


def tasks_were_prepared(flow: Flow) -> None:
    """Cleaned, deduplicated, filtered, rated, and arranged by the plugin."""
    taskset = {item.id: item for item in flow.of(topics.TASKSET, Task)}
    assert taskset["add"].messages[0].content == "37+45=" and taskset["add"].difficulty == 0.75
    assert taskset[RIDDLE].workflow == "riddle"
    letters = {(entry.stage, entry.reason) for entry in flow.of(topics.DEAD_LETTERS, DeadLetter)}
    assert {("tasks", "duplicate task"), ("tasks", "task incomplete")} <= letters
    assert not {"twin", "untested"} & taskset.keys()


def workflows_ran(flow: Flow) -> None:
    """Converse, tools with a sandbox, a grid by react, a service, a generator; a service that is away loses its own group."""
    raw = flow.experiences(topics.EXPERIENCES)
    assert {task_of(one.group) for one in raw if not one.suite} == DRAWN
    stubs = [item for item in flow.of(topics.VERIFIED, DropMarker) if task_of(item.group) == "lost"]
    assert stubs and {stub.reason for stub in stubs} == {"episode failed"}, "its environment is away"
    ended = {entry.outcome for entry in flow.of(topics.PROGRESS, Closure) if task_of(entry.group) == "lost"}
    assert ended == {"dropped"}
    called = [each for each in raw if task_of(each.group) == "product"]
    assert {(one.notes["tool_calls"], one.notes["tool_errors"]) for one in called} == {(1, 0), (1, 1)}
    assert any("<tool_response>\n42\n" in one.messages[-2].content for one in called), "the program ran"
    assert any("error: not JSON" in one.messages[-2].content for one in called), "what is no JSON is told"
    walked = [sum(score.value for score in one.scores) for one in raw if task_of(one.group) == "walk"]
    assert {round(value, 1) for value in walked} >= {0.8, 0.6}, "one step less is worth more"
    assert flow.scores("shop", "environment") == flow.scores(RIDDLE, "environment") == {0.0, 1.0}


def answers_were_judged(flow: Flow) -> None:
    """Each reward model where it has something to say, and nowhere else."""
    right_and_wrong = {0.0, 1.0}
    assert flow.scores("add", "exact") == flow.scores("add", "math") == right_and_wrong
    assert flow.scores("program", "code") == right_and_wrong
    assert flow.scores("add", "code") == flow.scores("program", "exact") == set()
    for task in DRAWN:
        assert flow.scores(task, "judge") == {0.8} and flow.scores(task, "rubric") == {0.5}
        assert flow.scores(task, "away") == set(), "a judge that is down says nothing, and loses nothing"
        assert all(0.0 < value < 1.0 for value in flow.scores(task, "quality") or {0.0})
    models = {
        score.version for item in flow.experiences(topics.VERIFIED) for score in item.scores if score.name == "quality"
    }
    assert models == {"2"}
    counted = {
        name for entry in flow.of(topics.REPORTS, Progress) if entry.role == "process" for name in entry.counters
    }
    assert any("scores_absent" in name and "away" in name and "judge unavailable" in name for name in counted)


def experiences_were_arranged(flow: Flow) -> None:
    """Rewarded, compared, prioritized, copied as demonstrations; rows of people beside them."""
    assert all(entry.reward is not None and entry.advantage and "novelty@1" in entry.stamps for entry in flow.sampled)
    priorities = {task: {each.priority for each in flow.sampled if task_of(each.group) == task} for task in DRAWN}
    assert any(len(found) > 1 for found in priorities.values()), "what comes again is less new"
    buffered = flow.experiences(topics.BUFFER)
    assert {one.lane for one in buffered} == LANES
    made = [item for item in buffered if item.origin == "synthesize"]
    assert made and all(one.score("judge") == 0.8 and one.parent for one in made)
    assert {one.task for one in buffered if one.lane == "human"} == {f"liked-{n}" for n in range(4)}


def batches_were_trained(flow: Flow) -> None:
    """Centred by the batch chain, on the very logprobs of the policy; new weights sampled, and an eval was asked of some."""
    batches = flow.of(topics.BATCHES, Batch)
    for batch in batches:
        usual = [item.advantage for item in batch.items if item.lane == "usual"]
        assert abs(sum(usual)) < 1e-3 < max(usual)
        assert {item.weight for item in batch.items if item.lane != "expert"} == {1.0}
    *_, told = [entry.gauges for entry in flow.of(topics.REPORTS, Progress) if entry.role == "train"]
    assert told["critic/value_loss"] > 0.0 and told["mismatch_abs_max_run"] < 1e-4
    assert {span.version for each in flow.sampled for span in each.spans} >= {0, 1}
    assert {one.suite for one in flow.of(topics.EVALS, EvalResult)} == {"dev"}


def critic_and_reference_took_part(store: Store, run: str, model: Path) -> None:
    """The policy and its critic moved away from the model they began as, the reference did not."""
    checkpoint = load_newest(store, run)
    assert checkpoint is not None
    state = {name: bytes(tensor.data) for name, tensor in checkpoint.learner.items()}
    for name, tensor in folder_tensors(model).items():
        assert state[f"reference/{name}"] == bytes(tensor.data) != state[f"model/{name}"]
    assert any(name.startswith("critic/") for name in state)


def chain_was_changed(flow: Flow, status: dict[str, dict[str, dict[str, str]]]) -> None:
    """Records from before the change lack the new step's stamp, later ones have it; status shows it for each partition."""
    stamped = ["noticed@3" in item.stamps for item in flow.sampled]
    assert not stamped[0] and any(stamped) and set(status["chains"]["verify"]) == {"0", "1"}
    assert all("validate@1 noticed@3 " in chain for chain in status["chains"]["verify"].values())
