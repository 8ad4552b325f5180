"""What the gateway adds to an answer: the engine alone and the gateway over it, in turns, and answers a second.

The gateway runs in a process of its own, on one core, with the scripted engine, the demo's tokenizer, keys, redaction and
recording into a memory log; the clients keep their connections and run in this process, on another core. Both are timed
on the same engine in the same event loop, one round after the other, so that what else the machine does falls on both;
what is added is the difference of their percentiles. The engine pauses per token, so that the clients wait for it as they
would for a model; for the rate it does not. `cpu_ms_per_answer` is processor time of the gateway's process, engine
included: unlike the others it means the same on a machine that does other work too.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from actors.engines.engine import Engine
    from actors.gateway.config import GatewayLimits
    from infra.model.model import Tokenizer

CLIENTS = 16
ROUNDS = 6
ANSWERS = 480  # of each round, by all clients
TOKENS = 20
TOKEN_S = 0.01
MESSAGES = [{"role": "user", "content": "How much is 37+45, and why is it so much?"}]
Ask = Callable[[], Awaitable[None]]


class TimedRound(msgspec.Struct, frozen=True):
    """One round. took_s: of each answer. wall_s, cpu_s: of the round; processor time is the gateway's process's."""

    took_s: list[float]
    wall_s: float
    cpu_s: float = 0.0


def run() -> dict[str, float]:
    """Milliseconds at 16 clients, answers a second, and processor milliseconds of one."""
    from actors.gateway.http.listen import new_loop

    cores = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as folder,
        pinned(cores[0]),
        gateway_child([sys.executable, "-m", "infra.cli.bench.serving.gateway", folder, str(cores[-1])]) as child,
        asyncio.Runner(loop_factory=new_loop) as clients,
    ):
        key, ports = child.address["key"], child.address["ports"]
        alone: list[TimedRound] = []
        through: list[TimedRound] = []
        free: list[TimedRound] = []
        for number in range(ROUNDS + 1):
            alone.append(child.ask("alone"))
            through.append(clients.run(_through(ports["paced"], key, child, spread_s=TOKENS * TOKEN_S)))
            free.append(clients.run(_through(ports["free"], key, child)))
            if not number:  # the first round warmed all up
                alone, through, free = [], [], []
    figures: dict[str, float] = {}
    for share in (50, 99):
        engine, gateway = (
            percentile_ms([s for one in rounds for s in one.took_s], share) for rounds in (alone, through)
        )
        figures |= {
            f"engine_ms_p{share}": engine,
            f"gateway_ms_p{share}": gateway,
            f"overhead_ms_p{share}": gateway - engine,
        }
    return figures | {
        "answers_per_s": sum(len(one.took_s) for one in free) / sum(one.wall_s for one in free),
        "cpu_ms_per_answer": sum(one.cpu_s for one in free) * 1000 / sum(len(one.took_s) for one in free),
    }


class BenchChild(msgspec.Struct):
    """The gateway's process. process: to end it. address: its ports and key."""

    process: Any
    address: dict[str, Any]

    def ask(self, what: str) -> TimedRound:
        """What it answers to `alone` (a round of the engine) and to `cpu` (processor time so far)."""
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return msgspec.json.decode(self.process.stdout.readline(), type=TimedRound)


@contextmanager
def gateway_child(command: list[str]) -> Iterator[BenchChild]:
    """A process that says where its gateway is, as JSON, and then answers what it is asked."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        first = next(line for line in process.stdout if line.startswith("{"))  # libraries may speak before it
        yield BenchChild(process, json.loads(first))
        process.stdin.close()


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """This process on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _through(port: int, key: str, child: BenchChild, *, spread_s: float = 0.0) -> TimedRound:
    """A round of clients that keep their connections."""
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": TOKENS}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CLIENTS)]

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)
        headers = await reader.readuntil(b"\r\n\r\n")
        assert headers.startswith(b"HTTP/1.1 200"), headers
        length = next(line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))

    before = child.ask("cpu").cpu_s
    timed = await _round([partial(ask, *connection) for connection in connections], spread_s)
    for _, writer in connections:
        writer.close()
    return msgspec.structs.replace(timed, cpu_s=child.ask("cpu").cpu_s - before)


