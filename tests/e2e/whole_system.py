"""One app with every box of the flow switched on: its settings, its plugin, and the services it asks."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.engines.engine import Completion, OnChunk, Sampling
from actors.engines.torch import TorchEngine
from infra.cli.demo.char_model import CHARACTERS, TURNS_TEMPLATE, Size, Vocabulary, build_char_model
from infra.model.model import Tokenizer
from infra.store.images import Pixels
from schemas import Span
from tests.http_endpoint import http_endpoint
from tests.streams.scores.test_judge_scores import classifier

VOCABULARY = Vocabulary(words=CHARACTERS, pattern=r"[\s\S]", chat_template=TURNS_TEMPLATE)
TESTS = json.dumps({"function": "double", "calls": [{"args": [4], "equals": 8}]})
# What is said in answer to a prompt that holds a text, in turn; the last one of the list that fits.
SAYS = (
    ("37+45=", ("82", "83")),
    ("10+1=", ("11",)),
    ("double", ("def double(n):\n    return 2 * n", "def double(n):\n    return n")),
    ("price?", ("7", "8")),
    ("arithmetic problem", ("-4", "4")),
    ("walk", ("Thought: east.\nAction: right", "Thought: west.\nAction: left")),
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
    {"id": "walk", "prompt": "walk", "workflow": "walk", "meta": {"map": "SG"}},
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
from headrace import Experience, Task, processor

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
'''
# At port 9 nobody listens. The first seven groups are of seven different tasks.
SETTINGS = """
app = "{app}"
plugins = ["plugins"]
kafka = {{ bootstrap_servers = "{broker}", partitions = 2 }}
policy = {{ model = "model" }}
pacing = {{ groups_per_step = 3, max_staleness = 1, straggler_s = 0.2 }}

[master]
num_episodes = 2
max_tokens = 120
seed = 409
report_s = 0.2
evals = [{{ suite = "dev", tasks = 1 }}]

[explore]
report_s = 0.2
[explore.workflows]
check = {{ use = "actors.rollout.workflow:converse" }}
[explore.workflows.call]
use = "actors.rollout.workflows.tools:Tools"
options = {{ tools = [{{ use = "actors.rollout.tools.python:Python" }}], system = "call: " }}
[explore.workflows.walk]
use = "actors.rollout.workflows.interact:Interact"
[explore.workflows.walk.options]
max_turns = 3
environment = {{ use = "actors.rollout.environments.grid:Grid", options = {{ step_cost = 0.2 }} }}
agent = {{ use = "actors.rollout.agent:React", options = {{ system = "think, act. " }} }}
[explore.workflows.shop]
use = "actors.rollout.workflows.interact:Interact"
[explore.workflows.shop.options]
environment = {{ use = "actors.rollout.environments.http:HttpEnvironment", options = {{ url = "{services}/shop" }} }}
[explore.workflows.lost]
use = "actors.rollout.workflows.interact:Interact"
[explore.workflows.lost.options]
environment = {{ use = "actors.rollout.environments.http:HttpEnvironment", options = {{ url = "http://127.0.0.1:9" }} }}
[explore.workflows.riddle]
use = "actors.rollout.workflows.interact:Interact"
[explore.workflows.riddle.options]
environment = {{ use = "actors.rollout.environments.reasoning_gym:ReasoningGym" }}

[tasks]
filter = {{ workflows = {{ check = ["meta.tests"] }} }}
[[processor]]
use = "whole:arranged"
stage = "tasks"

[[score]]
name = "exact"
use = "streams.scores.exact:exact"
timeout_s = 60
[[score]]
name = "math"
use = "streams.scores.math:Math"
timeout_s = 60
[[score]]
name = "code"
use = "streams.scores.code:Code"
timeout_s = 60
[[score]]
name = "judge"
use = "streams.scores.llm_judge:Judge"
options = {{ endpoint = {{ url = "{services}/judge", model = "j" }} }}
[[score]]
name = "away"
use = "streams.scores.llm_judge:Judge"
options = {{ endpoint = {{ url = "http://127.0.0.1:9/v1", model = "j", attempts = 1 }} }}
[[score]]
name = "rubric"
use = "streams.scores.llm_judge:Rubric"
options = {{ endpoint = {{ url = "{services}/rubric", model = "j" }}, criteria = ["short", "polite"] }}
[[score]]
name = "quality"
use = "streams.scores.model:Model"
timeout_s = 60
options = {{ folder = "{folder}/quality" }}

[reward]
blend = {{ exact = 1, math = 1, code = 1, environment = 1, judge = 0.5, rubric = 0.5, quality = 0.1 }}

[collect]
deadline_s = 3600
synthesize = {{ on = true, min_reward = 0.5 }}
[[processor]]
use = "streams.processors.prioritize:novelty"
stage = "collect"
after = "prioritize"
[[processor]]
use = "whole:reserved"
stage = "verify"

[trainer]
learning_rate = 1e-5
critic = {{ learning_rate = 1e-4 }}
tensorboard = ""
[trainer.lanes]
usual = {{ loss = "ppo", weight = 0.8 }}
expert = {{ loss = "sft", weight = 0.1, share = 0.5, max_uses = 99, draw = "priority", optional = true }}
human = {{ loss = "dpo", weight = 0.1, share = 0.5, max_uses = 99, optional = true }}
[[processor]]
use = "trainer.processors:normalize_advantages"
stage = "batch"
"""
NOTICED = '\n[[processor]]\nuse = "whole:noticed"\nstage = "verify"\nafter = "validate"\n'


def change_chain(file: Path) -> None:
    """Insert a processor behind `validate`, as with an editor."""
    file.write_text(file.read_text() + NOTICED)


def prepare(folder: Path, app: str, broker: str, services: str) -> Path:
    """Write settings, plugin, rows and models. Returns the TOML."""
    (folder / "plugins").mkdir()
    (folder / "plugins" / "whole.py").write_text(PLUGIN)
    file = folder / "headrace.toml"
    file.write_text(SETTINGS.format(app=app, broker=broker, services=services, folder=folder))
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{no row\n")
    build_char_model(folder / "model", 3, VOCABULARY, Size(hidden=64, layers=2))
    classifier(folder / "quality", 0.01, VOCABULARY)
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


class Reciting(TorchEngine):
    """Says what SAYS has for a prompt, its answers in turn; logprobs, versions and reloads are those of the model."""

    def __init__(self, *, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(model=model, threads=1)
        self._tokenizer = tokenizer
        self._turns: dict[str, int] = {}

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        heard = self._tokenizer.decode(prompt)
        texts = [says for mark, says in SAYS if mark in heard][-1]
        turn = self._turns.setdefault(heard, 0)
        self._turns[heard] += 1
        tokens = (*self._tokenizer.encode(texts[turn % len(texts)]), *self._tokenizer.eos_ids)
        version = -1
        while version != self.version:  # a reload in between: once more, under one policy
            version = self.version
            logprobs = (await self.score_tokens([*prompt, *tokens]))[-len(tokens) :]
        span = Span(0, len(tokens), version, sampling.temperature, sampling.temperature == 1.0)
        return Completion(tokens=tokens, logprobs=logprobs, spans=(span,), stopped=True)
