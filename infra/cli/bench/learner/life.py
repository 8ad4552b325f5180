"""The life of a large learner on two ranks: steps, a checkpoint, SIGKILL, and on to the end; then an engine loads it.

Nothing is made for the occasion: `headrace train` with `trainer.ranks = 2` runs on a real broker and a folder store, and starts
both ranks again when one is killed (the other is killed with it). Figures are read from the journal, from the store and from
the ranks' own words.
"""

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from infra.cli.bench.weights.reload import open_engine
from infra.local.process import Watched, start_watched
from infra.log.log import Log
from infra.store.directory import DirectoryStore
from schemas import Batch, Block, Fence, PolicyEvent, Rollback, Saved, Skip, Span, make_experience, topics
from schemas.journal import Entry, effective

TOML = """
app = "{app}"
[kafka]
bootstrap_servers = "{bootstrap}"
partitions = 2
[policy]
model = "model"
[store]
url = "store"
[pacing]
groups_per_step = 2
max_staleness = 99
steps_per_version = 2
[trainer]
dtype = "{dtype}"
learning_rate = 1e-6
max_steps = {steps}
checkpoint_every = 2
tensorboard = ""
ranks = 2
[trainer.lanes]
usual = {{ loss = "dppo" }}
[trainer.learner]
use = "{learner}"
options = {{ stage = {stage}, reports = "{reports}" }}
"""
LEARNER = "infra.cli.bench.learner.reporting_learner:ReportingLearner"
GROUP_SIZE = 4
LOOK_S = 0.2
LIMIT_S = 3600.0
GIB = 2**30


class LifePlan(msgspec.Struct, frozen=True):
    """What is run.

    hidden, layers: of a random Qwen3 (13·hidden² parameters a layer). stage: of ZeRO. dtype: of its weights. engine:
    what loads the last version. steps: of the optimizer. app: name of the run. bootstrap: of a broker that runs, "" for
    one of its own.

    Example: LifePlan(hidden=2048, layers=9)
    """

    hidden: int = 512
    layers: int = 6
    stage: int = 2
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    engine: str = "torch"
    steps: int = 10
    app: str = "life"
    bootstrap: str = ""


class Life(msgspec.Struct):
    """What was seen while it ran, in seconds since the trainer was started. killed_after: steps journaled at the kill.
    killed_s, ended_s: when.
    """

    killed_after: int = 0
    killed_s: float = 0.0
    ended_s: float = 0.0


def run(plan: LifePlan, say: Callable[[str], object] = print) -> dict[str, float]:
    """The figures; see the module. Raises RuntimeError with the ranks' last words where they do not come to the end."""
    from infra.cli.demo.char_model import Size, build_char_model

    with tempfile.TemporaryDirectory(prefix="headrace-bench-life-") as name, _broker(plan, Path(name)) as bootstrap:
        folder = Path(name)
        say(f"building a random Qwen3, hidden {plan.hidden}, {plan.layers} layers")
        size = Size(hidden=plan.hidden, layers=plan.layers)
        with ProcessPoolExecutor(
            1, mp_context=get_context("spawn")
        ) as other:  # which gives its memory back to the ranks
            other.submit(build_char_model, folder / "model", seed=1, size=size).result()
        reports = folder / "reports"
        settings = TOML.format(
            **msgspec.structs.asdict(plan) | {"bootstrap": bootstrap, "reports": reports, "learner": LEARNER}
        )
        (folder / "headrace.toml").write_text(settings)
        life = asyncio.run(_live(plan, folder, bootstrap, say))
        journal, events = asyncio.run(_read(plan, bootstrap))
        figures = _found(plan, life, journal, events) | _reported(reports, journal)
        last = max((one for one in events if one.event == "published"), key=lambda one: one.version)
        say(f"the {plan.engine} engine loads version {last.version}")
        return figures | asyncio.run(_served(plan, folder, last))


@contextmanager
def _broker(plan: LifePlan, folder: Path) -> Iterator[str]:
    from infra.local.broker import EmbeddedKafka

    if plan.bootstrap:
        yield plan.bootstrap
        return
    with EmbeddedKafka(folder / "kafka") as broker:
        yield broker.bootstrap


@asynccontextmanager
async def _log(plan: LifePlan, bootstrap: str) -> AsyncIterator[Log]:
    from infra.log.kafka import KafkaBus

    bus = KafkaBus(bootstrap, deadline_s=30)
    await bus.start()
    try:
        yield Log(bus, plan.app)
    finally:
        await bus.close()


async def _live(plan: LifePlan, folder: Path, bootstrap: str, say: Callable[[str], object]) -> Life:
    """Fill the log, start the ranks, kill one after the first checkpoint, and wait for the end of their second life."""
    async with _log(plan, bootstrap) as log:
        await log.create_topics(partitions=2, keep_ms=-1)
        for sequence in range(2 * plan.steps):
            await log.publish(topics.BUFFER, _block(sequence))
        say(f"2 ranks: {plan.steps} steps, a checkpoint each 4")
        began_s, life = time.monotonic(), Life()
        running = _start(folder)
        try:
            life.killed_after = await _checkpointed(plan, folder, log, running)
            pids = re.findall(r"ranks started pids=\[(\d+), (\d+)\]", _words(folder))[0]
            os.killpg(int(pids[1]), signal.SIGKILL)
            life.killed_s = time.monotonic() - began_s
            say(f"SIGKILL after {life.killed_after} steps; both start again")
            await asyncio.to_thread(running.process.wait, LIMIT_S)
        finally:
            running.kill_group()
            running.process.wait()
            running.release()
        life.ended_s = time.monotonic() - began_s
        if running.process.returncode:
            raise RuntimeError(f"headrace train ended with {running.process.returncode}:\n{_words(folder)}")
    return life


