"""Kafka clients: a broker that goes away, retries, groups with killed members, refused sign-ins, memory of closed readers."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from aiokafka.errors import KafkaTimeoutError, RequestTimedOutError, TopicAuthorizationFailedError

from infra.local.broker import EmbeddedKafka
from infra.log.access import kafka_access
from infra.log.bus import Bus, Partition, Reader
from infra.log.kafka import KafkaBus, answers
from infra.log.retry import doubling, may_pass, within
from infra.settings.config import Floor, Kafka
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.topics import EXPERIENCES, topic_config

NOBODY = "127.0.0.1:9"
DEADLINE_S = 90.0


async def test_an_unreachable_broker_is_named_within_the_deadline() -> None:
    bus = KafkaBus(NOBODY, deadline_s=0.3)
    with pytest.raises(BrokerUnavailable, match=rf"{NOBODY} is not reachable: connect .* 0\.3 s"):
        await bus.start()
    await bus.close()
    assert not await answers(NOBODY, timeout_s=1.0)


async def produce(bus: Bus, confirmed: list[int], stop: asyncio.Event, writer: int) -> None:
    """Send numbers one after the other until told to stop; remember those that were confirmed."""
    number = 0
    while not stop.is_set():
        value = writer * 1_000_000 + number
        await bus.send("topic", b"%d" % value, key=b"%d" % value)
        confirmed.append(value)
        number += 1


async def consume(reader: Reader, seen: dict[tuple[int, int], int], commit: bool, stop: asyncio.Event) -> None:
    while not stop.is_set():
        for record in await reader.get_many(timeout_s=0.2):
            seen[record.partition, record.offset] = int(record.value)
        if commit and (positions := reader.positions()):
            await reader.commit(positions)


@pytest.mark.full
def test_a_broker_killed_and_restarted_under_load_loses_nothing(tmp_path: Path) -> None:
    broker = EmbeddedKafka(tmp_path / "kafka")
    bootstrap = broker.start()
    confirmed: list[int] = []
    seen_alone: dict[tuple[int, int], int] = {}
    seen_group: dict[tuple[int, int], int] = {}

    async def grows(bus: Bus) -> None:
        """Until a good deal more is confirmed than now."""
        async with asyncio.timeout(DEADLINE_S):
            target = len(confirmed) + 200
            while len(confirmed) < target:  # noqa: ASYNC110  the producers make it true
                await asyncio.sleep(0.05)

    async def run() -> None:
        bus, stop_writing, stop_reading = KafkaBus(bootstrap), asyncio.Event(), asyncio.Event()
        await bus.start()
        await bus.create_topic("topic", 4, topic_config(EXPERIENCES, 60_000_000))
        alone = await bus.assigned(await bus.beginning_offsets("topic"))
        grouped = await bus.subscribed(["topic"], group="group")
        async with asyncio.TaskGroup() as tasks:
            writers = [tasks.create_task(produce(bus, confirmed, stop_writing, n)) for n in range(4)]
            tasks.create_task(consume(alone, seen_alone, False, stop_reading))
            tasks.create_task(consume(grouped, seen_group, True, stop_reading))
            await grows(bus)
            for end in (broker.kill, broker.stop, broker.kill):
                await asyncio.to_thread(end)
                assert await asyncio.to_thread(broker.start) == bootstrap
                await grows(bus)
            stop_writing.set()
            await asyncio.wait(writers)
            ends = await bus.end_offsets("topic")
            async with asyncio.timeout(DEADLINE_S):
                while not all(set(confirmed) <= set(seen.values()) for seen in (seen_alone, seen_group)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            stop_reading.set()
        assert alone.positions() == ends
        for reader in (alone, grouped):
            await reader.close()
        assert set((await bus.committed("group", "topic")).values()) == set(ends.values())
        await bus.close()

    try:
        asyncio.run(run())
    finally:
        broker.stop()
    for seen in (seen_alone, seen_group):
        for partition in range(4):
            offsets = sorted(offset for index, offset in seen if index == partition)
            assert offsets == list(range(len(offsets)))  # nothing skipped


@pytest.mark.full
def test_reading_and_sending_name_the_address_when_the_broker_stays_away(tmp_path: Path) -> None:
    broker = EmbeddedKafka(tmp_path / "kafka")
    bootstrap = broker.start()

    async def run() -> None:
        bus = KafkaBus(bootstrap, deadline_s=2.0)
        await bus.start()
        await bus.create_topic("topic", 1, {})
        reader = await bus.assigned({Partition("topic", 0): 0}, group="group")
        await bus.send("topic", b"x", key=b"k")
        await asyncio.to_thread(broker.kill)
        with pytest.raises(BrokerUnavailable, match=bootstrap):
            await bus.send("topic", b"y", key=b"k")
        with pytest.raises(BrokerUnavailable, match=bootstrap):
            await bus.end_offsets("topic")
        with pytest.raises(BrokerUnavailable, match=bootstrap):
            await reader.commit({Partition("topic", 0): 1})
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(BrokerUnavailable, match=bootstrap):
                while True:
                    await reader.get_many(timeout_s=0.5)
        await reader.close()
        await bus.close()

    try:
        asyncio.run(run())
    finally:
        broker.stop()


async def test_a_broker_that_keeps_silent_past_a_request_is_asked_again() -> None:
    bus, tries = KafkaBus(NOBODY, deadline_s=30.0), 0

    async def attempt() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise KafkaTimeoutError("batch expired")
        return "stored"

    assert await bus._retried("send", attempt) == "stored" and tries == 2
    assert may_pass(RequestTimedOutError()) and may_pass(OSError()) and not may_pass(TopicAuthorizationFailedError())


MEMBER = """
import asyncio, sys
from infra.log.kafka import KafkaBus

