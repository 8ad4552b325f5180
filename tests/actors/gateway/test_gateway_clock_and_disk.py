"""Clocks that are off by an hour, full disks, clients that do not read: the answer is given, the loss counted, no more."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from actors.gateway.access.authenticator import Authenticator
from actors.gateway.access.keys import ApiKey, KeyBook
from actors.gateway.errors import ApiError
from actors.gateway.recording.spool import Spool, SpoolFull
from infra.observe.metrics import Metrics
from schemas import PolicyEvent
from tests.actors.gateway.gateway_rig import ASK, AwayBus, RunningGateway, engine, says, serving
from tests.actors.gateway.test_gateway_reload import announce, bigram, loaded
from tests.actors.rig import until

HOUR_S = 3600.0
KEY = ApiKey(id="a" * 16, tenant="acme", scopes=("serve", "feedback"), sha256="9f", rpm=2, expires_s=1e6 + HOUR_S / 2)


class Clock:
    """Seconds of the epoch, as somebody sets them."""

    now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


def test_a_clock_set_back_an_hour_shuts_no_key_out_and_one_set_forward_gives_a_minute_at_most() -> None:
    clock = Clock()
    authenticator = Authenticator(KeyBook([KEY]), Metrics("t"), clock)
    for moved_s in (0.0, -HOUR_S, 60.0, HOUR_S):
        clock.now_s += moved_s
        if moved_s >= 0:
            authenticator.admit(KEY), authenticator.admit(KEY)
        with pytest.raises(ApiError) as caught:
            authenticator.admit(KEY)
        assert caught.value.status == 429 and caught.value.retry_after_s <= 30


@contextmanager
def full_disk(num_bytes: int = 0) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_spool_on_a_full_disk_keeps_what_it_had_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=1_000_000)
    spool.append([b"before"])
    (segment,) = tmp_path.glob("*.spool")
    with full_disk(segment.stat().st_size + 4), pytest.raises(SpoolFull, match="cannot be written"):
        spool.append([b"lost", b"as a whole"])
    spool.append([b"after"])
    assert Spool(tmp_path, max_bytes=1_000_000).oldest() == (1, [b"before", b"after"])


async def test_answers_on_a_full_disk_without_a_broker_are_given_shed_and_counted(tmp_path: Path) -> None:
    bus = AwayBus()
    async with serving(tmp_path, engine(says("Hello.")), bus=bus) as served:
        client = await served.opened()
        bus.away = True
        with full_disk():
            for _ in range(3):
                done = await client.chat.completions.create(model="main", messages=ASK)
                assert done.choices[0].message.content == "Hello."
            await until(lambda: served.count("shed") == 3, seconds=60)
            async with served.http(await served.new_key()) as http:
                said = await http.post("/v1/feedback", json={"answer_id": done.id, "value": 1})
                assert said.status_code == 503, "feedback that cannot be kept is told so"
        assert (await client.chat.completions.create(model="main", messages=ASK)).choices[0].message.content == "Hello."
        bus.away = False
        assert len(await served.recorded(1)) == 1


def test_a_damaged_entry_hides_what_is_behind_it_in_its_segment_only_and_is_told(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=1_000_000)
    spool.append([b"one", b"two"])
    assert spool.oldest() == (1, [b"one", b"two"])
    spool.append([b"three"])
    first = sorted(tmp_path.glob("*.spool"))[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    again = Spool(tmp_path, max_bytes=1_000_000)
    assert (again.damaged, again.oldest()) == (1, (1, [b"one"]))
    assert list(tmp_path.glob("*.damaged"))
    again.remove(1)
    assert again.oldest() == (2, [b"three"])


async def test_a_gateway_whose_spool_is_lost_serves_on_records_anew_and_sends_what_is_left_once_the_disk_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shed(served: RunningGateway, reason: str) -> float:
        return served.metrics.counters().get(f"shed{{reason={reason}}}", 0.0)

    bus = AwayBus()
    async with serving(tmp_path, engine(says("Hello.")), bus=bus) as served:
        client = await served.opened()

        async def ask(count: int) -> None:
            for _ in range(count):
                done = await client.chat.completions.create(model="main", messages=ASK)
                assert done.choices[0].message.content == "Hello."

        bus.away = True
        await ask(3)
        await until(lambda: served.count("spooled") == 3, seconds=60)
        lost = (tmp_path / "spool").rename(tmp_path / "elsewhere")
        await ask(1)
        await until(lambda: shed(served, "spool lost") == 1, seconds=60)
        bus.away = False
        await until(lambda: shed(served, "spool unreadable") == 3, seconds=60)
        while not await served.experiences():  # what comes in before the drain has found that is given up, and counted
            await ask(1)
        await ask(1)
        anew = len(await served.recorded(2))
        assert shed(served, "spool full") == 0, "no room is not what is missing"
    assert "stay on disk for the next start" in caplog.text
    shutil.rmtree(tmp_path / "spool", ignore_errors=True)
    lost.rename(tmp_path / "spool")
    async with serving(tmp_path, engine(says("Hello.")), bus=bus, store=served.store) as again:
        assert len({one.id for one in await again.recorded(anew + 3)}) == anew + 3


async def test_a_reload_on_a_full_disk_serves_the_new_version_and_counts_what_was_not_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("a"))) as served:
        with full_disk():
            await announce(served, 3, bigram(3))
            await loaded(served, 3)
            assert served.count("policy_not_remembered") == 1
        assert not (tmp_path / "spool" / "serve-0" / "policy.json").exists()
        await announce(served, 4, bigram(4))
        await loaded(served, 4)
        assert (tmp_path / "spool" / "serve-0" / "policy.json").exists()


async def test_a_start_leaves_out_the_remembered_version_of_another_policy(tmp_path: Path) -> None:
    memory = tmp_path / "spool" / "serve-0" / "policy.json"
    memory.parent.mkdir(parents=True)
    memory.write_bytes(msgspec.json.encode(PolicyEvent(event="published", policy="former", version=3, manifest="m")))
    async with serving(tmp_path, engine(says("a"))) as served:
        assert served.engine.version == 0 and not served.count("policies_refused")
