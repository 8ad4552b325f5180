"""A trainer of two ranks over a real broker: one is killed, both start again, and every batch is trained once."""

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from actors.engines.torch import TorchEngine
from infra.cli.demo.char_model import Size, build_char_model
from infra.local.process import Watched, start_watched
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.policies.fetch import PolicyFetcher
from infra.store.directory import DirectoryStore
from schemas import Batch, Block, Fence, PolicyEvent, Rollback, Saved, Skip, Span, make_experience, topics
from schemas.journal import effective
from trainer.journal.checkpoint import places

pytestmark = pytest.mark.full
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
dtype = "bfloat16"
learning_rate = 1e-6
max_steps = 10
checkpoint_every = 2
tensorboard = ""
ranks = 2
[trainer.lanes]
usual = {{ loss = "dppo" }}
[trainer.learner]
use = "trainer.learners.deepspeed:DeepSpeedLearner"
"""
STEPS, GROUP_SIZE = 10, 4
LIMIT_S = 900.0


def test_a_killed_rank_ends_the_group_and_its_checkpoint_and_the_journal_bring_it_back(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    build_char_model(tmp_path / "model", seed=1, size=Size(hidden=128, layers=2))
    (tmp_path / "headrace.toml").write_text(TOML.format(app=app_name, bootstrap=kafka))
    asyncio.run(killed_and_back(tmp_path, kafka, app_name))


async def killed_and_back(folder: Path, bootstrap: str, app: str) -> None:
    bus, store = KafkaBus(bootstrap, deadline_s=30), DirectoryStore(folder / "store")
    await bus.start()
    log = Log(bus, app)
    await log.create_topics(partitions=2, keep_ms=-1)
    blocks = [block(sequence) for sequence in range(2 * STEPS)]
    for each in blocks:
        await log.publish(topics.BUFFER, each)
    argv = (sys.executable, "-m", "infra.cli.main", "train", "--config", str(folder / "headrace.toml"))
    env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = start_watched(argv, log=folder / "train.log", env=env)
    try:
        await checkpointed(folder, log, store, app, running)
        _, second = re.findall(r"ranks started pids=\[(\d+), (\d+)\]", said(folder))[0]
        os.killpg(int(second), signal.SIGKILL)
        await asyncio.to_thread(running.process.wait, LIMIT_S)
    finally:
        running.kill_group()
        running.process.wait()
        running.release()
    assert running.process.returncode == 0, said(folder)
    records = [message.value async for message in log.read_all(topics.BATCHES)]
    journal, _ = effective([each for each in records if isinstance(each, Batch | Fence | Skip | Rollback | Saved)], app)
    steps = [each for each in journal if isinstance(each, Batch)]
    assert [each.step for each in steps] == list(range(STEPS))
    trained = sorted(item.id for step in steps for item in step.items)
    assert trained == sorted(member.id for each in blocks for member in each.experiences)
    published = {
        message.value.version: message.value
        async for message in log.read_all(topics.POLICIES)
        if isinstance(message.value, PolicyEvent) and message.value.event == "published"
    }
    assert sorted(published) == [0, 1, 2, 3, 4, 5], "one at the start, then one each two steps"
    assert await nats_apart(folder, store, published[5]) < 0.05
    await bus.close()


async def checkpointed(folder: Path, log: Log, store: DirectoryStore, app: str, running: Watched) -> None:
    """Wait for a checkpoint of some steps, and a step after it."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        steps = sum([isinstance(message.value, Batch) async for message in log.read_all(topics.BATCHES)])
        if 0 <= max((place.step for place in places(store, app)), default=-1) < steps - 1:
            return
        assert running.process.poll() is None and time.monotonic() < deadline_s, said(folder)
        await asyncio.sleep(0.2)


async def nats_apart(folder: Path, store: DirectoryStore, event: PolicyEvent) -> float:
    """The mean distance of an engine's logprobs of this version from the trainer's."""
    engine = TorchEngine(model=str(folder / "model"), dtype="bfloat16", max_model_len=128)
    await engine.start()
    try:
        policy = await asyncio.to_thread(PolicyFetcher(store, event.policy).fetch, event)
        await engine.load(policy)
        assert policy.probe is not None and engine.version == event.version
        scores = [await engine.score_tokens(tokens) for tokens in policy.probe.sequences]
        return float(np.abs(np.concatenate(scores) - np.concatenate(policy.probe.logprobs)).mean())
    finally:
        await engine.close()


def said(folder: Path) -> str:
    """The last of what the trainer and its ranks wrote."""
    files = [folder / "train.log", *sorted((folder / "logs").glob("*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists())


def block(sequence: int) -> Block:
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