async def join(bootstrap: str, topic: str) -> None:
    bus = KafkaBus(bootstrap)
    await bus.start()
    reader = await bus.subscribed([topic], group=topic)
    while not reader.positions():
        await reader.get_many(timeout_s=0.1)
    print("joined", flush=True)
    await asyncio.Event().wait()

asyncio.run(join(*sys.argv[1:]))
"""


@pytest.mark.full
async def test_joining_a_group_with_a_killed_member_is_no_broker_that_is_away(kafka: str, app_name: str) -> None:
    bus = KafkaBus(kafka, deadline_s=2.0)
    await bus.start()
    await bus.create_topic(app_name, 1, topic_config(EXPERIENCES, 60_000_000))
    await bus.send(app_name, b"x", key=b"k")
    member = await asyncio.create_subprocess_exec(sys.executable, "-c", MEMBER, kafka, app_name, stdout=PIPE)
    assert member.stdout is not None
    assert await member.stdout.readline() == b"joined\n"
    member.kill()
    await member.wait()
    reader = await bus.subscribed([app_name], group=app_name)
    async with asyncio.timeout(DEADLINE_S):
        while not (records := await reader.get_many(timeout_s=0.5)):
            pass
    assert [record.value for record in records] == [b"x"]
    await reader.close()
    await bus.close()


async def test_pauses_end_before_the_time_to_give_up_which_counts_from_the_call() -> None:
    soon, late = within(30.0, [0.01, 0.02, 3000.0, 0.01]), within(0.05, doubling(0.01))
    await asyncio.sleep(0.06)
    assert (list(soon), list(late)) == ([0.01, 0.02], [])


@pytest.mark.parametrize("content", [b"", b"no certificate", None])
def test_a_clients_certificate_that_cannot_be_read_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "client.pem"
    if content is not None:
        file.write_bytes(content)
    kafka = Kafka(bootstrap_servers="b:1", security_protocol="SSL", ssl_cert_file=str(file))
    with pytest.raises(ConfigError, match="ssl_cert_file, ssl_key_file: cannot be read: "):
        kafka_access(Floor(app="t", kafka=kafka))
