"""Every box of the flow at once on the real broker: from the rows of a file to the weights that are loaded again."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from actors.master.master import run_master
from actors.rollout.explorer import run_explorer
from infra.cli.main import app
from infra.cli.options import SettingsFile
from infra.cli.run.up import role_child
from infra.cli.settings import Settings, load_settings
from infra.local.supervisor import Supervisor
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.model.model import folder_tensors, load_tokenizer
from infra.store.store import Store
from schemas import Batch, Closure, DeadLetter, DropMarker, EvalResult, Experience, Progress, Task, topics
from schemas.ids import task_of
from tests.actors.rig import TopicArrivals, folder_store, running, until
from tests.e2e.demo_run import last_words
from tests.e2e.whole_system import DRAWN, RIDDLE, ROWS, Reciting, change_chain, prepare, services
from tests.infra.sandbox.confining import sandbox_or_skip
from tests.role import role_of
from trainer.batch.assemble import build_batch
from trainer.journal.checkpoint import load_newest
from trainer.learners.torch import TorchLearner
from trainer.train import run_trainer

pytestmark = pytest.mark.slow

HEARD = (
    topics.TASKSET, topics.EXPERIENCES, topics.VERIFIED, topics.BUFFER, topics.BATCHES, topics.EVALS, topics.PROGRESS,
    topics.REPORTS, topics.POLICIES, topics.DEAD_LETTERS,
)  # fmt: skip
LANES = {"usual", "expert", "human"}


class Flow:
    """What went through the topics."""

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
        """What is buffered of rollouts."""
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
        """What came through the changed chain was trained."""
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
    engine = Reciting(model=settings.model_path, tokenizer=tokenizer)
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
    """What was verified before has not the new step's stamp, what came after has; status says so of each partition."""
    stamped = ["noticed@3" in item.stamps for item in flow.sampled]
    assert not stamped[0] and any(stamped) and set(status["chains"]["verify"]) == {"0", "1"}
    assert all("validate@1 noticed@3 " in chain for chain in status["chains"]["verify"].values())
