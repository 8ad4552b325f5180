"""Programs of well-known clients and frameworks, as they are, each trained on a task through the real broker.

One broker, one explorer on the torch engine, one trainer. Words are sampled. Tool calls, which a random model cannot spell, are
recited token by token with the model's own log-probability of each.
"""

import asyncio
import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.master.master import run_master
from actors.rollout.explorer import run_explorer
from infra.cli.demo.char_model import CHARACTERS, Size, Vocabulary, build_char_model
from infra.cli.options import SettingsFile
from infra.cli.run.up import role_child
from infra.cli.settings import Settings, load_settings
from infra.local.supervisor import Supervisor
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.model.model import Tokenizer, folder_tensors, load_into, load_model, load_tokenizer
from infra.policies.fetch import PolicyFetcher
from infra.policies.tensors import Tensor
from infra.store.store import Store
from schemas import Batch, Experience, PolicyEvent, Span, Task, topics
from schemas.ids import task_of
from tests.actors.rig import TopicArrivals, folder_store, running, until
from tests.e2e.crash_loop import last_words
from tests.e2e.test_whole_system_kafka import RecitingEngine, command
from tests.own_sources import ROOT
from tests.role import role_of
from trainer.learners.torch import TorchLearner
from trainer.train import run_trainer

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "clients"
CLIENTS = {path.stem: path for path in sorted(FOLDER.iterdir()) if path.suffix in (".py", ".mjs")}
EPISODES = 2
SETTINGS = """
app = "{app}"
kafka = {{ bootstrap_servers = "{broker}", partitions = 2 }}
policy = {{ model = "model" }}
pacing = {{ groups_per_step = 2, max_staleness = 9, straggler_s = 0.2 }}

[master]
num_episodes = {episodes}
max_tokens = 120
report_s = 0.2
stop = {{ groups = {groups} }}

[explore]
report_s = 0.2
linger_s = 0.2
{workflows}

[reward]
blend = {{ program = 1 }}

[trainer]
learning_rate = 1e-4
tensorboard = ""
[trainer.lanes]
usual = {{ loss = "dppo", weight = 1.0 }}
"""
WORKFLOW = """
[explore.workflows.{name}]
use = "actors.program.workflow:Program"
options = {{ command = {command} }}
"""


PYTHON = ROOT / ".venv" / "agents" / "bin" / "python"


def frameworks_or_skip() -> Path:
    """The Python with the agent frameworks; HEADRACE_REQUIRE_AGENTS=1 turns its absence into a failure."""
    if not PYTHON.exists():
        if os.environ.get("HEADRACE_REQUIRE_AGENTS") == "1":
            pytest.fail(f"HEADRACE_REQUIRE_AGENTS=1, and there is no {PYTHON}: make agents")
        pytest.skip(f"no {PYTHON}: make agents")
    return PYTHON


