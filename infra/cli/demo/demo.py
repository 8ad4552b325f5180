"""`headrace demo`: the whole system on one machine, one process per role, watched from here.

    settings ─┬─> broker, model, tasks ─┬─> loads ─> watch the log until the master is done ─> report
              └─> roles, which wait ────┘

This process starts the roles, reads the log and draws. Nothing it does changes what is learned. Ctrl-C stops the roles in
order; started again with the same folder, the run goes on where it was.
"""

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from infra.cli.connect import connected
from infra.cli.demo.demo_task import DemoTask
from infra.cli.demo.report import finish_report
from infra.cli.demo.screen import DemoScreen
from infra.cli.demo.settings import DemoOptions, demo_toml, task_of
from infra.cli.demo.traffic import gateway_settings, users_child
from infra.cli.demo.watch import Watch, follow_log
from infra.cli.run.early import early
from infra.cli.run.up import Stopped, broker_child, child_environment, role_child, roles_of, wait_for_broker
from infra.cli.settings import Settings, load_settings
from infra.cli.terminal import LineFormatter
from infra.local.supervisor import Child, Supervisor
from infra.roles.unless import unless
from schemas.errors import ConfigError


async def run_demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code: 0 when it came to its end, 130 after Ctrl-C."""
    started_s = time.time()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console(stderr=True, highlight=False, quiet=options.quiet)
    config = write_settings(options)
    sets = (*options.sets, *(gateway_settings() if options.traffic else ()))
    settings = load_settings(config, sets)
    log_to_file(settings.folder / "logs" / "demo.log")
    watch = Watch(started_s=started_s)
    screen = DemoScreen(console, watch, settings, options)
    broker = broker_child(settings)
    assert broker is not None, "the demo brings its own broker"
    others = loads(settings, config)
    with tempfile.TemporaryDirectory(prefix="hr-") as place:
        begin = Path(place) / "begin"
        # The roles load their libraries while the broker starts and the model is built.
        roles = Supervisor([early(one, begin) for one in role_children(settings, config, sets)], watch.child_event)
        async with Supervisor([broker], watch.child_event) as first, roles:
            with screen:
                watch.phase = "starting the broker, building the model"
                try:
                    await unless(stop.wait(), prepare(settings, first, task_of(options.task)), Stopped)
                except Stopped:
                    return 130
                if options.traffic:
                    others.append(await asyncio.to_thread(users_child, settings, options.minutes))
                await asyncio.to_thread(begin.touch)
                await play(settings, watch, stop, (first, roles), others)
                watch.phase = "accounting for every experience"
                async with connected(settings) as log:
                    report = await finish_report(log, settings, watch, options)
    screen.print_result(report)
    if options.quiet:
        print(report.to_json())
    return 130 if stop.is_set() else 0


async def play(
    settings: Settings,
    watch: Watch,
    stop: asyncio.Event,
    running: tuple[Supervisor, Supervisor],
    others: Sequence[Child],
) -> None:
    """Until the master is done, or a stop; then all but the broker are stopped. running: the broker, and the roles."""
    first, roles = running
    async with connected(settings) as log, Supervisor(others, watch.child_event) as beside:
        watch.children = (first.states, roles.states, beside.states)
        follower = asyncio.create_task(follow_log(log, watch))
        try:
            with contextlib.suppress(Stopped):
                await unless(stop.wait(), until_done(watch, follower, settings), Stopped)
        finally:
            watch.phase = "stopping the roles"
            await beside.stop()
            await roles.stop()
            follower.cancel()


async def until_done(watch: Watch, follower: asyncio.Task[None], settings: Settings) -> None:
    """Wait until the master says that it is done. Raises ConfigError with a role's last words if it cannot go on."""
    while not watch.done.is_set():
        if follower.done():
            follower.result()
        for name in watch.failed():
            log = settings.folder / "logs" / f"{name}.log"
            words = (await asyncio.to_thread(log.read_text, errors="replace")).strip().splitlines()
            raise ConfigError(f"{name} cannot go on: {words[-1] if words else 'it said nothing'} (see {log})")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await watch.done.wait()


def log_to_file(path: Path) -> None:
    """Write messages of libraries to a file, since the screen is drawn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


def write_settings(options: DemoOptions) -> Path:
    """Write the settings file of a new folder; that of a run to go on with stays. Returns its path."""
    config = options.directory.resolve() / "headrace.toml"
    text = demo_toml(options)
    if config.exists():
        if config.read_text() != text:
            raise ConfigError(f"{config} is of a run with other options; go on with those, or choose another --dir")
        return config
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text)
    return config


async def prepare(settings: Settings, broker: Supervisor, task: DemoTask) -> None:
    """Write model and taskset while the broker starts, in a process of its own so that this one stays small."""
    folder = settings.folder
    if not (folder / "tasks" / "ready").exists():
        script = (
            "import sys; from pathlib import Path; "
            "from infra.cli.demo.char_model import build_char_model; from infra.cli.demo.settings import TASKS; "
            "from infra.settings.plugin import find; "
            "folder, seed, task = Path(sys.argv[1]), int(sys.argv[2]), TASKS[sys.argv[3]]; "
            "find(task.write)(folder / 'tasks', seed=seed); "
            "build_char_model(folder / 'model', seed, task.vocabulary, task.size); (folder / 'tasks' / 'ready').touch()"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            script,
            str(folder),
            str(settings.master.seed),
            task.name,
            stdout=asyncio.subprocess.DEVNULL,  # libraries print there, and our own output may be read by a program
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, words = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode:
            raise ConfigError(f"the demo's model could not be built: {words.decode(errors='replace')[-600:]}")
    await wait_for_broker(settings, broker)


def children(settings: Settings, config: Path, sets: Sequence[str] = ()) -> list[Child]:
    """The roles, and the two `load` commands. sets: overrides of the settings, for every role."""
    return [*role_children(settings, config, sets), *loads(settings, config)]


def role_children(settings: Settings, config: Path, sets: Sequence[str]) -> list[Child]:
    """The roles alone."""
    return [role_child(settings, config, sets, role) for role in roles_of(settings)]


def loads(settings: Settings, config: Path) -> list[Child]:
    """The two `load` commands, which end by themselves."""
    return [
        Child(
            name=f"load-{kind}",
            argv=(
                sys.executable, "-m", "infra.cli.main", "load", kind,
                str(settings.folder / "tasks" / f"{kind}.jsonl"), "--config", str(config),
            ),
            log=settings.folder / "logs" / f"load-{kind}.log",
            env=child_environment(settings),
            tier=3,
        )
        for kind in ("experts", "tasks")
    ]  # fmt: skip
