"""A trainer of two ranks over a real broker: one is killed, both start again, and every batch is trained once."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from actors.engines.torch import TorchEngine
from infra.cli.commands.init import EXAMPLES
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


MACHINE_STEPS = 8
SETTINGS = """
app = "{app}"
[kafka]
bootstrap_servers = "{kafka}"
partitions = 2
[policy]
model = "model"
[pacing]
groups_per_step = 2
max_staleness = 99
[trainer]
learning_rate = 1e-3
max_steps = {steps}
checkpoint_every = 2
ranks = 2
[trainer.lanes]
usual = {{ loss = "dppo" }}
[trainer.learner]
use = "trainer.learners.deepspeed:DeepSpeedLearner"
options = {{ stage = 2 }}
"""


async def read(kafka: str, app: str, topic: topics.Topic) -> list[object]:
    bus = KafkaBus(kafka, deadline_s=30)
    await bus.start()
    found = [message.value async for message in Log(bus, app).read_all(topic)]
    await bus.close()
    return found


async def train_so_many(kafka: str, app: str, count: int, folder: Path, running: Watched) -> None:
    """Wait until so many batches are in the journal."""
    bus = KafkaBus(kafka, deadline_s=30)
    await bus.start()
    log = Log(bus, app)
    reader = await log.assigned(topics.BATCHES, "beginning")
    found, deadline_s = 0, time.monotonic() + 400
    while found < count:
        assert running.process.poll() is None and time.monotonic() < deadline_s, words(folder)
        found += sum(isinstance(item.value, Batch) for item in await log.read(reader, timeout_s=0.2))
    await reader.close()
    await bus.close()


async def prepare(kafka: str, app: str) -> None:
    bus = KafkaBus(kafka, deadline_s=30)
    await bus.start()
    log = Log(bus, app)
    await log.create_topics(partitions=2, keep_ms=-1)
    for sequence in range(2 * MACHINE_STEPS):
        await log.publish(topics.BUFFER, block(sequence))
    await bus.close()


def words(folder: Path) -> str:
    files = sorted((folder / "logs").glob("*.log"))
    return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)


def start_machine(folder: Path, number: int, port: int) -> Watched:
    """One of two machines, both this one: torchrun with a rank, by the file that operators copy."""
    argv = ("bash", str(EXAMPLES / "machines" / "torchrun.sh"), "--config", str(folder / "headrace.toml"))
    env = {
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1", "NODES": "2", "GPUS": "1",
        "MASTER": "127.0.0.1", "PORT": str(port), "STOP_S": "20", "PET_LOCAL_ADDR": "127.0.0.1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    return start_watched(argv, log=folder / "logs" / f"machine-{number}.log", env=env)


def check_trained_once(kafka: str, app: str) -> None:
    """Every group of the buffer was trained in one step, and every step published."""
    records = asyncio.run(read(kafka, app, topics.BATCHES))
    known = [record for record in records if isinstance(record, Batch | Fence | Skip | Rollback)]
    entries, _ = effective(known, app)
    steps = [entry for entry in entries if isinstance(entry, Batch)]
    assert [each.step for each in steps] == list(range(MACHINE_STEPS))
    trained = [item.id for step in steps for item in step.items]
    assert sorted(trained) == sorted(f"task-{s}.0.0-{e}-0" for s in range(2 * MACHINE_STEPS) for e in range(4))
    events = asyncio.run(read(kafka, app, topics.POLICIES))
    versions = {event.version for event in events if isinstance(event, PolicyEvent) and event.event == "published"}
    assert versions == set(range(MACHINE_STEPS + 1))


def test_two_machines_under_torchrun_train_together_and_start_again_together(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    """The ranks share every row as well: what one machine's GPU cannot hold, two can."""
    pytest.importorskip("deepspeed")
    build_char_model(tmp_path / "model", seed=3)
    (tmp_path / "headrace.toml").write_text(SETTINGS.format(app=app_name, kafka=kafka, steps=MACHINE_STEPS))
    asyncio.run(prepare(kafka, app_name))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = [start_machine(tmp_path, number, port) for number in range(2)]
    try:
        asyncio.run(train_so_many(kafka, app_name, 3, tmp_path, machines[0]))
        log = (tmp_path / "logs" / "machine-1.log").read_text()
        os.kill(int(re.findall(r"started role=train pid=(\d+)", log)[0]), signal.SIGKILL)
        assert [entry.process.wait(400) for entry in machines] == [0, 0], words(tmp_path)
    finally:
        for machine in machines:
            machine.process.terminate()  # ranks of torchrun are in sessions of their own: it ends them when it is asked to
        for item in machines:
            with suppress(subprocess.TimeoutExpired):
                item.process.wait(60)
            item.kill_group()
            item.process.wait()
            item.release()
    for number in range(2):
        log = (tmp_path / "logs" / f"machine-{number}.log").read_text()
        assert len(re.findall(r"started role=train", log)) == 2, words(tmp_path)
    check_trained_once(kafka, app_name)
