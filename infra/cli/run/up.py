"""`headrace up`: a broker if none is configured, and one process per role, kept running until Ctrl-C."""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console

from infra.cli.connect import UP_LOCK, app_store, broker_address, connected, create_topics, kafka_folder, quieten_client
from infra.cli.exit_codes import CONFIG_ERROR, FENCED_OUT, INTERRUPTED, STOPPED, last_error
from infra.cli.options import SettingsFile, command
from infra.cli.run.roles import CODE_VARIABLE, metrics_address, shown_host
from infra.cli.settings import Settings
from infra.cli.terminal import Screen, printable
from infra.files import is_locked, lock_folder, release_folder
from infra.local.supervisor import ALARM_AFTER, Child, ChildEvent, ChildState, Supervisor
from infra.observe.metrics import LISTEN_VARIABLE
from infra.roles.process import unless
from infra.settings.config import split_address
from schemas.errors import BrokerUnavailable, ConfigError

ROLES = ("explore", "train", "process", "master")  # started in this order: the slowest to load first
CANARY = "canary"
CONSOLE = "console"
INDEX = "trace"
CONSOLE_LINK = "HEADRACE_CONSOLE_LINK"  # environment variable of the console: the secret of its link
CONSOLE_READY = "console.ready"  # in the run's state: the URL of that console, once it listens
METRICS_ORDER = ("master", "train", "process", "explore", "serve", CANARY)  # ports from the first that is named
COMMANDS = {
    CANARY: ("serve", "--channel", "canary"),
    INDEX: ("trace", "--keep-up"),
}  # of roles that are not named as theirs
BROKER = "kafka"
MAX_BACKOFF_S = 30.0  # of a role
AFTER_DRAIN_S = 5.0  # for a role's last records and the end of its engine
EMBEDDED_S = 120.0  # that the embedded broker may take to start
READY_S = 0.5  # between two looks for a file that a child makes


class Stopped(Exception):
    """The user asked for the end before the start was done."""


def broker_child(settings: Settings) -> Child | None:
    if settings.kafka.bootstrap_servers:
        return None
    return Child(
        name=BROKER,
        argv=(sys.executable, "-m", "infra.local.broker", str(kafka_folder(settings))),
        log=settings.folder / "logs" / "kafka.log",
        final_codes=(),
        mistakes=(CONFIG_ERROR,),
        tier=0,
        stop_s=30.0,
    )


def refuse_anothers_broker(settings: Settings) -> None:
    """Raise ConfigError while another command has the embedded broker: it answers, but ends with that command."""
    from infra.local.broker import LOCK

    lock = kafka_folder(settings) / LOCK
    if not settings.kafka.bootstrap_servers and is_locked(lock):
        release_folder(lock_folder(lock, f"Kafka's folder {lock.parent}"))


def role_child(settings: Settings, chosen: SettingsFile, role: str) -> Child:
    return Child(
        name=role,
        argv=(sys.executable, "-m", "infra.cli.main", *COMMANDS.get(role, (role,)), *chosen.arguments),
        log=settings.folder / "logs" / f"{role}.log",
        env=child_environment(settings) | metrics_environment(settings, role) | {CODE_VARIABLE: str(STOPPED)},
        final_codes=(0, FENCED_OUT),
        mistakes=(CONFIG_ERROR,),
        max_backoff_s=MAX_BACKOFF_S,
        tier=2 if role == "master" else 1,
        stop_s=time_to_stop(settings, role),
    )


def time_to_stop(settings: Settings, role: str) -> float:
    """Seconds from SIGTERM to SIGKILL: a role's running work ends before its process does."""
    if role == "train":
        return 60.0  # for an optimizer step
    gateway_s = 0.0 if settings.gateway is None else settings.gateway.drain_s
    drains = {"explore": settings.explore.drain_s, "serve": gateway_s, CANARY: gateway_s}
    return max(15.0, drains.get(role, 0.0) + AFTER_DRAIN_S)


