"""`headrace demo`: the whole system on one machine, one process per role, watched from here.

    settings ─> broker, model, tasks ─> roles, loads ─> read the log until the master is done ─> report

This process starts the roles, reads the log and prints a line of progress. It has no effect on the training.
Ctrl-C stops the roles in order; started again with the same folder, the run continues.
"""

import asyncio
import contextlib
import json
import logging
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.gateway.access.keys import create_key
from infra.cli.connect import app_store, connected
from infra.cli.demo.char_model import build_char_model
from infra.cli.demo.chat_model import CACHED_MODEL, cached_model, check_model
from infra.cli.demo.record import RunRecord
from infra.cli.demo.report import examples_table, finish_report, result_table
from infra.cli.demo.settings import TRAFFIC, DemoOptions, DemoTask, demo_toml, task_of
from infra.cli.demo.users import TENANTS, USERS_FILE
from infra.cli.exit_codes import CONFIG_ERROR, INTERRUPTED, last_error
from infra.cli.options import SettingsFile, command
from infra.cli.run.up import Stopped, broker_child, child_environment, role_child, roles_to_start, wait_for_broker
from infra.cli.settings import Settings, load_settings
from infra.cli.terminal import LineFormatter
from infra.local.broker import choose_address
from infra.local.supervisor import ALARM_AFTER, Child, ChildState, Supervisor
from infra.log.log import Log
from infra.roles.process import unless
from infra.settings.plugin import load
from schemas.errors import ConfigError

LOOK_S = 5.0
QUIET_S = 30.0
STOP_S = 10.0  # from a Ctrl-C to the end of what builds the model


@command
async def demo(options: DemoOptions) -> int:
    """Train a small model through the whole system, and show the result.

    The demo starts an embedded Kafka broker and one process per role, warms the model up on demonstrations, then trains it by
    reinforcement. After Ctrl-C the same command continues from the folder. It ends with a table, report.json and a plot.

    With --traffic the model learns only from simulated users after the warm-up: they send requests, rate late, correct and
    withdraw, and the gate decides which version they get.

    Example: [cyan]headrace demo --traffic --dir runs/traffic[/]
    """
    run = RunRecord(started_s=time.time())
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console = Console(stderr=True, highlight=False, quiet=options.as_json, soft_wrap=True)
    config = write_settings(options)
    sets = [f"gateway.listen=127.0.0.1:{choose_address().port}"] if options.chosen is TRAFFIC else []
    settings = load_settings(config, sets)
    log_to_file(settings.folder / "logs" / "demo.log")
    console.print(f"headrace demo in {settings.folder}; logs in {settings.folder / 'logs'}")
    broker = broker_child(settings)
    assert broker is not None, "the demo brings its own broker"
    chosen, others = SettingsFile(config, sets), load_children(settings, config)
    others += service_children(settings, options.services)
    roles = Supervisor([role_child(settings, chosen, role) for role in roles_to_start(settings)])
    async with Supervisor([broker]) as first:
        console.print(run.line("starting the broker, building the model"))
        try:
            await unless(stop.wait(), prepare(settings, first, options.chosen), Stopped)
        except Stopped:
            return INTERRUPTED
        if options.chosen is TRAFFIC:
            others.append(await asyncio.to_thread(users_child, settings, options))
        async with roles, connected(settings) as log, Supervisor(others) as beside:
            states = (first.states, roles.states, beside.states)
            with contextlib.suppress(Stopped):
                await unless(stop.wait(), until_done(log, run, settings, states, console), Stopped)
            console.print(run.line("stopping the roles"))
            await beside.stop()
            await roles.stop()
            console.print(run.line("accounting for every experience"))
            await run.read_on(log)  # the last results came while the roles were stopping
            children = [state for by_name in states for state in by_name.values()]
            values = await finish_report(log, settings, run, options, children)
    print_result(console, settings, values)
    if options.as_json:
        print(json.dumps(values))
    return INTERRUPTED if stop.is_set() else 0


async def until_done(
    log: Log, run: RunRecord, settings: Settings, states: Sequence[dict[str, ChildState]], console: Console
) -> None:
    """Wait until the master is done. A line of progress tells each change, and the same again after QUIET_S. Raises ConfigError
    if a role cannot go on.
    """
    clock, told, told_s = asyncio.get_running_loop().time, "", 0.0
    while not run.done:
        for name in failed(states):
            path = settings.folder / "logs" / f"{name}.log"
            raise ConfigError(f"{name} cannot go on: {await asyncio.to_thread(last_error, path)} (see {path})")
        await asyncio.sleep(LOOK_S)
        await run.read_on(log)
        line = run.line()
        if (news := line.partition(" s ")[2]) != told or clock() >= told_s + QUIET_S:
            console.print(line)
            told, told_s = news, clock()


