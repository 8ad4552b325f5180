"""The gateway, recording, beside what would be served otherwise: bare uvicorn, and vLLM's own server.

    the way of a request    the gateway, an ASGI function on uvicorn and a route of Starlette, over an engine that only echoes
    a model                 the gateway over vLLM and vLLM's own OpenAI server: the demo's model, the same engine arguments

Each is a process of its own and they are given their rounds in turn, so that what else the machine does falls on all. Before
anything is timed they have to say the same to the same prompts, plain and streamed; after it every answer of the gateway has
to lie in its log. Processor time is of the server and all that it started, until what it gave is recorded; the share that it
takes while it has nothing to do is taken off. The clients take their share of the same cores, alike for all.
"""

import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from infra.cli.bench.beside import OURS, Beside, Spent, compared
from infra.cli.bench.common.children import cpu_s, end, idle_share, last_words, source_path
from infra.cli.bench.serving.http_asking import TOKENS, HttpAnswer, Site, answered, ask, load

if TYPE_CHECKING:
    from infra.local.process import Watched

Say = Callable[[str], None]
BARE, ROUTE, VLLM = "bare uvicorn", "Starlette", "vLLM's server"
BARE_KINDS = {BARE: "asgi", ROUTE: "starlette"}
CLIENTS = (1, 16, 64)
MANY = (16, 64)  # clients for whom the targets are
CHEAPER = 0.25  # than a bare server: at most four times as dear
CHECKED = 4  # prompts that all have to answer alike
START_S = 180.0
RECORDED_S = 60.0


class PeersPlan(msgspec.Struct, frozen=True):
    """What is measured.

    clients: numbers of them, one case each. rounds: of each case. echoed, sampled: answers of a round, of the engine
    that echoes and of vLLM; a tenth at one client. streamed: of each client. idle_s: for how long idle servers are
    watched. model: whether vLLM is measured at all.

    Example: PeersPlan(rounds=2, model=False)
    """

    clients: tuple[int, ...] = CLIENTS
    rounds: int = 5
    echoed: int = 640
    sampled: int = 256
    streamed: int = 8
    idle_s: float = 2.0
    model: bool = True


class Server(msgspec.Struct):
    """One contestant.

    name: in the table. child: its process. log: what that prints. site: where to ask. is_ours: it records, and counts
    what it has recorded. idle: share of a core that it takes unasked. asked: requests so far.
    """

    name: str
    child: "Watched"
    log: Path
    site: Site
    is_ours: bool
    idle: float = 0.0
    asked: int = 0


def run(plan: PeersPlan, say: Say) -> list[Beside]:
    """Ours and the peers that there are; a missing one is printed in one line. Raises RuntimeError where two give different
    answers, or where an answer was not recorded.
    """
    found: list[Beside] = []
    with tempfile.TemporaryDirectory(prefix="hr-") as name:
        folder = Path(name)
        with ExitStack() as ending:
            servers = [_ours("echo", folder, ending), *(_bare(name, folder, ending) for name in BARE_KINDS)]
            found += asyncio.run(_measured("echo", servers, plan.echoed, plan, say))
        if why := vllm_lacks(plan):
            say(f"gateway-peers: {VLLM} is left out: {why}")
            return found
        with ExitStack() as ending:
            servers = [_ours("vllm", folder, ending), _vllm(folder, ending)]
            found += asyncio.run(_measured("model", servers, plan.sampled, plan, say))
    return found


def vllm_lacks(plan: PeersPlan, module: str = "vllm") -> str:
    """Why vLLM's own server is not measured, "" where it is."""
    if not plan.model:
        return "it was not asked for"
    return "" if importlib.util.find_spec(module) else f"no {module} is installed"


def _ours(kind: str, folder: Path, ending: ExitStack) -> Server:
    child, log = _started(
        [sys.executable, "-m", "infra.cli.bench.serving.gateway_served", kind, str(folder)], folder, ending
    )
    ready = _said(child, log)
    return Server(OURS, child, log, Site(ready["port"], ready["key"]), is_ours=True)


def _bare(name: str, folder: Path, ending: ExitStack) -> Server:
    command = [sys.executable, "-m", "infra.cli.bench.peers.bare_http", BARE_KINDS[name]]
    child, log = _started(command, folder, ending)
    return Server(name, child, log, Site(_said(child, log)["port"]), is_ours=False)


def _vllm(folder: Path, ending: ExitStack) -> Server:
    from infra.local.address import choose_address

    port = choose_address().port
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *vllm_arguments(folder / "model", port)]
    child, log = _started(command, folder, ending)
    asyncio.run(_until_open(child, log, port))
    return Server(VLLM, child, log, Site(port), is_ours=False)


