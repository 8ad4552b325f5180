"""A broker that asks who one is: every way in that the settings name, and one line for each way that is shut."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from infra.cli.settings import load_settings
from infra.log.access import kafka_access
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from schemas.topics import ALL, EXPERIENCES
from tests.e2e.secured_broker import (
    CLUSTER,
    PASSWORD,
    SCRAM,
    USER,
    Secured,
    by_token,
    call,
    deny,
    expired_token,
    secured_broker,
    settings_file,
    stream_worker,
    through,
    unsigned_token,
)
from tests.streams.collect.collecting import answer, block

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.mark.parametrize(
    "way",
    [{"sasl_mechanism": "PLAIN"}, SCRAM, by_token("unsigned_token")],
    ids=lambda way: way["sasl_mechanism"],
)
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
        found = [message.value async for message in log.read_all(EXPERIENCES)]
        await bus.close()
        return len(found)

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize("way", [SCRAM, by_token("unsigned_token")], ids=lambda way: way["sasl_mechanism"])
def test_a_faust_worker_and_the_commands_come_in_the_same_way(
    secured: Secured, way: dict[str, str], app_name: str, tmp_path: Path
) -> None:
    config = settings_file(secured, tmp_path, app_name, **way)
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
    assert PASSWORD.encode() not in said and unsigned_token().encode() not in said


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


def test_a_token_that_has_expired_is_one_line_that_names_what_gave_it(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    way = by_token("expired_token")
    done = call(settings_file(secured, tmp_path, app_name, **way), "check", "--create")
    assert done.exit_code == 2 and f"{secured.bootstrap} refused" in done.output
    assert way["sasl_token"] in done.output and expired_token() not in done.output


def test_a_broker_nobody_vouches_for_is_one_line(secured: Secured, app_name: str, tmp_path: Path) -> None:
    done = call(settings_file(secured, tmp_path, app_name, ssl_ca_file=""), "check", "--create")
    assert done.exit_code == 2 and "kafka.ssl_ca_file: the certificate" in done.output


def test_a_client_without_the_certificate_that_a_broker_asks_for_is_one_line(app_name: str, tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    with secured_broker(tmp_path / "broker", asks_certificate=True) as asking:
        done = call(settings_file(asking, tmp_path, app_name), "check", "--create")
    assert done.exit_code == 2 and f"kafka.ssl_cert_file: {asking.bootstrap} asks for another" in done.output, (
        done.output
    )


def tried(done: Result) -> dict[str, str]:
    """What `check --connect` found, by what it tried."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    return {row[0]: row[1] for row in rows}


def test_check_connect_tries_everything_and_leaves_nothing_behind(
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

    async def ends() -> set[int]:
        bus = KafkaBus(secured.bootstrap, access=kafka_access(load_settings(config)))
        await bus.start()
        found = {end for topic in ALL for end in (await bus.end_offsets(f"{app_name}.{topic.name}")).values()}
        await bus.close()
        return found

    assert asyncio.run(ends()) == {0}


def test_check_connect_names_every_right_that_is_missing(secured: Secured, app_name: str, tmp_path: Path) -> None:
    config = settings_file(secured, tmp_path, app_name, sasl_mechanism="SCRAM-SHA-256")
    assert call(config, "check", "--create").exit_code == 0
    plain = secured.broker.bootstrap

    async def revoke() -> None:
        await deny(plain, USER, "topic", f"{app_name}.verified", "write")
        await deny(plain, USER, "topic", f"{app_name}.tasks", "read", "write")
        await deny(plain, USER, "topic", f"{app_name}.buffer", "delete")
        await deny(plain, USER, "topic", f"{app_name}.batches", "delete")
        await deny(plain, USER, "topic", f"{app_name}.evals", "describe")
        await deny(plain, USER, "group", f"{app_name}.collect", "read")

    asyncio.run(revoke())
    done = call(config, "check", "--connect")
    assert done.exit_code == 1
    found = tried(done)
    assert found[f"topic {app_name}.verified"] == "may not write: it needs an ACL"
    assert found[f"topic {app_name}.tasks"] == "may not read, write: it needs an ACL"
    assert found[f"topic {app_name}.buffer"] == "may not delete: it needs an ACL"
    assert found[f"topic {app_name}.batches"] == "may not delete: it needs an ACL"
    assert found[f"topic {app_name}.evals"].startswith("may not describe")
    assert found[f"group {app_name}.collect"] == "may not read: it needs an ACL of the group"
    assert found[f"topic {app_name}.experiences"] == "2 partitions: read, write"


def test_check_connect_says_what_cannot_be_made_and_which_count_is_wrong(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    config = settings_file(secured, tmp_path, app_name, sasl_mechanism="SCRAM-SHA-256")
    plain = secured.broker.bootstrap
    asyncio.run(deny(plain, USER, "cluster", CLUSTER, "create"))  # else it may create all of them
    asyncio.run(deny(plain, USER, "topic", f"{app_name}.verified", "create"))
    done = call(config, "check", "--connect")
    assert "may not be made with these rights" in tried(done)[f"topic {app_name}.verified"]
    other = settings_file(secured, tmp_path, f"{app_name}-2", sasl_mechanism="SCRAM-SHA-256")
    assert call(other, "check", "--create").exit_code == 0
    done = call(other, "check", "--connect", "--set", "kafka.partitions=5")
    assert "has 2 partitions, expected 5 (kafka.partitions)" in tried(done)[f"topic {app_name}-2.tasks"]
