"""The broker that infra/deploy/compose.yml describes, as a process: it asks for its password, and roles have it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra.local.address import HOST, BrokerPorts, plan_address
from infra.local.broker import EmbeddedKafka
from infra.local.broker_password import write_private
from infra.log.access import EMBEDDED_PASSWORD
from tests.e2e.light_system import REPOSITORY

pytestmark = pytest.mark.slow

DEPLOY = REPOSITORY / "infra" / "deploy"
PASSWORD = "one2three"
# Kafka's own, where an embedded broker has others.
DEFAULTS = {"sasl.enabled.mechanisms": "GSSAPI", "sasl.mechanism.controller.protocol": "GSSAPI"}
OURS = {"node.id", "process.roles", "log.dirs"}  # the same anywhere, but for the folder


def settings_of(environment: dict[str, object], at: BrokerPorts) -> dict[str, str]:
    """Kafka's settings as the image makes them of its environment (KAFKA_A_B is a.b), at addresses of this machine."""
    found = {}
    for name, value in environment.items():
        assert name.startswith("KAFKA_") and "__" not in name
        text = re.sub(r"\$\{KAFKA_PASSWORD:\?[^}]*\}", PASSWORD, str(value))
        text = text.replace("127.0.0.1:9093", f"{HOST}:{at.controller_port}").replace(
            "//kafka:9092", f"//{at.bootstrap}"
        )
        found[name.removeprefix("KAFKA_").lower().replace("_", ".")] = text.replace("//:9092", f"//{at.bootstrap}")
    return DEFAULTS | {name: value for name, value in found.items() if name not in OURS}


def test_the_broker_of_the_containers_lets_in_who_has_the_password_and_nobody_else(tmp_path: Path) -> None:
    containers = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]
    folder, app = tmp_path / "kafka", tmp_path / "app"
    folder.mkdir(mode=0o700)
    app.mkdir()
    write_private(folder / EMBEDDED_PASSWORD, PASSWORD)  # by which a start is waited for
    shutil.copy(DEPLOY / "compose" / "headrace.toml", app)
    settings = settings_of(containers["kafka"]["environment"], plan_address(folder))
    assert HOST in settings["listeners"] and PASSWORD in settings["listener.name.client.plain.sasl.jaas.config"]
    with EmbeddedKafka(folder, settings=settings, with_password=True) as broker:

        def create(*more: str, password: str) -> "subprocess.CompletedProcess[str]":
            sets = [
                "--set",
                f"kafka.bootstrap_servers={broker.bootstrap}",
                "--set",
                f"store.url={tmp_path / 'store'}",
                *more,
            ]
            return subprocess.run(
                [sys.executable, "-m", "infra.cli.main", "check", "--create", "-c", str(app / "headrace.toml"), *sets],
                env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HEADRACE_KAFKA_PASSWORD": password},
                cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
            )  # fmt: skip

        made = create(password=PASSWORD)
        assert made.returncode == 0, made.stdout + made.stderr
        wrong = create(password="one2four")
        assert wrong.returncode == 2 and 'does not let "headrace" with this password in (PLAIN)' in wrong.stderr
        plain = create("--set", "kafka.security_protocol=PLAINTEXT", "--set", "kafka.deadline_s=3", password=PASSWORD)
        assert plain.returncode != 0, plain.stdout
