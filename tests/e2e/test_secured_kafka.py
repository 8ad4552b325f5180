"""A broker that asks who one is: every way in that the settings name, and one line for each way that is shut."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from actors.gateway.recording.held import HeldKeys
from actors.gateway.recording.outbox import Outbox, Outgoing
from actors.gateway.recording.spool import Spool
from infra.cli.main import app
from infra.cli.settings import load_settings
from infra.log.access import access_of
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from schemas import Block
from schemas.errors import BrokerDenies, ConfigError
from schemas.topics import ALL, EXPERIENCES, VERIFIED
from tests.actors.rig import until
from tests.e2e.acls import CLUSTER, allow, deny
from tests.e2e.secured_broker import PASSWORD, USER, Secured, secured_broker
from tests.streams.collect.collecting import answer, block

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


def unsigned_token(expires: int = 4_000_000_000) -> str:
    """What Kafka's own test module takes: a JSON web token that nobody signed. expires: seconds since 1970."""
    parts = ({"alg": "none"}, {"sub": USER, "iat": 1_700_000_000, "exp": expires})
    return ".".join(urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def expired_token() -> str:
    return unsigned_token(1_700_000_100)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


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


@pytest.mark.parametrize(
    "way",
    [
        {"sasl_mechanism": "PLAIN"},
        {"sasl_mechanism": "SCRAM-SHA-256"},
        {
            "sasl_mechanism": "OAUTHBEARER", "sasl_token": "tests.e2e.test_secured_kafka:unsigned_token",
            "sasl_username": "", "sasl_password_file": "",
        },
    ],
    ids=lambda way: way["sasl_mechanism"],
)  # fmt: skip
def test_records_go_in_and_out_by_every_mechanism(
    secured: Secured, way: dict[str, str], app_name: str, tmp_path: Path
) -> None:
    settings = load_settings(settings_file(secured, tmp_path, app_name, **way))

    async def run() -> int:
        bus = KafkaBus(secured.bootstrap, access=access_of(settings))
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=2, keep_ms=3_600_000)
        await log.publish(EXPERIENCES, block(answer("t.0", 0)))
        found = [message.value async for message in log.read_all(EXPERIENCES)]
        await bus.close()
        return len(found)

    assert asyncio.run(run()) == 1


def test_a_faust_worker_and_the_commands_come_in_the_same_way(secured: Secured, app_name: str, tmp_path: Path) -> None:
    config = settings_file(secured, tmp_path, app_name, sasl_mechanism="SCRAM-SHA-256")
    assert "topics created" in call(config, "check", "--create").stdout
    settings = load_settings(config)
    command = [sys.executable, "-m", "infra.cli.main", "process", "-c", str(config)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, env={**os.environ})

    async def through() -> None:
        bus = KafkaBus(secured.bootstrap, access=access_of(settings))
        await bus.start()
        log = Log(bus, app_name)
        await log.publish(EXPERIENCES, block(answer("t.0", 0, size=1)))
        async with asyncio.timeout(90):
            async for message in log.read_all(VERIFIED, until_end=False):
                if isinstance(message.value, Block):
                    break
        await bus.close()

    try:
        asyncio.run(through())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        _, said = process.communicate()
    assert PASSWORD.encode() not in said


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_wrong_password_is_one_line_at_once_without_the_password(
    secured: Secured, mechanism: str, app_name: str, tmp_path: Path
) -> None:
    config = settings_file(secured, tmp_path, app_name, sasl_mechanism=mechanism)
    (tmp_path / "password").write_text("not-the-password")
    done = call(config, "check", "--create")
    assert done.exit_code == 2
    assert f'{secured.bootstrap} does not let "{USER}" with this password in ({mechanism})' in done.output
    assert "not-the-password" not in done.output


