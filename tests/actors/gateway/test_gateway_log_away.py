"""Serving never waits on the log: a broker that is away, a full spool, kills and torn files."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.engine import EngineStopped
from actors.gateway.recording.held import HeldKeys
from actors.gateway.recording.outbox import Outbox, Outgoing
from actors.gateway.recording.spool import Spool
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from schemas import Control, Received
from schemas.errors import BrokerUnavailable
from schemas.topics import FEEDBACK, MAX_RECORD_BYTES
from tests.actors.gateway.gateway_rig import EOS, AwayBus, RunningGateway, engine, says, serving
from tests.actors.rig import until

ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


async def ask_many(served: RunningGateway, key: str, count: int) -> list[str]:
    async with served.http(key) as http:
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=ASK) for _ in range(count)))
    assert [answer.status_code for answer in answers] == [200] * count
    return [answer.json()["id"].removeprefix("hr-") for answer in answers]


async def drained(served: RunningGateway) -> None:
    await until(lambda: not spooled(served.folder), seconds=60)


def spooled(folder: Path) -> list[Path]:
    return list(folder.glob("spool/*/*.spool"))


async def test_a_broker_that_goes_away_costs_no_answer_and_gets_all_of_them_when_it_is_back(tmp_path: Path) -> None:
    bus = AwayBus()
    async with serving(tmp_path, engine(says("Hello.")), bus=bus) as served:
        key = await served.new_key()
        ids = await ask_many(served, key, 5)
        await served.recorded(5)
        bus.away = True
        for _ in range(5):
            ids += await ask_many(served, key, 20)
        assert spooled(tmp_path), "answers wait on disk"
        assert len(await served.experiences()) == 5
        bus.away = False
        await served.recorded(105)
        await drained(served)
        ids += await ask_many(served, key, 5)
        recorded = [one.id for one in await served.recorded(110)]
        assert sorted(recorded) == sorted(ids)
        assert served.count("shed") == 0


async def test_a_gateway_that_starts_without_a_broker_serves_and_writes_later(tmp_path: Path) -> None:
    bus, store = AwayBus(), MemoryStore()
    bus.away = True
    async with serving(tmp_path, bus=bus, store=store) as served, served.http() as http:
        assert (await http.get("/healthz")).status_code == 503, "the channel's version is not there"
        key = await served.new_key()
        ids = await ask_many(served, key, 10)
    assert await served.experiences() == [], "stopped while the broker was away"
    bus.away = False
    async with serving(tmp_path, bus=bus, store=store) as served, served.http() as http, asyncio.timeout(60):
        assert sorted(one.id for one in await served.recorded(10)) == sorted(ids)
        while (await http.get("/healthz")).status_code != 200:
            await drained(served)
        await drained(served)


async def test_what_does_not_fit_is_shed_and_counted_and_still_answered(tmp_path: Path) -> None:
    bus = AwayBus()
    bus.away = True
    async with serving(tmp_path, bus=bus, spool_mb=0) as served:
        key = await served.new_key()
        await ask_many(served, key, 4)
        await until(lambda: served.count("shed") == 4, seconds=30)
        assert served.metrics.counters()["shed{reason=spool full}"] == 4


async def test_an_answer_that_ends_after_the_engine_was_gone_for_another_is_recorded(tmp_path: Path) -> None:
    answers = iter([[*b"Hello.", EOS]])

    def script(prompt: tuple[int, ...]) -> list[int]:
        for answer in answers:
            return answer
        raise EngineStopped("it is gone")

    with pytest.raises(EngineStopped):
        async with serving(tmp_path, engine(script, token_s=0.1)) as served:
            asking = asyncio.create_task(ask_many(served, key := await served.new_key(), 1))
            await until(lambda: served.engine.num_running > 0)
            async with served.http(key) as http:
                await http.post("/v1/chat/completions", json=ASK)
            ids = await asking
    assert [one.id for one in await served.experiences()] == ids


def outgoing(number: int) -> Outgoing:
    async def prepare() -> Control:
        return Received(path="/x", body=b"{}", id=str(number))

    return Outgoing(FEEDBACK, prepare, 10)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["offer", "away", "back", "restart", "rest"]), max_size=40))
def test_whatever_the_broker_does_nothing_is_lost_and_disk_keeps_the_order(
    tmp_path_factory: pytest.TempPathFactory, moves: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("spool")

    async def check() -> None:
        bus = AwayBus()
        log = Log(bus, "test")
        await log.create_topics(partitions=1, keep_ms=1000)
        number = 0

        def begun() -> tuple[Outbox, list[asyncio.Task[None]]]:
            outbox = opened(folder, log)
            return outbox, [asyncio.create_task(outbox.write()), asyncio.create_task(outbox.drain())]

        async def closed(outbox: Outbox, loops: list[asyncio.Task[None]]) -> None:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await outbox.flush()

        outbox, loops = begun()
        for move in [*moves, "back"]:
            if move == "offer":
                assert outbox.offer(outgoing(number))
                number += 1
            elif move == "restart":
                await closed(outbox, loops)
                outbox, loops = begun()
            elif move == "rest":
                await asyncio.sleep(0.01)
            else:
                bus.away = move == "away"
        await until(lambda: outbox.direct and not outbox.num_waiting, seconds=30)
        await closed(outbox, loops)
        seen = [m.value.id async for m in log.scan(FEEDBACK) if isinstance(m.value, Received)]
        first = list(dict.fromkeys(seen))
        assert first == [str(one) for one in range(number)]

    asyncio.run(check())


def opened(folder: Path, log: Log, metrics: Metrics | None = None) -> Outbox:
    return Outbox(
        log,
        Spool(folder, max_bytes=10**7),
        metrics or Metrics("t"),
        held=HeldKeys(MemoryStore(), folder / "keys"),
        queue_records=100,
        queue_bytes=10_000,
        send_s=1.0,
    )


@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize(("path", "body"), [("\ud83d", b"{}"), ("/x", b"x" * MAX_RECORD_BYTES)], ids=["half", "large"])
async def test_a_record_that_no_log_takes_is_shed_alone_and_its_sender_is_told(
    tmp_path: Path, away: bool, path: str, body: bytes
) -> None:
    async def prepare() -> Control:
        return Received(path=path, body=body, id="a")

    metrics, log = Metrics("t"), Log(AwayBus(), "test")
    await log.create_topics(partitions=1, keep_ms=1000)
    outbox = opened(tmp_path, log, metrics)
    outbox.direct = not away
    kept = asyncio.get_running_loop().create_future()
    for offered in (outgoing(0), Outgoing(FEEDBACK, prepare, 10, kept), outgoing(1)):
        outbox.offer(offered)
    await outbox.flush()
    assert not await kept and outbox.num_waiting == (2 if away else 0)
    assert metrics.counters()["shed{reason=refused by the log}"] == 1


class RefusingBus(AwayBus):
    """Refuses so many records more."""

    num_refused = 0

    def _check(self) -> None:
        if self.num_refused > 0:
            self.num_refused -= 1
            raise BrokerUnavailable("the broker comes back just now")
        super()._check()


async def test_what_a_broker_took_of_a_batch_is_not_sent_again_for_what_it_refused(tmp_path: Path) -> None:
    bus = RefusingBus()
    log = Log(bus, "test")
    await log.create_topics(partitions=1, keep_ms=1000)
    before = opened(tmp_path, log)
    for number in range(40):
        before.offer(outgoing(number))
    await before.flush()
    assert before.num_waiting == 40, "until the first drain everything goes by way of the disk"
    bus.num_refused = 3
    outbox = opened(tmp_path, log)
    draining = asyncio.create_task(outbox.drain())
    await until(lambda: outbox.direct and not outbox.num_waiting, seconds=30)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    seen = [int(m.value.id) async for m in log.scan(FEEDBACK) if isinstance(m.value, Received)]
    assert seen == [*range(3, 32), *range(3), *range(32, 40)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 60))
def test_a_torn_tail_is_cut_and_everything_before_it_is_kept(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[bytes]], torn: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, max_bytes=1_000_000)
    for batch in batches:
        spool.append(batch)
    entries = [entry for batch in batches for entry in batch]
    (path,) = folder.glob("*.spool")
    size = path.stat().st_size
    os.truncate(path, max(0, size - torn))
    again = Spool(folder, max_bytes=1_000_000)
    kept = (again.oldest() or (0, []))[1]
    assert kept == entries[: len(kept)]
    if not torn:
        assert kept == entries and not again.torn_bytes
    again.append([b"after"])
    assert len(again) == len(kept) + 1


KILLED = """
import sys
from pathlib import Path
from actors.gateway.recording.spool import Spool
spool = Spool(Path(sys.argv[1]), max_bytes=10**9)
number = 0
while True:
    spool.append([str(number + one).encode() for one in range(7)])
    number += 7
    print(number, flush=True)
"""


def test_what_append_returned_from_survives_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = int(process.stdout.readline())
    begin = time.monotonic()
    while told < 70 and time.monotonic() - begin < 60:
        told = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    told = max([told, *(int(line) for line in process.stdout.read().split())])
    process.wait()
    spool = Spool(tmp_path, max_bytes=10**9)
    kept = []
    while (oldest := spool.oldest()) is not None:
        kept += oldest[1]
        spool.remove(oldest[0])
    assert kept[:told] == [str(one).encode() for one in range(told)]
