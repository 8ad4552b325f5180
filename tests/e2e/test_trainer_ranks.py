"""A trainer of two ranks over a real broker: one is killed, both start again, and every group is trained once."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
ENV = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


def start_train(folder: Path) -> list[Watched]:
    """One machine, whose `headrace train` starts both ranks, and is started again as a container is."""
    again = 'until "$0" -m infra.cli.main train --config "$1"; do sleep 1; done'
    argv = ("bash", "-c", again, sys.executable, str(folder / "headrace.toml"))
    return [start_watched(argv, log=folder / "logs" / "machine-0.log", env=ENV)]


def start_torchrun(folder: Path) -> list[Watched]:
    """Two machines, both this one: torchrun with a rank, by the file that operators copy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = ("bash", str(EXAMPLES / "machines" / "torchrun.sh"), "--config", str(folder / "headrace.toml"))
    env = ENV | {
        "NODES": "2", "GPUS": "1", "MASTER": "127.0.0.1", "PORT": str(port), "STOP_S": "20",
        "PET_LOCAL_ADDR": "127.0.0.1", "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    return [start_watched(argv, log=folder / "logs" / f"machine-{number}.log", env=env) for number in range(2)]


STARTS = {
    "headrace train": (start_train, r"ranks started pids=\[\d+, (\d+)\]"),
    "torchrun": (start_torchrun, r"started role=train pid=(\d+)"),
}


@contextmanager
def ended(machines: Sequence[Watched]) -> Iterator[None]:
    """Whatever is left of them is gone after the block."""
    try:
        yield
    finally:
        for machine in machines:
            machine.process.terminate()  # ranks of torchrun are in sessions of their own: it ends them when it is asked to
        for machine in machines:
            with suppress(subprocess.TimeoutExpired):
                machine.process.wait(60)
            machine.kill_group()
            machine.process.wait()
            machine.release()


@pytest.mark.parametrize("start", STARTS)
async def test_a_killed_rank_ends_the_group_and_its_checkpoint_and_the_journal_bring_it_back(
    start: str, kafka: str, app_name: str, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    begin, pid = STARTS[start]
    build_char_model(tmp_path / "model", seed=1, size=Size(hidden=128, layers=2))
    (tmp_path / "headrace.toml").write_text(TOML.format(app=app_name, bootstrap=kafka))
    bus, store = KafkaBus(kafka, deadline_s=30), DirectoryStore(tmp_path / "store")
    await bus.start()
    log = Log(bus, app_name)
    await log.create_topics(partitions=2, keep_ms=-1)
    blocks = [block(sequence) for sequence in range(2 * STEPS)]
    for each in blocks:
        await log.publish(topics.BUFFER, each)
    machines = begin(tmp_path)
    with ended(machines):
        await checkpointed(tmp_path, log, store, machines)
        last = (tmp_path / "logs" / f"machine-{len(machines) - 1}.log").read_text()
        os.killpg(int(re.findall(pid, last)[0]), signal.SIGKILL)
        codes = [await asyncio.to_thread(machine.process.wait, LIMIT_S) for machine in machines]
    assert not any(codes), said(tmp_path)
    await check_trained_once(log, blocks)
    await check_published(log, store, tmp_path)
    await bus.close()


async def checkpointed(folder: Path, log: Log, store: DirectoryStore, machines: Sequence[Watched]) -> None:
    """Wait for a checkpoint of some steps, and a step after it."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        steps = sum([isinstance(message.value, Batch) async for message in log.scan(topics.BATCHES)])
        if 0 <= max((place.step for place in places(store, log.app)), default=-1) < steps - 1:
            return
        running = all(machine.process.poll() is None for machine in machines)
        assert running and time.monotonic() < deadline_s, said(folder)
        await asyncio.sleep(0.2)


async def check_trained_once(log: Log, blocks: Sequence[Block]) -> None:
    records = [message.value async for message in log.scan(topics.BATCHES)]
    known = [each for each in records if isinstance(each, Batch | Fence | Skip | Rollback | Saved)]
    steps = [entry for entry in effective(known, log.app)[0] if isinstance(entry, Batch)]
    assert [each.step for each in steps] == list(range(STEPS))
    trained = sorted(item.id for step in steps for item in step.items)
    assert trained == sorted(member.id for each in blocks for member in each.experiences)


async def check_published(log: Log, store: DirectoryStore, folder: Path) -> None:
    """A version at the start and one each two steps; an engine's logprobs of the last are near the trainer's."""
    published = {
        message.value.version: message.value
        async for message in log.scan(topics.POLICIES)
        if isinstance(message.value, PolicyEvent) and message.value.event == "published"
    }
    assert sorted(published) == [0, 1, 2, 3, 4, 5]
    engine = TorchEngine(model=str(folder / "model"), dtype="bfloat16", max_model_len=128)
    await engine.start()
    try:
        policy = await asyncio.to_thread(PolicyFetcher(store, "main").fetch, published[5])
        await engine.load(policy)
        assert policy.probe is not None and engine.version == 5
        scores = [await engine.score_tokens(tokens) for tokens in policy.probe.sequences]
        assert np.abs(np.concatenate(scores) - np.concatenate(policy.probe.logprobs)).mean() < 0.05
    finally:
        await engine.close()


def said(folder: Path) -> str:
    """The last of what the machines and their ranks wrote."""
    files = sorted((folder / "logs").glob("*.log"))
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


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