async def _round(asks: list[Ask], spread_s: float) -> TimedRound:
    """Each asks one answer after the other. spread_s: they begin over so long, as clients do that know of no other."""
    took_s: list[float] = []

    async def client(number: int, ask: Ask) -> None:
        await asyncio.sleep(number * spread_s / CLIENTS)
        for _ in range(ANSWERS // CLIENTS):
            begin = time.perf_counter()
            await ask()
            took_s.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(client(number, ask) for number, ask in enumerate(asks)))
    return TimedRound(took_s, time.perf_counter() - begin)


def percentile_ms(seconds: list[float], share: int) -> float:
    """Milliseconds that `share` percent of the times do not exceed."""
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * share // 100)] * 1000


async def _serve(folder: Path) -> None:
    """The child: two gateways, with an engine that pauses and with one that does not, until stdin ends."""
    from actors.engines.scripted import ScriptedEngine
    from actors.gateway.access.keys import create_key
    from actors.gateway.http.listen import forget_loaded
    from infra.cli.demo.char_model import build_char_model
    from infra.model.model import load_tokenizer
    from infra.store.memory import MemoryStore

    tokenizer = load_tokenizer(build_char_model(folder / "model", seed=0))
    store, stop = MemoryStore(), asyncio.Event()
    _, key = create_key(store, tenant="bench", scopes=("serve",), train="yes", rpm=0, tpm=0)
    engines = {"paced": ScriptedEngine(token_s=TOKEN_S), "free": ScriptedEngine()}
    ports: dict[str, int] = {}

    def listening(name: str, port: int) -> None:
        ports[name] = port
        if len(ports) == len(engines):
            forget_loaded()
            print(json.dumps({"ports": ports, "key": key}), flush=True)

    async with asyncio.TaskGroup() as group:
        for name, engine in engines.items():
            heard = partial(listening, name)
            group.create_task(gateway_over(engine, tokenizer, store, folder / name, heard, stop))
        while asked := (await asyncio.to_thread(sys.stdin.readline)).strip():
            timed = await _alone(engines["paced"], tokenizer) if asked == "alone" else TimedRound([], 0.0)
            answer = msgspec.structs.replace(timed, cpu_s=time.process_time())
            print(msgspec.json.encode(answer).decode(), flush=True)
        stop.set()


async def _alone(engine: "Engine", tokenizer: "Tokenizer") -> TimedRound:
    from actors.engines.engine import Sampling

    prompt, sampling = tokenizer.encode_request(MESSAGES), Sampling(max_tokens=TOKENS, stop=tokenizer.eos_ids)

    async def ask() -> None:
        await engine.generate(prompt, sampling)

    return await _round([ask] * CLIENTS, TOKENS * TOKEN_S)


async def tell_cpu() -> None:
    """Answer each line of stdin with the processor time of this process, until it ends."""
    while (await asyncio.to_thread(sys.stdin.readline)).strip():
        print(msgspec.json.encode(TimedRound([], 0.0, time.process_time())).decode(), flush=True)


async def gateway_over(
    engine: "Engine",
    tokenizer: "Tokenizer",
    store: Any,
    folder: Path,
    listening: Callable[[int], None],
    stop: asyncio.Event,
    *,
    limits: "GatewayLimits | None" = None,
) -> None:
    """A gateway over an engine and a log in memory, until `stop`."""
    from actors.gateway.config import GatewayConfig, GatewayLimits
    from actors.gateway.serve import run_gateway
    from infra.log.log import Log
    from infra.log.memory import MemoryBus
    from infra.observe.metrics import Metrics
    from infra.roles.role import Role
    from infra.settings.config import Floor

    log = Log(MemoryBus(), "bench")
    await log.create_topics(partitions=4, keep_ms=3_600_000)
    floor = Floor(app="bench", folder=folder)
    role = Role(floor=floor, log=log, store=store, metrics=Metrics("serve"), stop=stop, instance="serve/bench")
    config = GatewayConfig(listen="127.0.0.1:0", train_on="consented", limits=limits or GatewayLimits())
    await run_gateway(role, config, engine, tokenizer, listening=listening)


if __name__ == "__main__":
    from actors.gateway.http.listen import new_loop

    os.sched_setaffinity(0, {int(sys.argv[2])})
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(Path(sys.argv[1])))
