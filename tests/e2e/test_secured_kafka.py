"""A broker that asks who you are: every way in that the settings name, and one line for each way that is shut."""

import asyncio
import datetime
import ipaddress
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.cli.settings import load_settings
from infra.local.broker import HOST, EmbeddedKafka, choose_address, plan_address
from infra.log.access import kafka_access
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from schemas import Block
from schemas.topics import ALL, EXPERIENCES, VERIFIED
from tests.own_sources import ROOT
from tests.streams.collect.collecting import answer, block

pytestmark = pytest.mark.slow

USER, PASSWORD = "headrace", "one-two-three"


class Secured(NamedTuple):
    """bootstrap: of the listener that asks. authority: its certificate, PEM."""

    bootstrap: str
    authority: Path


@contextmanager
def secured_broker(folder: Path) -> Iterator[Secured]:
    """PLAIN knows no more than the broker's own settings; SCRAM has one user."""
    authority, chain, key = certificates()
    (folder / "ca.pem").write_text(authority)
    port = choose_address().port
    secured = f"{HOST}:{port}"
    plain = plan_address(folder / "kafka")
    listener = "listener.name.secured"
    modules = "org.apache.kafka.common.security"
    settings = {
        "listeners": f"PLAINTEXT://{plain.bootstrap},CONTROLLER://{HOST}:{plain.controller_port},SECURED://{secured}",
        "advertised.listeners": f"PLAINTEXT://{plain.bootstrap},SECURED://{secured}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SECURED:SASL_SSL",
        "inter.broker.listener.name": "PLAINTEXT",
        f"{listener}.ssl.keystore.type": "PEM",
        f"{listener}.ssl.keystore.key": one_line(key),
        f"{listener}.ssl.keystore.certificate.chain": one_line(chain),
        f"{listener}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        f"{listener}.plain.sasl.jaas.config": (f'{modules}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'),
        f"{listener}.scram-sha-256.sasl.jaas.config": f"{modules}.scram.ScramLoginModule required;",
    }
    scram = ("--add-scram", f"SCRAM-SHA-256=[name={USER},password={PASSWORD}]")
    with EmbeddedKafka(folder / "kafka", settings=settings, format_options=scram):
        yield Secured(secured, folder / "ca.pem")


def one_line(pem: str) -> str:
    """A value of several lines as Java reads it."""
    return pem.strip().replace("\n", "\\n")


def certificates() -> tuple[str, str, str]:
    """An authority's certificate, a broker's for 127.0.0.1, and that broker's key, all PEM."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headrace tests")])

    def certificate(name: x509.Name, public: rsa.RSAPublicKey, extension: x509.ExtensionType) -> str:
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(ca_key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM).decode()

    broker_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
    places = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
    pem_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (
        certificate(ca_name, ca_key.public_key(), x509.BasicConstraints(ca=True, path_length=0)),
        certificate(broker_name, key.public_key(), places),
        pem_key.decode(),
    )


SCRAM = {"sasl_mechanism": "SCRAM-SHA-256"}


def settings_file(secured: Secured, folder: Path, app_name: str, **more: str) -> Path:
    (folder / "password").write_text(PASSWORD + "\n")
    table = {
        "bootstrap_servers": secured.bootstrap,
        "security_protocol": "SASL_SSL",
        "sasl_username": USER,
        "sasl_password_file": "password",
        "ssl_ca_file": str(secured.authority),
        **more,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items() if value]
    file = folder / "headrace.toml"
    file.write_text(f'app = "{app_name}"\n[kafka]\npartitions = 2\ndeadline_s = 20\n' + "\n".join(lines) + "\n")
    return file


def call(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "-c", str(config)], env={"COLUMNS": "160", "TERM": "dumb"})


@contextmanager
def stream_worker(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A stream worker as a process; ended with the block."""
    command = [sys.executable, "-m", "infra.cli.main", "process", "-c", str(config)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def through(log: Log, group: str) -> None:
    """Until a record that is published now has gone through the stream worker."""
    await log.publish(EXPERIENCES, block(answer(group, 0, size=1)))
    async with asyncio.timeout(90):
        async for message in log.tail(VERIFIED, "beginning"):
            if isinstance(message.value, Block) and message.value.experiences[0].group == group:
                return


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.mark.parametrize("way", [{"sasl_mechanism": "PLAIN"}, SCRAM], ids=lambda way: way["sasl_mechanism"])
def test_records_go_in_and_out_by_every_mechanism(
    secured: Secured, way: dict[str, str], app_name: str, tmp_path: Path
) -> None:
    settings = load_settings(settings_file(secured, tmp_path, app_name, **way))

    async def run() -> int:
        bus = KafkaBus(secured.bootstrap, access=kafka_access(settings))
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=2, keep_ms=3_600_000)
        await log.publish(EXPERIENCES, block(answer("t.0", 0)))
        found = [message.value async for message in log.scan(EXPERIENCES)]
        await bus.close()
        return len(found)

    assert asyncio.run(run()) == 1


