"""What a broker takes back from those it let in, and tokens that fail: an outage or one line, and what ends it."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from actors.gateway.recording.held import HeldKeys
from actors.gateway.recording.outbox import Outbox, Outgoing
from actors.gateway.recording.spool import Spool
from infra.cli.settings import load_settings
from infra.log.access import kafka_access
from infra.log.bus import Reader
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from schemas import Block
from schemas.errors import BrokerDenies, BrokerUnavailable
from schemas.topics import EXPERIENCES, VERIFIED, Topic
from tests.actors.rig import until
from tests.e2e.acls import allow
from tests.e2e.secured_broker import USER, Secured, secured_broker
from tests.e2e.secured_clients import (
    SCRAM,
    by_token,
    call,
    expired_token,
    settings_file,
    stream_worker,
    through,
    unsigned_token,
)
from tests.streams.collect.collecting import answer, block

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.mark.parametrize("revoked", [EXPERIENCES, VERIFIED], ids=["read", "write"])
def test_a_stream_worker_whose_right_is_revoked_ends_with_a_line_that_names_it(
    secured: Secured, revoked: Topic, app_name: str, tmp_path: Path
) -> None:
    config = settings_file(secured, tmp_path, app_name, **SCRAM)
    assert call(config, "check", "--create").exit_code == 0
    plain = secured.broker.bootstrap

    async def main() -> None:
        bus = KafkaBus(plain)
        await bus.start()
        log = Log(bus, app_name)
        await through(log, "t.0")
        await allow(plain, "somebody-else", "topic", log.name(revoked))
        await log.publish(EXPERIENCES, block(answer("t.1", 0, size=1)))
        await bus.close()

    with stream_worker(config) as process:
        asyncio.run(main())
        _, said = process.communicate(timeout=120)
    last = said.decode().strip().splitlines()[-1]
    assert process.returncode not in (0, None) and f"{app_name}.{revoked.name}" in last, said.decode()[-4000:]
    assert "`headrace check --connect` names every missing right" in last


def test_a_token_that_expires_in_mid_run_is_an_outage_that_says_so_and_a_new_one_ends_it(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    access = kafka_access(load_settings(settings_file(secured, tmp_path, app_name, **by_token("unsigned_token"))))
    given = [unsigned_token()]

    async def main() -> None:
        bus = KafkaBus(
            secured.bootstrap, deadline_s=4.0, access=msgspec.structs.replace(access, token=lambda: given[-1])
        )
        await bus.start()
        log = Log(bus, app_name)
        await log.create_topics(partitions=2, keep_ms=3_600_000)
        await log.publish(EXPERIENCES, block(answer("t.0", 0)))
        given.append(expired_token())
        with pytest.raises(BrokerUnavailable, match=r"does not let the token of .* in .*has it expired"):
            async with asyncio.timeout(120):
                while True:  # until the connections of before are closed
                    await log.publish(EXPERIENCES, block(answer("t.1", 0)))
        given.append(unsigned_token())
        await log.publish(EXPERIENCES, block(answer("t.2", 0)))
        groups = {m.value.experiences[0].group async for m in log.read_all(EXPERIENCES) if isinstance(m.value, Block)}
        await bus.close()
        assert {"t.0", "t.2"} <= groups

    asyncio.run(main())


def test_a_plugin_that_raises_is_an_outage_that_names_it_and_not_what_it_said(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    way = by_token("broken")
    config = settings_file(secured, tmp_path, app_name, **way)
    bus = KafkaBus(secured.bootstrap, deadline_s=2.0, access=kafka_access(load_settings(config)))
    named = re.escape(f"kafka.sasl_token: {way['sasl_token']} raised LookupError in secured_clients.py, line ")
    with pytest.raises(BrokerUnavailable, match=named) as failed:
        asyncio.run(bus.start())
    done = call(config, "check", "--connect")
    assert done.exit_code == 1 and "raised LookupError" in done.output
    assert "the-secret" not in f"{failed.value}{done.output}"


def test_answers_of_a_gateway_whose_right_to_write_is_revoked_are_kept_and_stored_once_it_is_granted(
    secured: Secured, app_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(settings_file(secured, tmp_path, app_name, sasl_mechanism="SCRAM-SHA-256"))
    plain, topic = secured.broker.bootstrap, f"{app_name}.experiences"

    async def main() -> list[str]:
        bus = KafkaBus(secured.bootstrap, access=kafka_access(settings))
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
        assert [
            entry for entry in await asyncio.gather(*loops, return_exceptions=True) if isinstance(entry, Exception)
        ] == []
        found = [message.value async for message in log.read_all(EXPERIENCES)]
        await bus.close()
        return [item.experiences[0].group for item in found if isinstance(item, Block)]

    with caplog.at_level(logging.WARNING):
        assert set(asyncio.run(main())) == {"t.0", "t.1", "t.2"}
    denied = [record.getMessage() for record in caplog.records if "kafka.denied" in record.getMessage()]
    assert denied and topic in denied[0] and "`headrace check --connect` names every missing right" in denied[0]


@asynccontextmanager
async def one_answer(secured: Secured, app_name: str, folder: Path) -> AsyncIterator[Log]:
    """A log with one answer, which everybody may read."""
    settings = load_settings(settings_file(secured, folder, app_name, sasl_mechanism="SCRAM-SHA-256"))
    bus = KafkaBus(secured.bootstrap, access=kafka_access(settings))
    await bus.start()
    try:
        log = Log(bus, app_name)
        await log.create_topics(partitions=2, keep_ms=3_600_000)
        await log.publish(EXPERIENCES, block(answer("t.0", 0, size=1)))
        yield log
    finally:
        await bus.close()


async def read_on(log: Log, reader: Reader) -> None:
    """Until it raises."""
    try:
        async with asyncio.timeout(60):
            while True:
                await log.read(reader, timeout_s=1.0)
    finally:
        await reader.close()


async def take_away(secured: Secured, log: Log) -> None:
    """From now on somebody else alone may read answers."""
    await allow(secured.broker.bootstrap, "somebody-else", "topic", log.name(EXPERIENCES))


def test_a_right_to_read_that_is_revoked_is_one_line_that_names_it(
    secured: Secured, app_name: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with one_answer(secured, app_name, tmp_path) as log, asyncio.timeout(120):
            reader = await log.assigned(EXPERIENCES, "beginning")
            while not await log.read(reader, timeout_s=1.0):
                pass
            await take_away(secured, log)
            await read_on(log, reader)

    with pytest.raises(BrokerDenies, match=rf"read.*{app_name}.experiences.*`headrace check --connect`"):
        asyncio.run(main())