CONTEXT = 16_384  # smolagents explains itself in five thousand characters
TEMPLATE = """{{ bos_token }}{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role + ':' + (message.content or '') }}{% for call in message.tool_calls %}
<tool_call>
{{ '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
</tool_call>{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
ROW = re.compile(r"row (\d+)")
# What an answer is called that is a tool call too: pydantic-ai's, smolagents'.
FINAL = {"final_result": "row", "final_answer": "answer"}


def build_model(folder: Path) -> Path:
    """A Qwen3 of two layers with one token per character, whose template knows tools."""
    vocabulary = Vocabulary(words=CHARACTERS, pattern=r"[\s\S]", chat_template=TEMPLATE)
    build_char_model(folder, 3, vocabulary, Size(hidden=64, layers=2))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


class CallingEngine(RecitingEngine):
    """Calls `look` where it is offered and was not called, with another row each time; then the final answer's tool, if there
    is one; else it samples. It goes on from a beginning of the answer that a request forces.
    """

    def __init__(self, *, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(model=model, tokenizer=tokenizer)
        self._rows = itertools.count(1)

    def answer_to(self, heard: str) -> str:
        tools, _, said = heard.partition("\n")
        if not tools.removeprefix("<bos>").startswith("["):
            return ""
        rows = ROW.findall(said)
        finals = [name for name in FINAL if f'"name": "{name}"' in tools]
        if rows and not finals:
            return ""
        name = finals[0] if rows else "look"
        argument = {FINAL[name]: int(rows[-1])} if rows else {"row": next(self._rows)}
        text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': argument})}\n</tool_call>"
        for cut in range(len(text), 0, -1):
            if heard.endswith(text[:cut]):
                return text[cut:]
        return text


class TrainedByClient(msgspec.Struct, frozen=True):
    """Contents of the log: experiences by client, their ids that were trained, and the weights of each version."""

    experiences: Mapping[str, list[Experience]]
    trained: frozenset[str]
    weights: Mapping[int, Mapping[str, Tensor]]
    model: Path


def prepare(folder: Path, app: str, broker: str) -> Path:
    """Settings, tasks and the model; returns the TOML. Every client is a workflow, and has a task that names it."""
    python = frameworks_or_skip()
    runs = {name: str(python if path.suffix == ".py" else shutil.which("node")) for name, path in clients().items()}
    workflows = "".join(
        WORKFLOW.format(name=name, command=json.dumps([run, str(CLIENTS[name])])) for name, run in runs.items()
    )
    file = folder / "headrace.toml"
    file.write_text(
        SETTINGS.format(app=app, broker=broker, episodes=EPISODES, groups=len(runs), workflows=workflows),
        encoding="utf-8",
    )
    asked = lambda name: [{"role": "user", "content": f"Which row, {name}?"}]  # noqa: E731
    tasks = [{"id": name, "messages": asked(name), "split": "train", "answer": "1", "workflow": name} for name in runs]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    build_model(folder / "model")
    command(file, "check", "--create")
    command(file, "load", "tasks", str(folder / "tasks.jsonl"))
    return file


def clients() -> dict[str, Path]:
    """Those that this machine can run."""
    return {name: path for name, path in CLIENTS.items() if path.suffix == ".py" or shutil.which("node")}


async def play(file: Path, settings: Settings, store: Store) -> TrainedByClient:
    """One group of each client, collected and trained."""
    log = Log(KafkaBus(settings.kafka.bootstrap_servers), settings.app, store=store)
    await log.bus.start()
    heard = {
        topic: TopicArrivals(log, topic)
        for topic in (topics.TASKSET, topics.EXPERIENCES, topics.BATCHES, topics.POLICIES)
    }
    tokenizer = load_tokenizer(settings.model_path)
    stop = asyncio.Event()

    def trained() -> frozenset[str]:
        return frozenset(item.id for batch in heard[topics.BATCHES].of(Batch) for item in batch.items)

    def is_over() -> bool:
        """Everything was recorded and trained on."""
        found = heard[topics.EXPERIENCES].experiences
        ended = [item for item in found if item.last]
        return len(ended) == EPISODES * len(clients()) and {entry.id for entry in found} <= trained()

    role = lambda name: role_of(name, settings, log, store, stop=stop)  # noqa: E731
    engine = CallingEngine(model=settings.model_path, tokenizer=tokenizer)
    learner = TorchLearner(settings.model_path, settings.trainer, device="cpu")
    listening = [asyncio.create_task(entry.listen()) for entry in heard.values()]
    async with running(*listening), Supervisor([role_child(settings, SettingsFile(file), "process")]):
        # A pass goes over the tasks there are: with fewer at its beginning some would be drawn twice, and others never.
        await until(lambda: len(heard[topics.TASKSET].of(Task)) == len(clients()), seconds=120.0)
        roles = [
            asyncio.create_task(run_master(role("master"), settings.master)),
            asyncio.create_task(run_explorer(role("explore"), settings.explore, engine, tokenizer, tokenizer.eos_ids)),
            asyncio.create_task(run_trainer(role("train"), settings.trainer, learner)),
        ]
        async with running(*roles):
            await until(is_over, seconds=400.0)
            stop.set()
            await asyncio.wait(roles, timeout=60)
        fetcher = PolicyFetcher(store, settings.policy.name)
        weights: dict[int, Mapping[str, Tensor]] = {0: folder_tensors(Path(settings.model_path))}
        for event in heard[topics.POLICIES].of(PolicyEvent):
            if event.event == "published":
                weights[event.version] = dict((await asyncio.to_thread(fetcher.fetch, event)).tensors)
    await log.bus.close()
    by_client: dict[str, list[Experience]] = {}
    for experience in heard[topics.EXPERIENCES].experiences:
        by_client.setdefault(task_of(experience.group), []).append(experience)
    return TrainedByClient(by_client, trained(), weights, Path(settings.model_path))


@pytest.fixture(scope="module")
def run(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> TrainedByClient:
    """One run with all clients."""
    folder = tmp_path_factory.mktemp("clients")
    file = prepare(folder, f"clients-{folder.parent.name}", kafka)
    try:
        return asyncio.run(play(file, load_settings(file), folder_store(folder / "store")))
    except AssertionError as error:
        raise AssertionError(f"{error}{last_words(folder)}") from error


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_an_unmodified_client_is_trained_on_every_token_it_was_given(run: TrainedByClient, client: str) -> None:
    if client not in clients():
        pytest.skip("no node on PATH")
    found = run.experiences[client]
    tokenizer = load_tokenizer(run.model)
    assert {each.episode for each in found} == set(range(EPISODES)) and {one.end for one in found} != {"failed"}
    for episode in range(EPISODES):
        parts = sorted((one for one in found if one.episode == episode), key=lambda one: one.part)
        told = json.loads(str(parts[-1].notes["answer"]))
        replies = [reply for part in parts for reply in replies_of(part, tokenizer)]
        assert len(replies) == told["asked"], "each answer is recorded once"
        assert str(told["said"]) in replies[-1], "what the client read is what was recorded"
        assert all(f'"row": {row}' in "".join(replies) for row in told["calls"])
        assert [part.part_reason for part in parts] == ["", *["history rewritten"] * (len(parts) - 1)]
    assert {item.id for item in found} <= run.trained
    assert any(entry.score("program") for entry in found)


def replies_of(part: Experience, tokenizer: Tokenizer) -> list[str]:
    """The text of each answer of a token sequence."""
    return [tokenizer.decode(part.tokens[span.start : span.stop].tolist()) for span in turns(part)]


def turns(part: Experience) -> list[range]:
    """Places of the answers: a reload within an answer begins a new span."""
    found: list[range] = []
    for span in part.spans:
        if found and found[-1].stop == span.start:
            found[-1] = range(found[-1].start, span.stop)
        else:
            found.append(range(span.start, span.stop))
    return found


def test_every_recorded_logprob_is_that_of_a_plain_forward_of_its_version(run: TrainedByClient) -> None:
    import torch

    module = load_model(str(run.model))
    compared = 0
    for version in sorted(
        {span.version for found in run.experiences.values() for item in found for span in item.spans}
    ):
        load_into(module, run.weights[version])
        for each in (entry for found in run.experiences.values() for entry in found):
            spans = [span for span in each.spans if span.version == version]
            if not spans:
                continue
            ids = torch.tensor(each.tokens.astype(np.int64))[None]
            with torch.inference_mode():
                logits = module(input_ids=ids, use_cache=False).logits[0].float()
            plain = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
            at = places(spans)
            recorded = dict(zip(places(each.spans).tolist(), each.logprobs.tolist(), strict=True))
            np.testing.assert_allclose([recorded[place] for place in at.tolist()], plain[at - 1], atol=1e-4)
            compared += len(at)
    assert compared == sum(one.num_sampled for found in run.experiences.values() for one in found) > 500


def places(spans: Sequence[Span]) -> np.ndarray:
    """Indices of the sampled tokens."""
    return np.concatenate([np.arange(span.start, span.stop) for span in spans])


def test_the_clients_groups_make_steps_whose_versions_are_published(run: TrainedByClient) -> None:
    assert len(run.weights) >= 1 + len(clients()) // 2
