"""`headrace up` and `headrace console`: what they start, when links are printed, how they give up and end."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from infra.cli.demo.char_model import build_char_model
from infra.cli.exit_codes import CONFIG_ERROR
from infra.cli.main import app
from infra.cli.options import SettingsFile
from infra.cli.run.roles import gateway_config
from infra.cli.run.stay_down import VARIABLE
from infra.cli.run.up import (
    CONSOLE_READY,
    ROLES,
    broker_child,
    console_child,
    end_cause,
    failed_roles,
    role_child,
    roles_to_start,
    say_console,
    teller,
)
from infra.cli.settings import load_settings
from infra.cli.terminal import Screen
from infra.files import lock_folder
from infra.local.broker import choose_address, plan_address
from infra.local.http_server import bound
from infra.local.supervisor import Child, ChildEvent, Supervisor
from infra.observe.metrics import LISTEN_VARIABLE
from schemas.errors import ConfigError
from tests.actors.rig import until


def settings_file(tmp_path: Path, kafka: str = "") -> Path:
    file = tmp_path / "headrace.toml"
    file.write_text(f'app = "bot"\n[kafka]\n{kafka}\n')
    return file


def test_every_role_is_a_process_with_the_same_settings_and_outlives_no_broker(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    settings = load_settings(file)
    broker = broker_child(settings)
    assert broker is not None and str(tmp_path / "kafka") in broker.argv
    assert (broker.final_codes, broker.mistakes) == ((), (2,)), "no role works without it"
    assert broker_child(load_settings(file, ["kafka.bootstrap_servers=a:1"])) is None
    (link := tmp_path / "link.toml").symlink_to(file)
    for role, named in zip(ROLES, (file, link) * 2, strict=True):
        child = role_child(settings, SettingsFile(named, ["a.b=1", "c=2"]), role)
        assert child.argv[3:] == (role, "--config", str(file), "--set", "a.b=1", "--set", "c=2")
        assert child.log == tmp_path / "logs" / f"{role}.log" and child.tier > broker.tier
        assert 2 in child.mistakes, "a mistake in the settings is given up at the start, and tried again later"
        assert child.final_codes == (0, 3), "a role that runs elsewhere is not taken back from there"


async def test_a_role_that_another_process_has_taken_over_stays_down_and_counts_as_failed(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    child = msgspec.structs.replace(
        role_child(load_settings(file), SettingsFile(file), "train"), argv=(sys.executable, "-c", "raise SystemExit(3)")
    )
    async with Supervisor([child]) as supervisor:
        await supervisor.wait("train")
    states = supervisor.states
    assert (states["train"].restarts, states["train"].given_up) == (0, False)
    assert failed_roles(states.values()) == ["train"]


def test_a_canary_is_a_second_serve_process_where_the_gateway_has_one(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    assert "serve" not in roles_to_start(load_settings(file))
    file.write_text('app = "bot"\n[gateway.canary]\nurl = "http://127.0.0.1:8010"\n')
    settings = load_settings(file)
    assert roles_to_start(settings)[:2] == ("serve", "canary")
    child = role_child(settings, SettingsFile(file), "canary")
    assert child.name == "canary" and child.argv[3:6] == ("serve", "--channel", "canary")
    assert gateway_config(load_settings(file, ["gateway.channel=canary"])).listen == "127.0.0.1:8010"


def test_up_kills_no_role_that_still_has_time_for_its_running_work(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    settings = load_settings(file, ["explore.drain_s=60", "gateway.drain_s=40", "gateway.canary.url=http://a:1"])
    stops = {role: role_child(settings, SettingsFile(file), role).stop_s for role in roles_to_start(settings)}
    assert stops["explore"] > 60 and min(stops["serve"], stops["canary"]) > 40 and min(stops.values()) >= 15


def test_a_configured_broker_that_is_away_is_one_line_after_the_deadline(tmp_path: Path) -> None:
    file = settings_file(tmp_path, 'bootstrap_servers = "127.0.0.1:1"\ndeadline_s = 0.5')
    command = [sys.executable, "-m", "infra.cli.main", "up", "-c", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines() == ["headrace: Kafka at 127.0.0.1:1 did not answer within 0.5 s"]


def test_a_second_up_in_the_same_folder_is_refused_with_the_process_that_runs_it(tmp_path: Path) -> None:
    file = settings_file(tmp_path, 'bootstrap_servers = "127.0.0.1:1"')
    with lock_folder(tmp_path / "state" / "up.lock", "this folder"):
        command = [sys.executable, "-m", "infra.cli.main", "up", "-c", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"headrace: headrace up in {tmp_path} is in use by process {os.getpid()}: stop it, or choose another folder\n"
    )


def test_up_starts_nothing_while_another_command_has_the_embedded_broker(tmp_path: Path) -> None:
    """That broker ends with its command, and all roles would fail."""
    folder = tmp_path / "kafka"
    with lock_folder(folder / "broker.lock", "this folder"), up(settings_file(tmp_path)) as process:
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (
        2, f"headrace: Kafka's folder {folder} is in use by process {os.getpid()}: stop it, or choose another folder\n"
    )  # fmt: skip
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("lock", ["state/up.lock", "kafka/broker.lock"])
@pytest.mark.parametrize("has_begun", [False, True], ids=["first-start", "later-start"])
def test_a_command_that_looks_while_up_starts_its_broker_says_to_try_again(
    lock: str, has_begun: bool, tmp_path: Path
) -> None:
    file = settings_file(tmp_path)
    if has_begun:
        plan_address(tmp_path / "kafka")
    with lock_folder(tmp_path / lock, "this folder"):
        found = CliRunner().invoke(app, ["status", "-c", str(file)])
    assert found.exit_code == 1
    assert found.stderr.startswith(
        f"headrace: the broker in {tmp_path / 'kafka'} does not answer yet: `headrace up` or"
    )
    assert "try again" in found.stderr and "stop it" not in found.stderr


async def test_up_prints_the_cause_of_a_role_that_cannot_start_once_and_an_alarm_where_it_goes_on(
    tmp_path: Path,
) -> None:
    said = io.StringIO()
    tell = teller(tmp_path, Screen(file=said, width=200))
    code = "import sys; print('ValueError: no room', file=sys.stderr); sys.exit(1)"
    child = Child(name="explore", argv=(sys.executable, "-S", "-c", code), log=tmp_path / "explore.log")
    child_ = msgspec.structs.replace(child, max_backoff_s=0.01)
    async with Supervisor([child_], tell):
        await until(lambda: "in a row" in said.getvalue())
    assert said.getvalue().splitlines()[:4] == [
        "explore started",
        "explore exited (exit code 1)",
        "  ValueError: no room",
        "explore has failed 3 times in a row; it is tried again at least every 30 s",
    ]


@pytest.mark.parametrize(
    ("stopping", "cause"),
    [
        (False, "ended by signal 9, perhaps for want of memory"),
        (True, "killed: it was asked to stop and did not end in time"),
    ],
)
def test_a_kill_by_up_itself_is_not_told_as_want_of_memory(tmp_path: Path, stopping: bool, cause: str) -> None:
    event = ChildEvent(name="serve", kind="exited", pid=1, exit_code=-signal.SIGKILL, stopping=stopping)
    assert end_cause(event, tmp_path / "serve.log") == cause


def test_up_obeys_nothing_that_a_role_wrote(tmp_path: Path) -> None:
    said = io.StringIO()
    (tmp_path / "serve.log").write_text("headrace: cannot \x1b[2Jlisten")
    event = ChildEvent(name="serve", kind="exited", pid=1, exit_code=1)
    teller(tmp_path, Screen(file=said, width=200))(event)
    assert "cannot \\x1b[2Jlisten" in said.getvalue() and "\x1b" not in said.getvalue()


def test_every_role_of_a_machine_serves_its_metrics_on_a_port_of_its_own(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    settings = load_settings(file, ["metrics.listen=0.0.0.0:9200"])
    told = {role: role_child(settings, SettingsFile(file), role).env[LISTEN_VARIABLE] for role in ROLES}
    assert told["master"] == "0.0.0.0:9200" and len(set(told.values())) == len(ROLES)
    free = load_settings(file)
    assert {role_child(free, SettingsFile(file), role).env[LISTEN_VARIABLE] for role in ROLES} == {"127.0.0.1:0"}


def up(config: Path, *sets: str) -> subprocess.Popen[str]:
    overrides = [argument for override in sets or ("console.up=false",) for argument in ("--set", override)]
    command = [sys.executable, "-m", "infra.cli.main", "up", "-c", str(config), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


async def test_the_link_that_up_prints_is_at_the_address_where_the_console_listens(tmp_path: Path) -> None:
    said = io.StringIO()
    (tmp_path / CONSOLE_READY).write_text("http://machine:40001")
    await say_console(tmp_path / CONSOLE_READY, "secret", Screen(file=said))
    assert said.getvalue() == "console http://machine:40001/enter?link=secret\n"


@pytest.mark.slow
def test_a_role_that_gives_up_at_its_start_ends_up_with_the_roles_last_line(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(f'app = "{app_name}"\n[kafka]\nbootstrap_servers = "{kafka}"\npartitions = 1\n')
    with up(file) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    said = " ".join(out.split())
    assert "policy.model: missing, expected a model folder or a Hugging Face name" in said
    assert "exited (exit code 2)" in said and " failed; see " in said


@pytest.mark.slow
def test_up_starts_the_console_and_the_link_that_it_prints_opens_the_pages(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{choose_address().port}"
    with up(small_run(tmp_path, app_name, kafka), f"console.listen={listen}") as process:
        stopper = threading.Timer(180, process.kill)
        stopper.start()
        assert process.stdout is not None
        links = (line.split()[1] for line in process.stdout if line.startswith("console http"))
        link = next(links)
        assert link.startswith(f"http://{listen}/enter?link=")
        with httpx.Client(verify=False, follow_redirects=True, timeout=60.0) as client:  # it speaks without TLS
            page = answered(client, link)
            assert page.status_code == 200 and "<h1>Flow</h1>" in page.text and app_name in page.text
            assert client.get(f"http://{listen}/enter?link=another").status_code == 401
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        stopper.cancel()
    assert "console failed" not in rest


def answered(client: httpx.Client, url: str) -> httpx.Response:
    """First answer of a server that begins to listen."""
    while True:
        try:
            return client.get(url)
        except httpx.ConnectError:
            time.sleep(0.05)


def small_run(folder: Path, app: str, kafka: str) -> Path:
    """The settings of a run that begins within seconds."""
    build_char_model(folder / "model", seed=0)
    file = folder / "headrace.toml"
    file.write_text(
        f'app = "{app}"\n[policy]\nmodel = "model"\n[engine]\nuse = "actors.engines.torch:TorchEngine"\n'
        f'[kafka]\nbootstrap_servers = "{kafka}"\npartitions = 1\n'
    )
    return file


LIMIT_S = 60.0


def started(folder: Path, *arguments: str, stays: str) -> "subprocess.Popen[str]":
    (folder / "headrace.toml").write_text('app = "a"\nno_such_section = 1\n')
    command = [sys.executable, "-m", "infra.cli.main", *arguments, "-c", str(folder / "headrace.toml")]
    return subprocess.Popen(command, env={**os.environ, VARIABLE: stays}, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_role_with_a_mistake_in_its_settings_says_so_once_waits_and_ends_as_soon_as_it_is_stopped(
    tmp_path: Path,
) -> None:
    with started(tmp_path, "master", stays="1") as process:
        assert process.stderr is not None
        assert "no_such_section" in process.stderr.readline()
        assert process.stderr.readline() == "headrace: a restart cannot fix this: master waits for a fix\n"
        process.terminate()
        assert process.wait(LIMIT_S) == CONFIG_ERROR
        assert process.stderr.read() == ""


STOPPED_WHILE_IT_SPEAKS = """
import os, signal, sys
from infra.cli.run.stay_down import stay_down

