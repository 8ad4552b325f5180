"""A run from a settings file to its last step, every role in this process: log in memory, torch engine, torch learner."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from actors.engines.engine import Engine
from actors.master.master import run_master
from actors.rollout.environment import Outcome
from actors.rollout.explorer import run_explorer
from actors.tasksets.loader import load_examples, load_tasks
from actors.tasksets.taskset import Demonstration, Preference
from infra.chain.processor import score
from infra.cli.demo.char_model import Size, build_char_model
from infra.cli.run.roles import check_teacher, implied_options
from infra.cli.settings import Settings, load_settings
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_tokenizer
from infra.settings.plugin import load
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import Experience, Message, Task
from tests.actors.rig import running
from tests.role import role_of
from tests.streams.memory_worker import work
from trainer.batch.assemble import build_batch
from trainer.learners.learner import Learner, open_learner
from trainer.train import run_trainer

SIZE = Size(hidden=32, layers=1)
BASE = """
app = "test"
[policy]
model = "model"
[engine]
use = "actors.engines.torch:TorchEngine"
[pacing]
groups_per_step = 2
straggler_s = 0.05
[explore]
linger_s = 0.01
report_s = 0.05
[master]
num_episodes = 2
max_tokens = 4
report_s = 0.05
[[score]]
name = "odd"
use = "tests.whole_run:odd"
[trainer]
learning_rate = 1e-3
max_steps = 3
min_publish_interval = "0s"
tensorboard = ""
"""


@score(version=1, inline=True)
def odd(experience: Experience) -> float:
    """Something that differs between answers of an untrained model."""
    return float(experience.tokens.sum() % 7) / 6


def written(folder: Path, toml: str, base: str = BASE, size: Size = SIZE) -> Settings:
    """The settings of a file in `folder`, beside a model of one layer. Tables of `toml` come after those of `base`."""
    build_char_model(folder / "model", seed=3, size=size)
    (folder / "headrace.toml").write_text(base + toml)
    return load_settings(folder / "headrace.toml")


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


async def program(task: dict[str, Any], base_url: str, key: str, model: str) -> float:
    """An agent that knows a base URL, and its reward."""
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        answer = await client.chat.completions.create(model=model, messages=task["messages"])
    return len(answer.choices[0].message.content or "") / 4


class Digits:
    """An environment that rewards each turn with its number of digits."""

    def reset(self, task: Task, *, seed: int) -> Outcome:
        return Outcome()

    def step(self, action: str) -> Outcome:
        return Outcome(observation="on", reward=float(sum(map(str.isdigit, action))))


def ask(number: int) -> tuple[Message, ...]:
    return (Message(role="user", content=f"{number}+{number}="),)


async def fill(log: Log, settings: Settings, count: int = 24) -> None:
    """Tasks, and demonstrations and pairs where a lane takes them."""
    tokenizer, lanes = load_tokenizer(settings.model_path), settings.trainer.lanes
    await load_tasks(log, [Task(id=f"add-{n}", messages=ask(n), answer=str(2 * n)) for n in range(1, count)])
    if "expert" in lanes:
        shown = [Demonstration(id=f"d{n}", messages=ask(n), response=str(2 * n)) for n in range(count)]
        await load_examples(log, shown, tokenizer)
    if "human" in lanes:
        pairs = [Preference(id=f"p{n}", messages=ask(n), chosen=str(2 * n), rejected="no") for n in range(count)]
        await load_examples(log, pairs, tokenizer)


async def run_to_end(settings: Settings, log: Log, store: Store, *, roles: Iterable[Any] = ()) -> Learner:
    """Run all roles until the trainer has made its steps; returns the learner. roles: more of them, as coroutines."""
    check_teacher(settings)
    folder = settings.model_path
    tokenizer = load_tokenizer(folder)
    use = settings.engine
    engine: Engine = load(use.use, {"model": folder, **implied_options(settings, use), **use.options}, "engine")
    learner = open_learner(settings.trainer, folder)
    beside = [
        run_master(role_of("master", settings, log, store), settings.gate()),
        run_explorer(role_of("explore", settings, log, store), settings.explore, engine, tokenizer, tokenizer.eos_ids),
        work(log, settings.streams(), settings.folder / "state", model=folder),
        *roles,
    ]
    chain = build_batch(settings.processor)
    training = run_trainer(role_of("train", settings, log, store), settings.trainer, learner, seed=5, chain=chain)
    tasks = [asyncio.create_task(role) for role in (training, *beside)]
    async with running(*tasks), asyncio.timeout(60):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert tasks[0].done(), "a role ended before the trainer"
    return learner


async def memory_log(settings: Settings, store: Store) -> Log:
    log = Log(MemoryBus(), settings.app, store=store)
    await log.create_topics(partitions=1, keep_ms=-1)
    return log


async def trained(settings: Settings, **more: Any) -> tuple[Log, Store, Learner]:
    """A finished run on a new log."""
    store = MemoryStore()
    log = await memory_log(settings, store)
    await fill(log, settings)
    return log, store, await run_to_end(settings, log, store, **more)
