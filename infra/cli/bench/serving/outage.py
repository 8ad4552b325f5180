"""The broker is away: what a gateway's clients notice of it, and what becomes of their answers.

A real broker is killed under a real gateway and started again after `away_s`, while paced clients ask, each second as many
as before, however long an answer takes. The answers are then counted by their ids in the log, against those that the
clients hold. `stored_twice`: records more than answers; sending is at least once, and the stages that read drop an id they
have seen. An answer begun before the kill or the return counts where it began.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from infra.cli.bench.serving.gateway import percentile_ms

if TYPE_CHECKING:
    from infra.cli.settings import Settings
    from infra.local.broker import EmbeddedKafka
    from infra.log.log import Log

TOML = """
app = "outage"
[kafka]
bootstrap_servers = "{bootstrap}"
[policy]
model = "model"
[engine]
use = "actors.engines.scripted:ScriptedEngine"
options = {{ model = "", max_model_len = 512, token_s = 0.01 }}
[gateway]
listen = "127.0.0.1:{port}"
train_on = "consented"
"""
BODY = {"model": "m", "messages": [{"role": "user", "content": "37+45="}], "max_tokens": 10}
ANSWER_S = 30.0  # a client waits no longer
DRAIN_S = 600.0
LOOK_S = 0.2
WARM_S = 5.0
Phase = Literal["warming", "before", "away", "back"]


class OutageRequest(msgspec.Struct, frozen=True):
    """One request. phase: of the outage. took_s: from the moment it was due. late_s: of that until its client got to
    ask. answer: the id that the client holds, "" where it failed.
    """

    phase: Phase
    took_s: float
    late_s: float
    answer: str


class Traffic(msgspec.Struct):
    """What clients and disk showed so far. phase: of the outage now. asked: requests that ended. spool_bytes: the most
    on disk. over: whether clients are to stop.
    """

    phase: Phase = "warming"
    asked: list[OutageRequest] = []
    spool_bytes: int = 0
    over: bool = False


def run(minutes: float = 10.0, *, per_s: float = 20.0, around_s: float = 60.0) -> dict[str, float]:
    """What an outage of so many minutes cost. per_s: requests a second. around_s: traffic before it, and after it."""
    from actors.gateway.access.keys import create_key
    from infra.cli.connect import store_of
    from infra.cli.demo.char_model import build_char_model
    from infra.cli.settings import load_settings
    from infra.local.address import choose_address
    from infra.local.broker import EmbeddedKafka

    with tempfile.TemporaryDirectory() as name, EmbeddedKafka(Path(name) / "kafka") as broker:
        folder = Path(name)
        build_char_model(folder / "model", seed=0)
        toml = TOML.format(bootstrap=broker.bootstrap, port=choose_address().port)
        (folder / "headrace.toml").write_text(toml)
        settings = load_settings(folder / "headrace.toml")
        asyncio.run(_create_topics(settings))
        _, key = create_key(store_of(settings), tenant="bench", scopes=("serve",), train="yes", rpm=0, tpm=0)
        with _serving(folder) as gateway:
            traffic, drain_s = asyncio.run(_outage(settings, key, broker, gateway, 60 * minutes, per_s, around_s))
        return _figures(traffic, drain_s) | asyncio.run(_counted(settings, traffic))


async def _create_topics(settings: "Settings") -> None:
    async with _log(settings) as log:
        await log.create_topics(partitions=4, keep_ms=-1)


@asynccontextmanager
async def _log(settings: "Settings") -> AsyncIterator["Log"]:
    from infra.cli.connect import bootstrap_of
    from infra.log.kafka import KafkaBus
    from infra.log.log import Log

    bus = KafkaBus(bootstrap_of(settings))
    await bus.start()
    try:
        yield Log(bus, settings.app)
    finally:
        await bus.close()


@contextmanager
def _serving(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A gateway for the length of a block, ended so that it writes what it has left; its log is printed where it failed."""
    command = [sys.executable, "-m", "infra.cli.main", "serve", "-c", str(folder / "headrace.toml")]
    with (folder / "serve.log").open("wb") as output:
        gateway = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield gateway
    except BaseException:
        print((folder / "serve.log").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        gateway.terminate()
        gateway.wait()


async def _outage(
    settings: "Settings",
    key: str,
    broker: "EmbeddedKafka",
    gateway: "subprocess.Popen[bytes]",
    away_s: float,
    per_s: float,
    around_s: float,
) -> tuple[Traffic, float]:
    """Traffic before, in and after an outage; and the seconds in which the spool drained."""
    await _until_served(settings, gateway)
    traffic, spool = Traffic(), settings.folder / "spool"
    async with asyncio.TaskGroup() as group:
        group.create_task(_ask(traffic, settings, key, per_s))
        group.create_task(_watch(traffic, spool))
        await asyncio.sleep(WARM_S)
        traffic.phase = "before"
        await asyncio.sleep(around_s)
        traffic.phase = "away"
        await asyncio.to_thread(broker.kill)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(broker.start)
        traffic.phase, back = "back", time.perf_counter()
        drain_s = await _drained(spool, back)
        await asyncio.sleep(around_s - (time.perf_counter() - back))
        traffic.over = True
    return traffic, drain_s


async def _until_served(settings: "Settings", gateway: "subprocess.Popen[bytes]") -> None:
    import httpx

    assert settings.gateway is not None
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                (await http.get(f"http://{settings.gateway.listen}/healthz")).raise_for_status()
                return
            except httpx.TransportError:
                if gateway.poll() is not None:
                    raise RuntimeError(f"the gateway ended with {gateway.returncode}") from None
                await asyncio.sleep(LOOK_S)


async def _ask(traffic: Traffic, settings: "Settings", key: str, per_s: float) -> None:
    """Requests at their times, whatever became of those before them, until it is over and all have their answer."""
    import httpx

    assert settings.gateway is not None
    url = f"http://{settings.gateway.listen}/v1/chat/completions"
    headers = {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(headers=headers, timeout=ANSWER_S, trust_env=False, limits=limits) as http:

        async def one(due: float) -> None:
            phase, answer, late_s = traffic.phase, "", time.perf_counter() - due
            try:
                response = await http.post(url, json=BODY)
                answer = response.json()["id"] if response.status_code == 200 else ""
            except httpx.HTTPError:
                pass  # counted as a request that failed
            traffic.asked.append(OutageRequest(phase, time.perf_counter() - due, late_s, answer))

        begin, number = time.perf_counter(), 0
        async with asyncio.TaskGroup() as group:
            while not traffic.over:
                due = begin + number / per_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(due))
                number += 1


async def _watch(traffic: Traffic, spool: Path) -> None:
    while not traffic.over:
        traffic.spool_bytes = max(traffic.spool_bytes, _size(spool))
        await asyncio.sleep(LOOK_S)


async def _drained(spool: Path, since: float) -> float:
    """Seconds until nothing waits on disk; infinite where something still does after ten minutes."""
    while _size(spool):
        if time.perf_counter() - since > DRAIN_S:
            return float("inf")
        await asyncio.sleep(LOOK_S)
    return time.perf_counter() - since


def _size(spool: Path) -> int:
    size = 0
    for path in spool.rglob("*.spool"):
        try:
            size += path.stat().st_size
        except FileNotFoundError:  # sent since
            continue
    return size


def _figures(traffic: Traffic, drain_s: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for phase in ("before", "away", "back"):
        ones = [one for one in traffic.asked if one.phase == phase]
        figures |= {f"{phase}_ms_p{share}": percentile_ms([one.took_s for one in ones], share) for share in (50, 99)}
        figures[f"{phase}_client_late_ms_p99"] = percentile_ms([one.late_s for one in ones], 99)
    return figures | {
        "p99_away_over_before": figures["away_ms_p99"] / figures["before_ms_p99"],
        "p99_back_over_before": figures["back_ms_p99"] / figures["before_ms_p99"],
        "requests": len(traffic.asked),
        "requests_away": sum(one.phase == "away" for one in traffic.asked),
        "failed": sum(not one.answer for one in traffic.asked),
        "spool_peak_mb": traffic.spool_bytes / 1e6,
        "drain_s": drain_s,
    }


async def _counted(settings: "Settings", traffic: Traffic) -> dict[str, float]:
    """Answers in the log by their ids, against those the clients hold."""
    from schemas import Block
    from schemas.ids import answer_id
    from schemas.topics import EXPERIENCES

    stored: Counter[str] = Counter()
    async with _log(settings) as log:
        async for message in log.read_all(EXPERIENCES):
            if isinstance(message.value, Block):
                stored.update(answer_id(one.id) for one in message.value.experiences)
    held = {one.answer for one in traffic.asked if one.answer}
    return {
        "lost": len(held - stored.keys()),
        "stored_twice": sum(stored.values()) - len(stored),
        "stored_of_nobody": len(stored.keys() - held),
    }
