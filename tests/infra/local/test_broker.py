"""The embedded broker: its address, files, jars, and what is loaded ahead."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.broker import EmbeddedKafka, read_address
from infra.local.jars import Jar, class_path, read_lock
from infra.log.access import Access, embedded_access
from infra.log.kafka import KafkaBus, answers
from schemas.errors import BrokerUnavailable, ConfigError
from tests.actors.rig import until

pytestmark = pytest.mark.slow
DEADLINE_S = 60.0


def java_processes(folder: Path) -> list[int]:
    """Pids of the Java processes that serve a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"kafka.Kafka\0" in command and str(folder).encode() in command and b"parent_watch" not in command:
            found.append(int(entry.name))
    return found


async def send_one(bootstrap: str, value: bytes) -> int:
    bus = KafkaBus(bootstrap, deadline_s=DEADLINE_S)
    await bus.start()
    await bus.create_topic("kept", 1, {})
    position = await bus.send("kept", value, key=b"k")
    await bus.close()
    return position.offset


def test_a_restart_keeps_address_and_records(tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path / "kafka") as broker:
        first = broker.bootstrap
        assert asyncio.run(send_one(first, b"a")) == 0
        broker.stop()
        assert broker.start() == first
        assert asyncio.run(send_one(first, b"b")) == 1
        broker.kill()
        assert broker.start() == first
        assert asyncio.run(send_one(first, b"c")) == 2
    assert java_processes(tmp_path) == []


def test_a_parent_that_is_killed_leaves_no_broker_and_the_next_one_starts(tmp_path: Path) -> None:
    folder = tmp_path / "kafka"
    owner = subprocess.Popen([sys.executable, "-m", "infra.local.broker", str(folder)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout as line:
        assert line.readline().startswith(b"kafka at 127.0.0.1:")
    assert len(java_processes(folder)) == 1
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    # No waiting for the old one: the lock on the folder does that.
    with EmbeddedKafka(folder) as broker:
        assert len(java_processes(folder)) == 1
        assert asyncio.run(answers(broker.bootstrap, timeout_s=10))
    asyncio.run(until(lambda: java_processes(folder) == []))


def test_the_command_stops_cleanly_and_reports_a_dead_broker(tmp_path: Path) -> None:
    folder = tmp_path / "kafka"
    command = [sys.executable, "-m", "infra.local.broker", str(folder)]
    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith(b"kafka at 127.0.0.1:")
        (java,) = java_processes(folder)
        os.kill(owner.pid if number == signal.SIGTERM else java, number)
        owner.communicate()
        assert owner.returncode == code
        assert java_processes(folder) == []


@pytest.mark.parametrize("is_formatted", [False, True])
def test_a_broker_that_cannot_start_says_why(
    is_formatted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_formatted:
        (tmp_path / "kafka" / "data").mkdir(parents=True)
        (tmp_path / "kafka" / "data" / "meta.properties").touch()
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "kafka_2.13-0.0.jar").touch()
    monkeypatch.setenv("HEADRACE_KAFKA_JARS", str(jars))
    broker = EmbeddedKafka(tmp_path / "kafka")
    with pytest.raises(BrokerUnavailable, match=r"broker\.log"):
        broker.start()
    assert broker.pid is None
    assert read_address(tmp_path / "kafka") is not None
    command = [sys.executable, "-m", "infra.local.broker", str(broker.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "") and line.startswith("headrace: Kafka")
    assert f"see {broker.log}: Caused by: java.lang.ClassNotFoundException: kafka." in line


def test_a_broker_with_a_password_lets_in_only_who_can_read_its_folder(tmp_path: Path) -> None:
    async def lets_in(bootstrap: str, access: Access) -> bool:
        try:
            return await answers(bootstrap, timeout_s=5.0, access=access)
        except ConfigError:
            return False

    with EmbeddedKafka(tmp_path / "kafka", with_password=True) as broker:
        access = embedded_access(broker.folder)
        address = read_address(broker.folder)
        assert address is not None
        wrong = Access(protocol="SASL_PLAINTEXT", username=access.username, password="guess")
        for bootstrap in (address.bootstrap, f"127.0.0.1:{address.controller_port}"):
            assert [asyncio.run(lets_in(bootstrap, one)) for one in (Access(), wrong)] == [False, False], bootstrap
        assert asyncio.run(lets_in(broker.bootstrap, access))
        for name in ("password", "server.properties"):
            assert (broker.folder / name).stat().st_mode & 0o077 == 0 and access.password in (
                broker.folder / name
            ).read_text()
        assert access.password not in broker.log.read_text() and broker.folder.stat().st_mode & 0o077 == 0
        broker.stop()
        broker.start()
        assert embedded_access(broker.folder) == access and asyncio.run(lets_in(broker.bootstrap, access))
    assert embedded_access(tmp_path) == Access(), "a folder of the first release has no password"


PRINT_CLASS_PATH = "from infra.local.jars import class_path; print(class_path())"


def test_the_lock_pins_each_jar_by_hash_and_names_no_host() -> None:
    jars = read_lock()
    assert len({jar.file_name for jar in jars}) == len(jars) > 40
    assert all(len(jar.sha256) == 64 for jar in jars)
    assert Jar("org.apache.kafka", "kafka_2.13", "4.3.1", jars[0].sha256).file_name in {jar.file_name for jar in jars}


def test_a_given_folder_without_kafka_names_what_to_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.jar").touch()
    monkeypatch.setenv("HEADRACE_KAFKA_JARS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"with 1 jars .* HEADRACE_KAFKA_JARS"):
        class_path()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_where_nothing_can_be_fetched_the_message_names_both_ways_out_and_nothing_is_run(
    is_damaged: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "headrace" / "kafka-4.3.1"
    folder.mkdir(parents=True)
    for jar in read_lock() if is_damaged else ():
        (folder / jar.file_name).write_bytes(b"half a download")
    # Every request goes to a port nobody listens on: the machine is offline, as far as jars are concerned.
    offline = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    env = {**os.environ, **offline, "NO_PROXY": "", "no_proxy": "", "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("HEADRACE_KAFKA_JARS", None)
    done = subprocess.run([sys.executable, "-c", PRINT_CLASS_PATH], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    message = done.stderr.strip().splitlines()[-1]
    assert "ConfigError" in message and "kafka.bootstrap_servers" in message and "HEADRACE_KAFKA_JARS" in message
    assert is_damaged or list((tmp_path / "headrace").glob("**/*.jar")) == []