def vllm_arguments(model: Path, port: int) -> list[str]:
    """Of vLLM's own server: what the gateway's engine has on a CPU, and no line of a log a request."""
    from actors.engines.vllm.settings import CPU_DEFAULTS, DEFAULTS

    shared = {**DEFAULTS, **CPU_DEFAULTS, "generation_config": "vllm", "disable_uvicorn_access_log": True}
    arguments = [f"--model={model}", f"--port={port}", "--host=127.0.0.1", "--served-model-name=m", "--seed=0"]
    for name, value in shared.items():
        flag = f"--{name.replace('_', '-')}"
        arguments.append(flag if value is True else f"{flag}={value}")
    return arguments


def _started(command: list[str], folder: Path, ending: ExitStack) -> "tuple[Watched, Path]":
    from actors.engines.vllm.settings import environment
    from infra.local.process import start_watched

    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    with environment(on_cpu=True):  # of vLLM; for the others it means nothing
        child = start_watched(command, log=log, env=source_path(), cwd=folder)
    ending.callback(end, child)
    return child, log


def _said(child: "Watched", log: Path) -> dict[str, Any]:
    """The line in which a server says where it is; libraries may speak before it."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and child.process.poll() is None:
        for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
            if line.startswith('{"port"'):
                ready: dict[str, Any] = json.loads(line)
                return ready
        time.sleep(0.05)
    raise RuntimeError(f"bench gateway-peers: a server does not start: {last_words(log)}")


async def _until_open(child: "Watched", log: Path, port: int) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and child.process.poll() is None:
        try:
            await ask(Site(port), [0], stream=False)
            return
        except (OSError, asyncio.IncompleteReadError, RuntimeError):
            await asyncio.sleep(0.2)
    raise RuntimeError(f"bench gateway-peers: a server does not start: {last_words(log)}")


async def _measured(over: str, servers: Sequence[Server], answers: int, plan: PeersPlan, say: Say) -> list[Beside]:
    await agree(servers)
    say(f"gateway-peers, {over}: {' and '.join(one.name for one in servers)} say the same")
    for one in servers:
        one.idle = await asyncio.to_thread(idle_share, one.child.pid, plan.idle_s)
    found: list[Beside] = []
    for stream in (False, True):
        for clients in plan.clients:
            case = f"{over}, {'streamed' if stream else 'plain'}, {clients} client{'s' * (clients > 1)}"
            count = clients * plan.streamed if stream else max(1, answers // 10) if clients == 1 else answers
            spent: dict[str, list[Spent]] = {one.name: [] for one in servers}
            for number in range(plan.rounds + 1):
                for one in servers:
                    took = await _round(one, clients, count, stream=stream)
                    if number:  # the first warmed it up
                        spent[one.name].append(took)
            found += compared(case, spent, count, *targets(clients))
            say(f"gateway-peers: {case}: {plan.rounds} rounds")
    return found


def targets(clients: int) -> tuple[dict[str, float], dict[str, float]]:
    """Of processor time and of answers a second, by peer."""
    return (dict.fromkeys(BARE_KINDS, CHEAPER), {VLLM: 1.0}) if clients in MANY else ({}, {})


async def agree(servers: Sequence[Server]) -> None:
    """Raises RuntimeError unless all say the same to the same prompts, whole and in pieces."""
    expected: list[str] = []
    for one in servers:
        for stream in (False, True):
            answers: list[HttpAnswer] = await ask(one.site, range(CHECKED), stream=stream)
            one.asked += CHECKED
            texts = [answer.text for answer in answers]
            expected = expected or texts
            if texts != expected or not all(texts):
                raise RuntimeError(f"bench gateway-peers: {one.name} says {texts}, expected {expected}")
            if stream and any(answer.events < TOKENS // 4 for answer in answers):
                raise RuntimeError(f"bench gateway-peers: {one.name} does not stream: {answers[0].events} pieces")


async def _round(one: Server, clients: int, answers: int, *, stream: bool) -> Spent:
    before_s, begin = cpu_s(one.child.pid), time.perf_counter()
    took_s = await load(one.site, clients=clients, answers=answers, stream=stream)
    one.asked += answers
    if one.is_ours:
        await recorded(one)
    else:
        await asyncio.sleep(0.1)
    passed_s = time.perf_counter() - begin
    return Spent(cpu_s(one.child.pid) - before_s - one.idle * passed_s, took_s)


async def recorded(one: Server) -> None:
    """Return once every answer that was given lies in the log. Raises RuntimeError where one does not."""
    until_s = time.monotonic() + RECORDED_S
    while (found := await _num_written(one.site)) < one.asked:
        if time.monotonic() > until_s:
            raise RuntimeError(f"bench gateway-peers: {found} of {one.asked} answers were recorded")
        await asyncio.sleep(0.05)
    if found > one.asked:
        raise RuntimeError(f"bench gateway-peers: {found} answers were recorded, and {one.asked} given")


async def _num_written(site: Site) -> int:
    """What the gateway says of itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(f"GET /metrics HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {site.key}\r\n\r\n".encode())
    lines = (await answered(reader)).decode().splitlines()
    writer.close()
    return sum(
        round(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith("headrace_written_total{") and 'topic="experiences"' in line
    )