class Stops:
    def write(self, text):
        os.kill(os.getpid(), signal.SIGTERM)
    def flush(self):
        pass

sys.stderr = Stops()
stay_down("master", int(sys.argv[1]))
"""


def test_a_stop_that_comes_while_it_says_that_it_waits_is_not_lost_and_the_code_is_the_roles() -> None:
    command = [sys.executable, "-c", STOPPED_WHILE_IT_SPEAKS, str(CONFIG_ERROR)]
    assert subprocess.run(command, timeout=LIMIT_S, check=False).returncode == CONFIG_ERROR


@pytest.mark.full
@pytest.mark.parametrize(("command", "stays"), [("master", ""), ("check", "1")], ids=["not asked for", "no role"])
def test_a_role_that_is_not_asked_to_wait_and_any_other_command_end(command: str, stays: str, tmp_path: Path) -> None:
    with started(tmp_path, command, stays=stays) as process:
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == CONFIG_ERROR and "waits for a fix" not in said


def test_a_port_that_is_taken_is_said_with_the_setting_that_names_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf'console.listen: cannot listen on "{address}"'):
            bound(address, "console.listen")


def test_up_starts_the_console_and_its_link_is_no_argument(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    settings = load_settings(file)
    child = console_child(settings, SettingsFile(file, ["a.b=1"]), "a-secret")
    assert child.argv[3:] == ("console", "--config", str(file), "--set", "a.b=1")
    assert "a-secret" not in child.argv and child.env["HEADRACE_CONSOLE_LINK"] == "a-secret"
    assert role_child(settings, SettingsFile(file), "trace").argv[3:5] == ("trace", "--keep-up")