def test_a_faust_worker_and_the_commands_come_in_the_same_way(secured: Secured, app_name: str, tmp_path: Path) -> None:
    config = settings_file(secured, tmp_path, app_name, **SCRAM)
    assert "topics created" in call(config, "check", "--create").stdout
    settings = load_settings(config)

    async def main() -> None:
        bus = KafkaBus(secured.bootstrap, access=kafka_access(settings))
        await bus.start()
        for number in range(3):
            await through(Log(bus, app_name), f"t.{number}")
        await bus.close()

    with stream_worker(config) as process:
        asyncio.run(main())
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert PASSWORD.encode() not in said


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_wrong_password_is_one_line_at_once_without_the_password(
    secured: Secured, mechanism: str, app_name: str, tmp_path: Path
) -> None:
    config = settings_file(secured, tmp_path, app_name, sasl_mechanism=mechanism)
    (tmp_path / "password").write_text("not-the-password")
    done = call(config, "check", "--create")
    assert done.exit_code == 2
    assert f'{secured.bootstrap} refused the login of "{USER}" with this password ({mechanism})' in done.output
    assert "not-the-password" not in done.output


def test_a_broker_nobody_vouches_for_is_one_line(secured: Secured, app_name: str, tmp_path: Path) -> None:
    done = call(settings_file(secured, tmp_path, app_name, ssl_ca_file=""), "check", "--create")
    assert done.exit_code == 2 and "kafka.ssl_ca_file: the certificate" in done.output


def tried(done: Result) -> dict[str, str]:
    """Findings of `check --connect`, by the thing it tried."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    return {row[0]: row[1] for row in rows}


def test_check_connect_tries_everything_names_what_is_missing_and_leaves_nothing_behind(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    config = settings_file(secured, tmp_path, app_name, sasl_mechanism="SCRAM-SHA-256")
    first = call(config, "check", "--connect")
    assert first.exit_code == 1
    assert tried(first)[f"topic {app_name}.verified"] == "is not there; headrace check --create makes it"
    assert call(config, "check", "--create").exit_code == 0
    done = call(config, "check", "--connect")
    assert done.exit_code == 0, done.stdout
    found = tried(done)
    assert found[f"broker {secured.bootstrap}"] == f"answers, SASL_SSL, {USER}"
    assert found[f"topic {app_name}.verified"] == "2 partitions: read, write"
    assert found[f"topic {app_name}.buffer"] == "1 partitions: read, write, delete"
    assert found[f"group {app_name}.collect"] == "read" and found["store store"] == "put, list, get, delete"
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
    assert asyncio.run(ends(secured, config, app_name)) == {0}
    other = call(config, "check", "--connect", "--set", "kafka.partitions=5")
    assert "has 2 partitions, expected 5 (kafka.partitions)" in tried(other)[f"topic {app_name}.tasks"]


async def ends(secured: Secured, config: Path, app_name: str) -> set[int]:
    """End offsets of the partitions of an app."""
    bus = KafkaBus(secured.bootstrap, access=kafka_access(load_settings(config)))
    await bus.start()
    try:
        return {end for topic in ALL for end in (await bus.end_offsets(f"{app_name}.{topic.name}")).values()}
    finally:
        await bus.close()
