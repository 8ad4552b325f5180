"""A trainer on two machines, each a torchrun: a rank is killed, both start again, and every batch is trained once."""

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

import pytest

from infra.cli.commands.init import EXAMPLES
from infra.cli.demo.char_model import build_char_model
from infra.local.process import Watched, start_watched
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from schemas import Batch, Fence, PolicyEvent, Rollback, Skip, topics
from schemas.journal import effective
from tests.e2e.test_trainer_ranks import block

pytestmark = pytest.mark.full

STEPS = 8
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
options = {{ stage = 2, sequence_parallel = 2 }}
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
    for sequence in range(2 * STEPS):
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
    assert [each.step for each in steps] == list(range(STEPS))
    trained = [item.id for step in steps for item in step.items]
    assert sorted(trained) == sorted(f"task-{s}.0.0-{e}-0" for s in range(2 * STEPS) for e in range(4))
    events = asyncio.run(read(kafka, app, topics.POLICIES))
    versions = {event.version for event in events if isinstance(event, PolicyEvent) and event.event == "published"}
    assert versions == set(range(STEPS + 1))


def test_two_machines_under_torchrun_train_together_and_start_again_together(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    """The ranks share every row as well: what one machine's GPU cannot hold, two can."""
    pytest.importorskip("deepspeed")
    build_char_model(tmp_path / "model", seed=3)
    (tmp_path / "headrace.toml").write_text(SETTINGS.format(app=app_name, kafka=kafka, steps=STEPS))
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
