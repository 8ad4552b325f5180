"""From lists of an engine to arrays in the trainer's process: headrace's log beside Redis streams and Ray's Queue.

Each contestant is a reader's process that starts its sender, with a server behind them: a real broker, a redis-server, Ray's
own processes. All run at once and are given their rounds in turn. The first shows that every reader holds the very arrays
that were sent, and is not timed. Processor time is of sender, reader and server together, of a round from the word to begin
until the last array is there; the share that they take while they have nothing to do is taken off. Ours makes blocks of 16
answers; its peers pickle arrays, one answer a call or many.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from infra.cli.bench.beside import OURS, Beside, Spent, compared
from infra.cli.bench.common.bench_env import bench_python, lacks
from infra.cli.bench.common.children import cpu_s, end, last_words, source_path
from infra.cli.bench.common.texts import samples
from infra.cli.bench.peers.wire import digest

SHAPE = (16, 200, 500)
REDIS = {"Redis stream, one a call": 1, "Redis stream, 100 a call": 100}
RAY = {"Ray Queue, one a call": 1, "Ray Queue, 64 a call": 64}
TARGET = 2.0  # against each of them
IDLE_S = 2.0
START_S = 60.0
END_S = 20.0
PEERS = Path(__file__).parents[1] / "peers"
Say = Callable[[str], None]


class TransportPlan(msgspec.Struct, frozen=True):
    """What is measured. answers: of each round. groups: of real text that they are made of, again and again. rounds: of
    each way. idle_s: for how long idle readers are watched.
    """

    answers: int = 1024
    groups: int = 16
    rounds: int = 5
    idle_s: float = IDLE_S


class ReaderProcess(msgspec.Struct):
    """A reader's process. name: in the table. process: itself. log: what it prints. servers: pids of what it shares
    with its sender. idle: share of a core that all of them take with nothing to do.
    """

    name: str
    process: Any
    log: Path
    servers: tuple[int, ...]
    idle: float = 0.0

    def ask(self, what: str, number: int) -> dict[str, Any]:
        """What it answers to `check` or `go`. Raises RuntimeError where it has ended."""
        self.process.stdin.write(f"{what} {number}\n")
        self.process.stdin.flush()
        return self.heard()

    def heard(self) -> dict[str, Any]:
        """The next line of JSON that it writes."""
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"bench transport: {self.name} ended: {last_words(self.log)}")

    def spent_s(self) -> float:
        """Processor time of reader, sender and servers so far."""
        return sum(cpu_s(pid) for pid in (self.process.pid, *self.servers))


def run(plan: TransportPlan, say: Say) -> list[Beside]:
    """Ours and the peers that there are. A missing peer is printed in one line. Raises RuntimeError where a reader holds
    other arrays than were sent.
    """
    with tempfile.TemporaryDirectory(prefix="hr-") as name, ExitStack() as ending:
        folder = Path(name)
        answers = written_answers(folder / "answers.json", plan.groups)
        readings = [ending.enter_context(_ours(folder))]
        for peers in (redis_readings, ray_readings):
            readings += peers(folder, ending, say, bench_python())
        return measured(readings, answers, plan, say)


def written_answers(file: Path, groups: int) -> list[dict[str, Any]]:
    """Answers as an engine hands them over, written where every process finds them."""
    answers = [
        {
            "tokens": one.prompt + one.response,
            "logprobs": one.logprobs,
            "messages": [(message.role, message.content) for message in one.messages],
        }
        for seed in range(groups)
        for one in samples(*SHAPE, seed=seed)
    ]
    file.write_text(json.dumps(answers))
    return answers


def measured(
    readings: Sequence[ReaderProcess], answers: Sequence[Mapping[str, Any]], plan: TransportPlan, say: Say
) -> list[Beside]:
    """Rounds of all in turn, after one that shows that they read what was sent."""
    expected = expected_digest(answers, plan.answers)
    for one in readings:
        answer = one.ask("check", plan.answers)
        if answer["answers"] != plan.answers or answer["digest"] != expected:
            raise RuntimeError(f"bench transport: {one.name} reads other arrays than were sent ({answer['answers']})")
    say(f"transport: all of {len(readings)} read what was sent")
    before = [one.spent_s() for one in readings]
    time.sleep(plan.idle_s)
    for one, spent_s in zip(readings, before, strict=True):
        one.idle = (one.spent_s() - spent_s) / plan.idle_s if plan.idle_s else 0.0
    spent: dict[str, list[Spent]] = {one.name: [] for one in readings}
    for number in range(plan.rounds):
        for one in readings:
            before_s = one.spent_s()
            wall_s = one.ask("go", plan.answers)["wall_s"]
            spent[one.name].append(Spent(one.spent_s() - before_s - one.idle * wall_s, wall_s))
        say(f"transport: round {number + 1} of {plan.rounds}")
    targets = dict.fromkeys((*REDIS, *RAY), TARGET)
    return compared(f"{SHAPE[0]} x ({SHAPE[1]} + {SHAPE[2]})", spent, plan.answers, targets)


def expected_digest(answers: Sequence[Mapping[str, Any]], number: int) -> str:
    """What a reader of so many answers holds."""
    held = []
    for at in range(number):
        one = answers[at % len(answers)]
        held.append((f"{at}", np.array(one["tokens"], np.uint32), np.array(one["logprobs"], np.float32)))
    return digest(held)


@contextmanager
def _ours(folder: Path) -> Iterator[ReaderProcess]:
    import asyncio

    from infra.cli.bench.records.transport_ours import APP
    from infra.local.broker import EmbeddedKafka

    with EmbeddedKafka(folder / "kafka") as broker:
        asyncio.run(_create_topics(broker.bootstrap, APP))
        assert broker.pid is not None
        command = [sys.executable, "-m", "infra.cli.bench.records.transport_ours", "read", broker.bootstrap]
        with _reading(OURS, [*command, str(folder / "answers.json")], folder, (broker.pid,)) as reading:
            yield reading


async def _create_topics(bootstrap: str, app: str) -> None:
    from infra.log.kafka import KafkaBus
    from infra.log.log import Log

    bus = KafkaBus(bootstrap)
    await bus.start()
    await Log(bus, app).create_topics(partitions=1, keep_ms=-1)
    await bus.close()


def redis_readings(folder: Path, ending: ExitStack, say: Say, python: Path) -> list[ReaderProcess]:
    from infra.local.address import choose_address
    from infra.local.process import start_watched

    program = shutil.which("redis-server")
    if why := lacks("redis", python) or ("" if program else "no redis-server on PATH: Debian has it as redis-server"):
        say(f"transport: Redis streams are left out: {why}")
        return []
    port = choose_address().port
    command = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = start_watched([*command, "--dir", str(folder)], log=folder / "redis.log")
    ending.callback(end, server)
    _until_open(port, folder / "redis.log")
    return [
        ending.enter_context(
            _reading(
                name,
                [
                    str(python), str(PEERS / "redis_stream.py"), "read", str(port), str(folder / "answers.json"),
                    str(batch),
                ],
                folder,
                (server.pid,),
            )
        )
        for name, batch in REDIS.items()
    ]  # fmt: skip


def _until_open(port: int, log: Path) -> None:
    import socket

    until_s = time.monotonic() + START_S
    while True:
        with socket.socket() as one:
            if not one.connect_ex(("127.0.0.1", port)):
                return
        if time.monotonic() > until_s:
            raise RuntimeError(f"bench transport: redis-server does not answer: {last_words(log)}")
        time.sleep(0.05)


def ray_readings(folder: Path, ending: ExitStack, say: Say, python: Path) -> list[ReaderProcess]:
    if why := lacks("ray", python):
        say(f"transport: Ray's Queue is left out: {why}")
        return []
    found = []
    for name, batch in RAY.items():
        command = [str(python), str(PEERS / "ray_queue.py"), str(folder / "answers.json"), str(batch)]
        try:
            found.append(ending.enter_context(_reading(name, [*command, str(folder / f"ray{batch}")], folder, ())))
        except RuntimeError as error:
            say(f"{name} is left out: {error}")
    return found


@contextmanager
def _reading(name: str, command: list[str], folder: Path, servers: tuple[int, ...]) -> Iterator[ReaderProcess]:
    """A reader's process that is ready, ended on the way out with all that it started."""
    log = folder / f"{name}.log"
    with log.open("ab") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=folder,
            env={**_environment(), **source_path()},
            start_new_session=True,
        )
    try:
        reading = ReaderProcess(name, process, log, servers)
        reading.heard()
        yield reading
    finally:
        _end_session(process)


def _environment() -> dict[str, str]:
    return {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def _end_session(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()  # it ends by itself: Ray takes its own processes with it
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