def failed(states: Sequence[dict[str, ChildState]]) -> list[str]:
    """Children that have not done their work and cannot, or have failed again and again."""
    return [
        state.name
        for by_name in states
        for state in by_name.values()
        if state.given_up or state.failures >= ALARM_AFTER or (state.pid is None and state.exit_code == CONFIG_ERROR)
    ]


def print_result(console: Console, settings: Settings, values: dict[str, Any]) -> None:
    """Print the table at the end, and the commands to try next."""
    folder = settings.folder
    console.print(result_table(values))
    if "examples" in values:
        console.print(examples_table(values))
    console.print(f"plot    {folder / 'report.png'}\nreport  {folder / 'report.json'}\n")
    config = folder / "headrace.toml"
    console.print("Worth trying next:")
    for following in ("peek buffer -n 3", "peek batches -n 3", "up", "console"):
        console.print(f"  headrace {following} -c {config}", style="bold")
    console.print("The last shows all of it in the browser: every answer, every version and why.")


def log_to_file(path: Path) -> None:
    """Write messages of libraries to a file, since lines of progress are printed."""
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
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "infra.cli.demo.demo", str(settings.folder), str(settings.master.seed), task.name,
        settings.policy.model,
        stdout=asyncio.subprocess.DEVNULL,  # libraries print there, and our own output may be read by a program
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C of the terminal would be a second one, in the middle of its cleaning up
    )  # fmt: skip
    try:
        _, words = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()  # it removes the model that it has half written
            await asyncio.wait_for(process.wait(), STOP_S)
        if process.returncode is None:
            process.kill()
        raise
    if process.returncode:
        raise ConfigError(
            (words.decode(errors="replace").strip().splitlines() or ["the demo's model could not be built"])[-1]
        )
    await wait_for_broker(settings, broker)


def build(folder: Path, seed: int, task: DemoTask, model: Path) -> None:
    """Write the taskset, and the model where it is a toy's or the usual one. Raises ConfigError."""
    if task.is_toy:
        build_char_model(folder / "model", seed)
    else:
        check_model(cached_model() if model == CACHED_MODEL else model)
    if not (folder / "tasks" / "ready").exists():
        load(task.write, {"seed": seed})(folder / "tasks")
        (folder / "tasks" / "ready").touch()


def helper_child(settings: Settings, name: str, *argv: str) -> Child:
    log = settings.folder / "logs" / f"{name}.log"
    return Child(name=name, argv=argv, log=log, env=child_environment(settings), tier=3)


def load_children(settings: Settings, config: Path) -> list[Child]:
    """The two `load` commands, which end by themselves."""
    command, tasks = (sys.executable, "-m", "infra.cli.main", "load"), settings.folder / "tasks"
    return [
        helper_child(settings, f"load-{kind}", *command, kind, str(tasks / f"{kind}.jsonl"), "--config", str(config))
        for kind in ("experts", "tasks")
    ]


def service_children(settings: Settings, commands: Sequence[str]) -> list[Child]:
    return [helper_child(settings, f"service-{at}", *shlex.split(command)) for at, command in enumerate(commands)]


def users_child(settings: Settings, options: DemoOptions) -> Child:
    """The users as a child process, with a key for each tenant. It ends when they have gone. Raises StoreError."""
    assert settings.gateway is not None
    store = app_store(settings)
    made = [
        create_key(store, tenant=tenant, scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0) for tenant in TENANTS
    ]
    return Child(
        name="users",
        argv=(
            sys.executable, "-m", "infra.cli.demo.users", f"http://{settings.gateway.listen}/v1",
            str(settings.folder / USERS_FILE), str(options.minutes or TRAFFIC.minutes), str(options.seed), str(options.edits),
        ),
        log=settings.folder / "logs" / "users.log",
        env={**child_environment(settings), "HEADRACE_KEYS": ",".join(key for _, key in made)},
        final_codes=(0, CONFIG_ERROR),
        tier=3,
    )  # fmt: skip


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which cleans up, unlike the default
    try:
        build(Path(sys.argv[1]), int(sys.argv[2]), task_of(sys.argv[3]), Path(sys.argv[4]))
    except ConfigError as error:
        sys.exit(str(error))
