"""Seconds from the start of each role's process to its first report, and from the demo's start to its first experience.

Cold starts have empty caches of Python, torch and vLLM; warm starts repeat them. Roles start alone, with a real broker.
"""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from infra.cli.connect import connected, create_topics
from infra.cli.demo.char_model import build_char_model
from infra.cli.demo.settings import DemoOptions, demo_toml
from infra.cli.run.up import child_environment
from infra.cli.settings import Settings, load_settings
from infra.local.broker import EmbeddedKafka
from infra.local.process import Watched, start_watched
from infra.log.log import Log
from schemas import Progress, topics
from schemas.errors import BrokerUnavailable, ConfigError
from tests.bench.measuring import cpu_s, ended, last_words
from tests.bench.report import Row

LIMIT_S, END_S, LOOK_S = 600.0, 60.0, 0.1
WHY = "cold, Python compiles torch and vLLM anew in each process; make install does that once"
T = TypeVar("T")


def run(roles: str = "master,process,train,explore,serve", engine: str = "vllm", demo: bool = True) -> Iterator[Row]:
    """roles: names, separated by commas. engine: the demo's engine, vllm or torch. demo: True to start the demo."""
    with tempfile.TemporaryDirectory(prefix="hr-") as name:
        folder = Path(name)
        config = folder / "roles" / "headrace.toml"
        build_char_model(config.parent / "model", seed=0)
        config.write_text(demo_toml(DemoOptions(directory=config.parent, task="add", engine=engine)))
        with EmbeddedKafka(folder / "kafka") as broker:
            sets = [f'kafka.bootstrap_servers="{broker.bootstrap}"', 'gateway.listen="127.0.0.1:0"']
            settings = load_settings(config, sets)
            asyncio.run(made_topics(settings))
            for role in roles.split(","):
                overrides = [argument for each in sets for argument in ("--set", each)]
                argv = [sys.executable, "-m", "infra.cli.main", role, "--config", str(config), *overrides]
                yield from rows(role, folder / role, argv, settings, lambda role=role: works(settings, role))
        if demo:
            place = folder / "demo" / "run"
            argv = [
                *f"{sys.executable} -m infra.cli.main demo --task add --json --engine {engine} --dir".split(),
                str(place),
            ]
            yield from rows("demo", folder / "demo", argv, None, lambda: answered(place / "headrace.toml"))


def rows(
    name: str, folder: Path, argv: Sequence[str], settings: Settings | None, done: Callable[[], Awaitable[None]]
) -> Iterator[Row]:
    """A cold and a warm start."""
    own = {} if settings is None else child_environment(settings)
    caches = ("pycache", "vllm", "inductor", "triton", "cache")
    names = ("PYTHONPYCACHEPREFIX", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    env = own | {"PYTHONDONTWRITEBYTECODE": ""} | {key: str(folder / at) for key, at in zip(names, caches, strict=True)}
    for kind in ("cold", "warm"):
        shutil.rmtree(folder / "run", ignore_errors=True)  # the demo would continue it
        log = folder / f"{kind}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            spent_s, wall_s = asyncio.run(started(argv, log, env, done))
        except (RuntimeError, TimeoutError) as error:
            yield Row(f"{name}, {kind}", why=str(error) or f"not within {LIMIT_S:g} s")
            return
        words = "to the first experience" if name == "demo" else "until it works"
        high = 40.0 if name == "demo" else None
        yield Row(f"{name}, {kind}, {words}", wall_s, "s", high=high, why=WHY if high and wall_s > high else "")
        yield Row(f"{name}, {kind}, CPU", spent_s, "s")


async def started(
    argv: Sequence[str], log: Path, env: dict[str, str], done: Callable[[], Awaitable[None]]
) -> tuple[float, float]:
    """CPU and wall seconds. Raises RuntimeError where the process ends before, TimeoutError."""
    waiting = asyncio.ensure_future(done())
    await asyncio.sleep(LOOK_S)  # it reads from the end on
    begin_s = time.perf_counter()
    child = start_watched(argv, log=log, env=env)
    try:
        async with asyncio.timeout(LIMIT_S):
            await beside(waiting, child, log)
        return cpu_s(child.pid), time.perf_counter() - begin_s
    finally:
        await asyncio.to_thread(ended_gently, child)


async def beside(work: "asyncio.Future[T]", child: Watched, log: Path) -> T:
    """The result of work that waits for a process. Raises RuntimeError where that ends first."""
    try:
        while not work.done():
            if child.process.poll() is not None:
                raise RuntimeError(last_words(log))
            await asyncio.wait([work], timeout=LOOK_S)
        return work.result()
    finally:
        work.cancel()


def ended_gently(child: Watched, within_s: float = END_S) -> None:
    """End it as Ctrl-C does, and after a while for certain."""
    child.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(timeout=within_s)
    ended(child)


async def made_topics(settings: Settings) -> None:
    async with connected(settings, create=True) as log:
        await create_topics(log, settings)


async def works(settings: Settings, role: str) -> None:
    """Return once the role reports that it works."""
    async with connected(settings) as log, aclosing(log.tail(topics.REPORTS, "end")) as messages:
        async for message in messages:
            report = message.value
            if isinstance(report, Progress) and report.role == role and report.life == "working":
                return


async def answered(config: Path) -> None:
    """Return once there is an experience in the log of these settings."""
    async with awaited_log(config) as log, aclosing(log.tail(topics.EXPERIENCES, "beginning")) as messages:
        async for _ in messages:
            return


@asynccontextmanager
async def awaited_log(config: Path) -> AsyncIterator[Log]:
    """The log of a run that is only beginning, as soon as there is a broker; the caller sets the limit."""
    async with AsyncExitStack() as ending:
        while True:
            try:
                log = await ending.enter_async_context(connected(load_settings(config, []), deadline_s=5.0))
                break
            except (BrokerUnavailable, ConfigError):
                await asyncio.sleep(LOOK_S)
        yield log