def test_a_token_that_has_expired_is_one_line_that_names_what_gave_it(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    plugin = "tests.e2e.test_secured_kafka:expired_token"
    way = {"sasl_mechanism": "OAUTHBEARER", "sasl_token": plugin, "sasl_username": "", "sasl_password_file": ""}
    done = call(settings_file(secured, tmp_path, app_name, **way), "check", "--create")
    assert done.exit_code == 2 and f"{secured.bootstrap} does not let" in done.output and plugin in done.output
    assert expired_token() not in done.output


def test_a_broker_nobody_vouches_for_is_one_line(secured: Secured, app_name: str, tmp_path: Path) -> None:
    done = call(settings_file(secured, tmp_path, app_name, ssl_ca_file=""), "check", "--create")
    assert done.exit_code == 2 and "kafka.ssl_ca_file: the certificate" in done.output


def test_a_password_that_is_nowhere_is_one_line_with_the_variable(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    settings = load_settings(settings_file(secured, tmp_path, app_name, sasl_password_file=""))
    with pytest.raises(ConfigError, match="HEADRACE_KAFKA_PASSWORD is not set"):
        access_of(settings)


def test_an_access_never_shows_its_password(secured: Secured, app_name: str, tmp_path: Path) -> None:
    access = access_of(load_settings(settings_file(secured, tmp_path, app_name)))
    assert access.password == PASSWORD and PASSWORD not in repr(access)
    assert PASSWORD not in repr(msgspec.structs.replace(access, username="x"))


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
        bus = KafkaBus(secured.bootstrap, access=access_of(load_settings(config)))
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
        await deny(plain, USER, "topic", f"{app_name}.evals", "describe")
        await deny(plain, USER, "group", f"{app_name}.collect", "read")

    asyncio.run(revoke())
    done = call(config, "check", "--connect")
    assert done.exit_code == 1
    found = tried(done)
    assert found[f"topic {app_name}.verified"] == "may not write: it needs an ACL"
    assert found[f"topic {app_name}.tasks"] == "may not read, write: it needs an ACL"
    assert found[f"topic {app_name}.buffer"] == "may not delete: it needs an ACL"
    assert found[f"topic {app_name}.evals"].startswith("may not describe")
    assert found[f"group {app_name}.collect"] == "may not read: it needs an ACL of the group"
    assert found[f"topic {app_name}.experiences"] == "2 partitions: read, write"


def test_answers_of_a_gateway_whose_right_to_write_is_revoked_are_kept_and_stored_once_it_is_granted(
    secured: Secured, app_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(settings_file(secured, tmp_path, app_name, sasl_mechanism="SCRAM-SHA-256"))
    plain, topic = secured.broker.bootstrap, f"{app_name}.experiences"

    async def main() -> list[str]:
        bus = KafkaBus(secured.bootstrap, access=access_of(settings))
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=2, keep_ms=3_600_000)
        outbox = Outbox(
            log, Spool(tmp_path / "spool", max_bytes=10**7), Metrics("t"), held=HeldKeys(MemoryStore(), tmp_path / "keys"),
            queue_records=100, queue_bytes=10**6, send_s=10.0,
        )  # fmt: skip
        loops = [asyncio.create_task(outbox.write()), asyncio.create_task(outbox.drain())]

        def offer(number: int) -> None:
            async def prepare() -> Block:
                return block(answer(f"t.{number}", 0, size=1))

            assert outbox.offer(Outgoing(EXPERIENCES, prepare, 100))

        await until(lambda: outbox.direct)
        offer(0)
        await until(lambda: not outbox.num_waiting)
        await allow(plain, "somebody-else", "topic", topic)
        offer(1)
        await until(lambda: not outbox.direct or any(loop.done() for loop in loops))
        offer(2)
        await allow(plain, USER, "topic", topic)
        await until(
            lambda: (outbox.direct and not outbox.num_waiting) or any(loop.done() for loop in loops), seconds=60
        )
        for loop in loops:
            loop.cancel()
        assert [one for one in await asyncio.gather(*loops, return_exceptions=True) if isinstance(one, Exception)] == []
        found = [message.value async for message in log.read_all(EXPERIENCES)]
        await bus.close()
        return [one.experiences[0].group for one in found if isinstance(one, Block)]

    with caplog.at_level(logging.WARNING):
        assert set(asyncio.run(main())) == {"t.0", "t.1", "t.2"}
    denied = [record.getMessage() for record in caplog.records if "kafka.denied" in record.getMessage()]
    assert denied and topic in denied[0] and "`headrace check --connect` names every missing right" in denied[0]


def test_a_right_to_read_that_is_revoked_is_one_line_that_names_it(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    settings = load_settings(settings_file(secured, tmp_path, app_name, sasl_mechanism="SCRAM-SHA-256"))

    async def main() -> None:
        bus = KafkaBus(secured.bootstrap, access=access_of(settings))
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=2, keep_ms=3_600_000)
        await log.publish(EXPERIENCES, block(answer("t.0", 0, size=1)))
        reader = await log.assigned(EXPERIENCES, "beginning")
        async with asyncio.timeout(60):
            while not await log.read(reader, timeout_s=1.0):
                pass
            await allow(secured.broker.bootstrap, "somebody-else", "topic", log.name(EXPERIENCES))
            while True:
                await log.read(reader, timeout_s=1.0)

    with pytest.raises(BrokerDenies, match=rf"read.*{app_name}.experiences.*`headrace check --connect`"):
        asyncio.run(main())


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


def test_check_connect_says_who_is_not_let_in(secured: Secured, app_name: str, tmp_path: Path) -> None:
    config = settings_file(secured, tmp_path, app_name, sasl_mechanism="PLAIN")
    (tmp_path / "password").write_text("not-the-password")
    done = call(config, "check", "--connect")
    assert done.exit_code == 1 and "does not let" in tried(done)["broker"]
    assert "not-the-password" not in done.output and tried(done)["store store"] == "put, list, get, delete"
