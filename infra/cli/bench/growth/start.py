"""How long each role takes from the start of its process until it reports that it works, cold and warm; and how long the demo
takes to its first experience.

    cold   no module is compiled, and what vLLM and torch keep of their own is not there: Python and they write to empty folders
    warm   the same once more, with what was written then

The demo's model and settings, a real broker, one role at a time; files that the system has read before stay in its memory.
Processor time is of the process and of all that it started and that still runs. A role that does not start is said in one
line, and the rest continues.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from infra.cli.bench.common.awaited_log import LOOK_S, beside_child, log_of
from infra.cli.bench.common.children import cpu_s, end_gently
from infra.local.process import start_watched

if TYPE_CHECKING:
    from infra.cli.settings import Settings
    from infra.log.log import Log

ROLES = ("master", "process", "train", "explore", "serve")
DEMO = "demo"
KINDS = ("cold", "warm")
LIMIT_S = 600.0  # for a role to work
END_S = 60.0
Say = Callable[[str], None]
Start = Callable[[Path, Mapping[str, str]], Coroutine[None, None, "Started"]]


class StartPlan(msgspec.Struct, frozen=True):
    """What is started. roles: by name. rounds: of each, cold and warm. engine: of the demo. demo: whether it is started, too.

    Example: StartPlan(roles=("master",), demo=False)
    """

    roles: tuple[str, ...] = ROLES
    rounds: int = 1
    engine: str = "vllm"
    demo: bool = True


class Started(msgspec.Struct, frozen=True):
    """One start. cpu_s, wall_s: until it was done, of processor time and of the clock."""

    cpu_s: float
    wall_s: float


def run(plan: StartPlan, say: Say = print) -> dict[str, float]:
    """The best round of each."""
    from infra.cli.settings import load_settings
    from infra.local.broker import EmbeddedKafka

    found: dict[str, list[Started]] = {}
    with tempfile.TemporaryDirectory(prefix="hr-") as name:
        folder = Path(name)
        config = written(folder / "roles", plan.engine)
        with EmbeddedKafka(folder / "kafka") as broker:
            sets = [f'kafka.bootstrap_servers="{broker.bootstrap}"', 'gateway.listen="127.0.0.1:0"']
            settings = load_settings(config, sets)
            asyncio.run(_topics(settings))
            for role in plan.roles:
                argv = role_argv(role, config, sets)

                async def start(
                    log: Path, env: Mapping[str, str], role: str = role, argv: Sequence[str] = argv
                ) -> Started:
                    return await _role_works(role, argv, settings, log, env)

                found |= rounds_of(role, start, folder / role, plan.rounds, say)
        if plan.demo:

            async def begin(log: Path, env: Mapping[str, str]) -> Started:
                return await _demo_answers(log.parent / "run", plan.engine, log, env)

            found |= rounds_of(DEMO, begin, folder / DEMO, plan.rounds, say)
    return figures_of(found)


def figures_of(found: Mapping[str, Sequence[Started]]) -> dict[str, float]:
    """The best of each."""
    return {
        f"{name}_{kind}": min(getattr(one, kind) for one in starts)
        for name, starts in found.items()
        for kind in ("cpu_s", "wall_s")
    }


def rounds_of(name: str, start: Start, folder: Path, rounds: int, say: Say) -> dict[str, list[Started]]:
    """Cold and warm starts by `name_cold` and `name_warm`; none of what does not start. start: (log, environment)."""
    found: dict[str, list[Started]] = {f"{name}_{kind}": [] for kind in KINDS}
    for number in range(rounds):
        env = fresh_caches(folder / f"caches-{number}")
        for kind in KINDS:
            say(f"start: {name}, {kind}")
            try:
                found[f"{name}_{kind}"].append(asyncio.run(start(folder / f"{number}-{kind}" / "log", env)))
            except (RuntimeError, TimeoutError) as error:
                say(f"start: {name} is left out: {error or f'it did not work within {LIMIT_S:g} s'}")
                return {}
    return found


def fresh_caches(folder: Path) -> dict[str, str]:
    """The environment in which a process finds nothing of what one before it compiled or kept, but below `folder`."""
    return {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def written(folder: Path, engine: str) -> Path:
    """The settings and the model of the demo; returns the file."""
    from infra.cli.demo.char_model import build_char_model
    from infra.cli.demo.settings import DemoOptions, demo_toml

    folder.mkdir(parents=True)
    build_char_model(folder / "model", seed=0)
    config = folder / "headrace.toml"
    config.write_text(demo_toml(DemoOptions(directory=folder, engine=engine)))
    return config


def role_argv(role: str, config: Path, sets: Sequence[str]) -> list[str]:
    """What starts a role."""
    overrides = [argument for one in sets for argument in ("--set", one)]
    return [sys.executable, "-m", "infra.cli.main", role, "--config", str(config), *overrides]


async def _topics(settings: "Settings") -> None:
    from infra.cli.connect import connected, create_topics

    async with connected(settings, create=True) as log:
        await create_topics(log, settings)


async def _role_works(
    role: str, argv: Sequence[str], settings: "Settings", log_file: Path, env: Mapping[str, str]
) -> Started:
    """Until it reports that it works. Raises RuntimeError where it ends before, TimeoutError."""
    from infra.cli.connect import connected
    from infra.cli.run.up import child_environment

    async with connected(settings) as log:
        working = asyncio.create_task(_working(log, role))
        await asyncio.sleep(LOOK_S)  # it reads from the end on
        begin_s = time.perf_counter()
        child = start_watched(argv, log=log_file, env={**child_environment(settings), **env})
        try:
            async with asyncio.timeout(LIMIT_S):
                await beside_child(working, child, log_file)
            return Started(cpu_s(child.pid), time.perf_counter() - begin_s)
        finally:
            await asyncio.to_thread(end_gently, child, END_S)


async def _working(log: "Log", role: str) -> None:
    from schemas import Progress, topics

    async with aclosing(log.tail(topics.REPORTS, "end")) as messages:
        async for message in messages:
            report = message.value
            if isinstance(report, Progress) and report.role == role and report.life == "working":
                return


async def _demo_answers(folder: Path, engine: str, log_file: Path, env: Mapping[str, str]) -> Started:
    """Until its first experience is in the log, from the command on."""
    argv = [sys.executable, "-m", "infra.cli.main", "demo", "--dir", str(folder), "--engine", engine, "--json"]
    begin_s = time.perf_counter()
    child = start_watched(argv, log=log_file, env=env)
    try:
        async with asyncio.timeout(LIMIT_S):
            await beside_child(asyncio.create_task(_answered(folder / "headrace.toml")), child, log_file)
        return Started(cpu_s(child.pid), time.perf_counter() - begin_s)
    finally:
        await asyncio.to_thread(end_gently, child, END_S)


async def _answered(config: Path) -> None:
    """Until there is an experience in the log of these settings."""
    from schemas import topics

    async with log_of(config) as log, aclosing(log.read_all(topics.EXPERIENCES, until_end=False)) as messages:
        async for _ in messages:
            return
