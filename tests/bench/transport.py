"""Path from an engine's lists to the trainer's arrays: blocks of 16 in the log, compared with pickled answers in Redis.

Processor time is the sum of sender, reader and server. The untimed first round checks that both readers get the sent arrays.
"""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from infra.local.broker import EmbeddedKafka, choose_address
from infra.local.process import start_watched
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from schemas import Block, Message, Span, make_experience
from schemas.topics import BUFFER
from tests.bench._transport_peer import Arrays, Sender, serve
from tests.bench.measuring import PEERS_PYTHON, against, cpu_s, ended, idle_share, lacks
from tests.bench.report import ROOT, Row
from tests.bench.texts import samples

APP, BLOCK = "transport", 16
CASE = "16 x (200 + 500), Redis stream, 100 per call"
WHY = "the peer keeps pickled arrays in memory; the log checks, compresses and writes to disk"


class Reading:
    """A reader's process with its sender. servers: Processes that both share."""

    def __init__(self, command: list[str], folder: Path, ending: ExitStack, *servers: int | None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )
        ending.callback(self._process.kill)
        self._pids = [self._process.pid, *(pid for pid in servers if pid is not None)]
        self._heard()
        self.idle = 0.0

    def ask(self, number: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return self._heard()

    def spent_s(self) -> float:
        return sum(map(cpu_s, self._pids))

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError("transport: a reader ended")


def run(rounds: int = 5, answers: int = 1024) -> Iterator[Row]:
    """rounds: timed rounds per side. answers: answers per round."""
    missing = lacks("redis") or ("" if shutil.which("redis-server") else "no redis-server on PATH")
    if missing:
        yield Row(CASE, why=missing)
        return
    with tempfile.TemporaryDirectory(prefix="hr-") as name, ExitStack() as ending:
        folder, file = Path(name), Path(name) / "answers.json"
        file.write_text(json.dumps(made_answers()))
        broker = ending.enter_context(EmbeddedKafka(folder / "kafka"))
        asyncio.run(create_topics(broker.bootstrap))
        ours = [sys.executable, "-m", "tests.bench.transport", "read", broker.bootstrap, str(file)]
        redis_pid, port = start_redis(folder, ending)
        peer = [str(PEERS_PYTHON), str(Path(__file__).with_name("_transport_peer.py")), "read", str(port), str(file)]
        sides = [Reading(ours, folder, ending, broker.pid), Reading(peer, folder, ending, redis_pid)]
        if len({side.ask(answers)["digest"] for side in sides}) != 1:
            raise RuntimeError("transport: the readers hold different arrays")
        for side in sides:
            side.idle = idle_share(side.spent_s)
        spent: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for side, found in zip(sides, spent, strict=True):
                before_s = side.spent_s()
                wall_s = side.ask(answers)["wall_s"]
                found.append(1e6 * (side.spent_s() - before_s - side.idle * wall_s) / answers)
        yield against(CASE, "µs", *spent, 2.0, WHY)


def made_answers() -> list[dict[str, Any]]:
    return [
        {
            "tokens": each.prompt + each.response,
            "logprobs": each.logprobs,
            "messages": [(message.role, message.content) for message in each.messages],
        }
        for seed in range(16)
        for each in samples(BLOCK, 200, 500, seed=seed)
    ]


async def create_topics(bootstrap: str) -> None:
    bus = KafkaBus(bootstrap)
    await bus.start()
    await Log(bus, APP).create_topics(partitions=1, keep_ms=-1)
    await bus.close()


def start_redis(folder: Path, ending: ExitStack) -> tuple[int, int]:
    """Process and port of a server in memory."""
    port = choose_address().port
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = start_watched([*command, "--dir", str(folder)], log=folder / "redis.log")
    ending.callback(ended, server)
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return server.pid, port
        time.sleep(0.05)
    raise RuntimeError("transport: redis-server does not answer")


def made_blocks(answers: list[dict[str, Any]], number: int) -> Iterator[Block]:
    for start in range(0, number, BLOCK):
        members = []
        for at in range(start, min(number, start + BLOCK)):
            answer = answers[at % len(answers)]
            begin = len(answer["tokens"]) - len(answer["logprobs"])
            messages = [Message(role, content) for role, content in answer["messages"]]
            members.append(
                make_experience(
                    id=f"{at}", group=f"g{start}.0", episode=at - start, group_size=BLOCK, tokens=answer["tokens"],
                    logprobs=answer["logprobs"], messages=messages, spans=(Span(begin, len(answer["tokens"]), 7),),
                )
            )  # fmt: skip
        yield Block(tuple(members))


async def taken(log: Log, reader: Any, number: int) -> Arrays:
    found: Arrays = []
    while len(found) < number:
        for message in await log.read(reader, timeout_s=60):
            assert isinstance(message.value, Block), message.error
            found += [(each.id, each.tokens, each.logprobs) for each in message.value.experiences]
    return found


async def opened(bootstrap: str) -> Log:
    bus = KafkaBus(bootstrap)
    await bus.start()
    return Log(bus, APP)


def send(bootstrap: str, file: Path) -> None:
    answers = json.loads(file.read_text())
    with asyncio.Runner() as runner:
        log = runner.run(opened(bootstrap))
        print("{}", flush=True)
        for line in sys.stdin:
            runner.run(log.publish_all(BUFFER, list(made_blocks(answers, int(line)))))


def read(bootstrap: str, file: Path) -> None:
    sender = Sender([sys.executable, "-m", "tests.bench.transport", "send", bootstrap, str(file)])
    with asyncio.Runner() as runner:
        log = runner.run(opened(bootstrap))
        reader = runner.run(log.assigned(BUFFER, "end"))
        go: Callable[[int], None] = sender.go

        def arrays(number: int) -> Arrays:
            go(number)
            return runner.run(taken(log, reader, number))

        serve(arrays)


if __name__ == "__main__":
    {"read": read, "send": send}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