def console_child(settings: Settings, chosen: SettingsFile, link: str) -> Child:
    """The pages in the browser; no role waits for them, and they may fail alone."""
    child = role_child(settings, chosen, CONSOLE)
    return msgspec.structs.replace(child, env={**child.env, CONSOLE_LINK: link})


def child_environment(settings: Settings) -> dict[str, str]:
    """Environment of every role: one thread each where cores are few."""
    # A thread of OpenMP that waits gives its core away, since the roles have more threads than the machine has cores; torch's
    # (libgomp) after some 50 µs, since at once would cost the learner a tenth of a step.
    environment = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
    if (os.cpu_count() or 1) <= 4:
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return environment


def metrics_environment(settings: Settings, role: str) -> dict[str, str]:
    """A port of its own for each role, where the settings (or the environment) name a first one."""
    host, first = metrics_address(settings)
    port = first + METRICS_ORDER.index(role) if first and role in METRICS_ORDER else 0
    return {LISTEN_VARIABLE: f"{host}:{port}"}


async def wait_for_broker(settings: Settings, supervisor: Supervisor) -> None:
    """Until the broker answers and its topics exist. Raises ConfigError or BrokerUnavailable with the broker's last words."""
    deadline_s = settings.kafka.deadline_s
    if not settings.kafka.bootstrap_servers:
        deadline_s = max(EMBEDDED_S, deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            await _until_it_answers(settings, supervisor)
    except TimeoutError as error:
        where = settings.kafka.bootstrap_servers or f"the embedded broker in {kafka_folder(settings)}"
        raise BrokerUnavailable(f"Kafka at {where} did not answer within {deadline_s:g} s") from error
    async with connected(settings, create=True) as log:
        await create_topics(log, settings)


async def _until_it_answers(settings: Settings, supervisor: Supervisor) -> None:
    from infra.log.access import kafka_access
    from infra.log.kafka import answers

    quieten_client()
    while True:
        state = supervisor.states.get(BROKER)
        if state is not None and (state.failures >= ALARM_AFTER or state.exit_code == CONFIG_ERROR):
            kind = ConfigError if state.exit_code == CONFIG_ERROR else BrokerUnavailable
            raise kind(last_error(settings.folder / "logs" / "kafka.log") or "the broker did not start")
        try:
            address = broker_address(settings)
        except ConfigError:
            address = ""
        if address and await answers(address, timeout_s=2.0, access=kafka_access(settings)):
            return
        await asyncio.sleep(0.1)


@command
async def up(chosen: SettingsFile) -> int:
    """Start the broker (unless one is configured) and one process per role; Ctrl-C stops them.

    `up` restarts a role that crashes or is ended by a signal, so `kill` of a role makes it read changed plugins and settings.
    Output of the roles goes to logs/ next to the TOML. If a role cannot start for a reason that a restart cannot fix, `up`
    stops all roles; a failing console stops nothing.

    Example: [cyan]headrace up -c support/headrace.toml --set trainer.learning_rate=1e-6[/]
    """
    settings = chosen.load()
    with lock_folder(settings.folder / UP_LOCK, f"headrace up in {settings.folder}"):
        refuse_anothers_broker(settings)
        return await _run_here(settings, chosen)


async def _run_here(settings: Settings, chosen: SettingsFile) -> int:
    children = [role_child(settings, chosen, role) for role in roles_to_start(settings)]
    console = Screen(stderr=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    tell_user = teller(settings.folder / "logs", console)

    def tell(event: ChildEvent) -> None:
        tell_user(event)
        if event.kind == "gave_up" and event.name in roles_to_start(settings):
            stop.set()

    broker = broker_child(settings)
    async with Supervisor([broker] if broker else [], tell) as first:
        try:
            await unless(stop.wait(), wait_for_broker(settings, first), Stopped)
        except Stopped:
            return INTERRUPTED
        console.print(
            f"broker at {broker_address(settings)}; logs in {settings.folder / 'logs'}; Ctrl-C stops everything"
        )
        if settings.gateway is not None:
            await asyncio.to_thread(say_door, settings, console)
        beside, link = [role_child(settings, chosen, INDEX)], secrets.token_urlsafe(24)
        if settings.console.up:
            beside.append(console_child(settings, chosen, link))
        ready = settings.folder / "state" / CONSOLE_READY
        ready.unlink(missing_ok=True)
        async with Supervisor([*children, *beside], tell) as roles:
            saying = asyncio.create_task(say_console(ready, link, console))
            with suppress(Stopped):
                await unless(stop.wait(), roles.wait(*roles_to_start(settings)), Stopped)
            saying.cancel()
        failed = failed_roles(roles.states.values())
    for name in failed:
        console.print(f"{name} failed; see {settings.folder / 'logs' / (name + '.log')}", style="red")
    return 1 if failed else 0


def failed_roles(states: Iterable[ChildState]) -> list[str]:
    """Names of roles that gave up or lost their role to another process. The console may fail alone."""
    return [
        state.name for state in states if state.name != CONSOLE and (state.given_up or state.exit_code == FENCED_OUT)
    ]


def teller(logs: Path, console: Console) -> Callable[[ChildEvent], None]:
    """A printer of events for the terminal of `up`; it prints the cause of a child's end once, until there is another."""
    causes: dict[str, str] = {}

    def tell(event: ChildEvent) -> None:
        name = event.name
        match event.kind:
            case "exited" if event.exit_code != 0:
                cause = end_cause(event, logs / f"{name}.log")
                if cause and causes.get(name) != cause:
                    causes[name] = cause
                    console.print(f"{name} exited (exit code {event.exit_code})")
                    console.print(f"  {cause}", style="red", soft_wrap=True)
            case "started" | "restarting" if event.restarts and event.exit_code != STOPPED:
                pass
            case "restarting":
                console.print(f"{name} was ended by a signal that headrace up did not send: it is started again")
            case "failing":
                again = f"it is tried again at least every {MAX_BACKOFF_S:g} s"
                console.print(f"{name} has failed {ALARM_AFTER} times in a row; {again}")
            case "gave_up":
                console.print(f"{name} is not started again: a restart cannot fix this")
            case _:
                console.print(f"{name} {event.kind}")

    return tell


def end_cause(event: ChildEvent, log: Path) -> str:
    """Why a child has ended, "" where it was stopped or has done its work."""
    if event.exit_code in (0, None, STOPPED):
        return ""
    if event.exit_code == -signal.SIGKILL and event.stopping:
        return "killed: it was asked to stop and did not end in time"
    if event.exit_code < 0:
        memory = ", perhaps for want of memory" if event.exit_code == -signal.SIGKILL else ""
        return f"ended by signal {-event.exit_code}{memory}"
    cause = printable(last_error(log))
    if event.exit_code == FENCED_OUT:
        return f"{event.name} runs elsewhere now, and is not started here again: {cause}"
    return cause


def roles_to_start(settings: Settings) -> tuple[str, ...]:
    """The roles to start; a gateway is one where the file has a [gateway], a canary where that has one."""
    if settings.gateway is None:
        return ROLES
    return ("serve", *ROLES) if settings.gateway.canary is None else ("serve", CANARY, *ROLES)


async def say_console(ready: Path, link: str, console: Console) -> None:
    """Print the link of the console once that has written its URL."""
    while not await asyncio.to_thread(ready.exists):  # noqa: ASYNC110 (another process makes it)
        await asyncio.sleep(READY_S)
    console.print(f"console {await asyncio.to_thread(ready.read_text)}/enter?link={link}", soft_wrap=True)


def say_door(settings: Settings, console: Console) -> None:
    """Print where the gateway is, and a key where there is none yet. Raises StoreError."""
    from actors.gateway.access.keys import create_key, list_keys

    assert settings.gateway is not None
    host, port = split_address(settings.gateway.listen)
    console.print(f"base_url http://{shown_host(host)}:{port}/v1  (as soon as the model is loaded)")
    store = app_store(settings)
    if not list_keys(store):
        _, shown = create_key(store, tenant="default", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)
        console.print(f"api_key  {shown}  (shown once; it may be trained on: see `headrace keys`)", soft_wrap=True)
