"""Latency that the gateway adds, and its answers and streamed events per second, compared with bare uvicorn and vLLM's server.

Each server runs in its own process; the rounds of the servers alternate. Processor time is that of the server and its child
processes, without its idle share.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from actors.engines.vllm.settings import CPU_DEFAULTS, DEFAULTS, environment
from infra.local.broker import choose_address
from infra.local.process import Watched, start_watched
from tests.bench._echo import STREAMS, TOKEN_S, TOKENS
from tests.bench.measuring import against, cpu_s, ended, idle_share, last_words, started
from tests.bench.report import ROOT, Row

START_S = 300.0
WHOLE_S = TOKENS * TOKEN_S  # of a paced answer
WHY = "the template and the tokenizer alone cost more than a bare server's whole answer"


class Site(NamedTuple):
    """A server. idle: Share of a core that it takes unasked."""

    child: Watched
    port: int
    key: str
    idle: float


class Load(NamedTuple):
    """Answers of a round. took_s: Wall seconds of each. events: Of all streams."""

    took_s: list[float]
    wall_s: float
    cpu_s: float
    events: int


def run(rounds: int = 5, answers: int = 640, streams: int = STREAMS, vllm: bool = False) -> Iterator[Row]:
    """rounds: timed rounds. answers: answers per round. streams: concurrent streams. vllm: True to measure vLLM's server."""
    with tempfile.TemporaryDirectory(prefix="hr-") as name, ExitStack() as ending:
        folder = Path(name)
        paced, echo, bare = (opened(kind, folder, ending) for kind in ("paced", "echo", "bare"))
        asyncio.run(load(paced, 16, 16, spread_s=WHOLE_S))
        took_ms = sorted(
            1000 * s for _ in range(rounds) for s in asyncio.run(load(paced, 16, answers, spread_s=WHOLE_S)).took_s
        )
        for share, high in ((50, 3.0), (99, 15.0)):
            added = took_ms[min(len(took_ms) - 1, len(took_ms) * share // 100)] - 1000 * WHOLE_S
            yield Row(f"added to an answer of 200 ms, p{share}", added, "ms", high=high)
        asyncio.run(load(echo, 16, 16))
        loads = [asyncio.run(load(echo, 16, answers)) for _ in range(rounds)]
        yield Row("answers", max(len(each.took_s) / each.wall_s for each in loads), "/s", low=500.0)
        yield Row("an answer, CPU", min(1e6 * each.cpu_s / len(each.took_s) for each in loads), "µs", cost="request")
        loads = [asyncio.run(load(echo, streams, 3 * streams, stream=True)) for _ in range(rounds + 1)][1:]
        yield Row("streamed events", max(each.events / each.wall_s for each in loads), "/s")
        yield Row("a streamed event, CPU", min(1e6 * each.cpu_s / each.events for each in loads), "µs", cost="event")
        yield from beside("bare uvicorn", echo, bare, rounds, answers, 0.25)
    if vllm:
        with tempfile.TemporaryDirectory(prefix="hr-") as name, ExitStack() as ending:
            ours = opened("vllm", Path(name), ending)
            yield from beside("vLLM's server", ours, opened_vllm(Path(name), ending), rounds, answers // 3, None)


def beside(name: str, ours: Site, peer: Site, rounds: int, answers: int, low: float | None) -> Iterator[Row]:
    for stream in (False, True):
        spent: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            for site, found in zip((ours, peer), spent, strict=True):
                took = asyncio.run(load(site, 16, answers, stream=stream))
                if number:  # the first warms up
                    found.append(1e6 * took.cpu_s / answers)
        how = "streamed" if stream else "plain"
        yield against(f"{how}, 16 clients, {name}", "µs", *spent, low, WHY if low else "")


def opened(kind: str, folder: Path, ending: ExitStack) -> Site:
    log = folder / kind / "log"
    with environment(on_cpu=True):  # of vLLM
        child = started(["-m", "tests.bench._echo", kind, str(folder / kind)], log)
    ending.callback(ended, child)
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and child.process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith('{"port"'):
                said = json.loads(line)
                return Site(child, said["port"], said["key"], idle_share(lambda: cpu_s(child.pid), 1.0))
        time.sleep(0.05)
    raise RuntimeError(f"gateway: {kind} does not start: {last_words(log)}")


def opened_vllm(folder: Path, ending: ExitStack) -> Site:
    """vLLM's own server with the arguments of the gateway's engine."""
    port, log = choose_address().port, folder / "vllm-server.log"
    shared = {**DEFAULTS, **CPU_DEFAULTS, "generation_config": "vllm", "disable_uvicorn_access_log": True}
    flags = [f"--model={folder / 'vllm' / 'model'}", f"--port={port}", "--host=127.0.0.1", "--served-model-name=m"]
    for name, value in shared.items():
        flag = f"--{name.replace('_', '-')}"
        flags.append(flag if value is True else f"{flag}={value}")
    with environment(on_cpu=True):
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
        child = start_watched(command, log=log, env={}, cwd=ROOT)
    ending.callback(ended, child)
    site, until_s = Site(child, port, "", 0.0), time.monotonic() + START_S
    while time.monotonic() < until_s and child.process.poll() is None:
        try:
            asyncio.run(load(site, 1, 1))
            return site._replace(idle=idle_share(lambda: cpu_s(child.pid)))
        except (OSError, asyncio.IncompleteReadError, RuntimeError):
            time.sleep(0.5)
    raise RuntimeError(f"gateway: vLLM's server does not start: {last_words(log)}")


async def load(site: Site, clients: int, answers: int, *, stream: bool = False, spread_s: float = 0.0) -> Load:
    """So many answers to clients that keep their connections. spread_s: Over which they begin."""
    waiting = [request(site, number, stream) for number in range(answers)]
    took_s: list[float] = []
    events = 0

    async def client(number: int) -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        await asyncio.sleep(number / clients * spread_s)
        while waiting:
            writer.write(waiting.pop())
            begin_s = time.perf_counter()
            found = await body(reader)
            events += found.count(b"data: ")  # `events += await …` reads the sum before other clients add to it
            took_s.append(time.perf_counter() - begin_s)
        writer.close()

    before_s, begin = cpu_s(site.child.pid), time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    wall_s = time.perf_counter() - begin
    await asyncio.sleep(0.2)  # what it recorded is written
    spent_s = cpu_s(site.child.pid) - before_s - site.idle * (time.perf_counter() - begin)
    return Load(took_s, wall_s, max(spent_s, 1e-9), events)


def request(site: Site, number: int, stream: bool) -> bytes:
    content = f"How much is {number % 90 + 10}+{number // 90 % 90 + 10}, and why is it so much?"
    asked = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0}
    data = json.dumps(asked | ({"stream": True} if stream else {})).encode()
    key = f"authorization: Bearer {site.key}\r\n" if site.key else ""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n{key}content-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def body(reader: asyncio.StreamReader) -> bytes:
    """The body of one response. Raises RuntimeError unless its status is 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    fields = dict(line.partition(b":")[::2] for line in head.split(b"\r\n")[1:])
    if b"content-length" in fields:
        found = await reader.readexactly(int(fields[b"content-length"]))
    else:
        pieces = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pieces.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        found = b"".join(pieces)
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"gateway: {head.splitlines()[0].decode()}: {found[:300].decode(errors='replace')}")
    return found