def _start(folder: Path) -> Watched:
    argv = (sys.executable, "-m", "infra.cli.main", "train", "--config", str(folder / "headrace.toml"))
    env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    return start_watched(argv, log=folder / "train.log", env=env)


async def _checkpointed(plan: LifePlan, folder: Path, log: Log, running: Watched) -> int:
    """Wait for a checkpoint of some steps, and one step more; how many are journaled then."""
    from trainer.journal.checkpoint import places

    store = DirectoryStore(folder / "store")
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        steps = sum([isinstance(one.value, Batch) async for one in log.read_all(topics.BATCHES)])
        newest = max((one.step for one in places(store, plan.app)), default=-1)
        if 0 <= newest < steps - 1:
            return steps
        if running.process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"no checkpoint with a step after it:\n{_words(folder)}")
        await asyncio.sleep(LOOK_S)


async def _read(plan: LifePlan, bootstrap: str) -> tuple[list[Entry], list[PolicyEvent]]:
    """What counts of the journal, and every event of a version."""
    async with _log(plan, bootstrap) as log:
        records = [message.value async for message in log.read_all(topics.BATCHES)]
        known = [one for one in records if isinstance(one, Batch | Fence | Skip | Rollback | Saved)]
        events = [message.value async for message in log.read_all(topics.POLICIES)]
        return effective(known, plan.app)[0], [one for one in events if isinstance(one, PolicyEvent)]


def _found(plan: LifePlan, life: Life, journal: Sequence[Entry], events: Sequence[PolicyEvent]) -> dict[str, float]:
    steps = [one for one in journal if isinstance(one, Batch)]
    trained = sorted(item.id for one in steps for item in one.items)
    every = sorted(one.id for sequence in range(2 * plan.steps) for one in _block(sequence).experiences)
    return {
        "steps": float(len(steps)),
        "steps_in_order": float([one.step for one in steps] == list(range(plan.steps))),
        "each_experience_trained_once": float(trained == every),
        "steps_before_the_kill": float(life.killed_after),
        "versions": float(len({one.version for one in events if one.event == "published"})),
        "versions_orphaned": float(sum(one.event == "orphaned" for one in events)),
        "first_life_s": life.killed_s,
        "second_life_s": life.ended_s - life.killed_s,
    }


def _reported(folder: Path, journal: Sequence[Entry]) -> dict[str, float]:
    """What the ranks said: which checkpoint the second life began from, to the hash."""
    words = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.iterdir())
    }
    hashes = [one["hash"] for one in words["rank-0"] if "hash" in one]
    saved = {one.sha256: one for one in journal if isinstance(one, Saved)}
    read = saved.get(hashes[0]) if hashes else None
    return {
        "resumed_with_equal_hash": float(read is not None and len(hashes) == 1),
        "steps_in_the_checkpoint": float(0 if read is None else read.step + 1),
        **{f"{rank.replace('-', '_')}_peak_gib": said[-1]["peak_bytes"] / GIB for rank, said in words.items()},
    }


async def _served(plan: LifePlan, folder: Path, event: PolicyEvent) -> dict[str, float]:
    """What an engine makes of the last version. Raises PolicyRefused where it does not agree with the trainer."""
    from infra.policies.fetch import PolicyFetcher

    engine = open_engine(plan.engine, folder / "model", {"dtype": plan.dtype, "max_model_len": 128})
    await engine.start()
    try:
        began_s = time.monotonic()
        policy = await asyncio.to_thread(PolicyFetcher(DirectoryStore(folder / "store"), event.policy).fetch, event)
        await engine.load(policy)
        took_s = time.monotonic() - began_s
        assert policy.probe is not None
        scores = [await engine.score_tokens(tokens) for tokens in policy.probe.sequences]
        apart = [
            abs(mine - other)
            for one, expected in zip(scores, policy.probe.logprobs, strict=True)
            for mine, other in zip(one, expected, strict=True)
        ]
        return {
            "parameters_m": sum(tensor.num_bytes for tensor in policy.tensors.values()) / _width(plan) / 1e6,
            "served_version": float(engine.version),
            "engine_fetch_and_load_s": took_s,
            "engine_nats_apart_largest": max(apart),
            "engine_nats_apart_mean": sum(apart) / len(apart),
        }
    finally:
        await engine.close()


def _width(plan: LifePlan) -> int:
    return 2 if plan.dtype == "bfloat16" else 4


def _words(folder: Path) -> str:
    """The last of what the trainer and its ranks wrote."""
    files = [folder / "train.log", *sorted((folder / "logs").glob("*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists())


def _block(sequence: int) -> Block:
    """A group of four answers of unequal lengths."""
    group = f"task-{sequence}.0"
    random = np.random.default_rng(sequence)
    found = []
    for episode in range(GROUP_SIZE):
        num = int(random.integers(1, 12))
        found.append(
            make_experience(
                tokens=[1, 20, 21, *random.integers(30, 60, num).tolist()],
                logprobs=-np.log(128) + random.normal(0, 0.1, num),
                messages=(),
                spans=(Span(3, 3 + num, 0),),
                id=f"{group}.0-{episode}-0",
                group=group,
                episode=episode,
                group_size=GROUP_SIZE,
                sequence=sequence,
                reward=float(episode % 2),
                advantage=float(episode % 2) * 2 - 1,
            )
        )
    return Block(tuple(found))
