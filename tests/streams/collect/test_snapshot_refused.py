"""Snapshots that cannot be used: each is said and counted, and nothing is decided without what it lacks."""

import asyncio
from pathlib import Path

import pytest

from infra.log.bus import Partition
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.snapshots import SnapshotDamaged, candidates, read, save
from schemas.errors import NotInLog, StoreError
from schemas.topics import VERIFIED
from tests.stored import newest
from tests.streams.collect.carrying import (
    DAY_MS,
    SERIES,
    collector_of,
    counted,
    everything,
    filled,
    opened,
    outcome,
    record_of,
    some,
    stored_once,
)
from tests.streams.collect.collecting import tick


def damage_open(store: MemoryStore) -> None:
    snapshot = newest(store, SERIES, lambda reason, line: None)
    assert snapshot is not None
    store.put(snapshot.parts["open/0"].key, b"something else")


def damage_index(store: MemoryStore) -> None:
    snapshot = newest(store, SERIES, lambda reason, line: None)
    assert snapshot is not None
    store.put(snapshot.parts["index/0"].key, b"something else")


def lose_part(store: MemoryStore) -> None:
    snapshot = newest(store, SERIES, lambda reason, line: None)
    assert snapshot is not None
    store.delete(snapshot.parts["memories"].key)


def damage_manifest(store: MemoryStore) -> None:
    (key,) = store.keys(f"snapshots/{SERIES}/manifests/")
    store.put(key, store.get(key)[:-9])


def newer_manifest(store: MemoryStore) -> None:
    (key,) = store.keys(f"snapshots/{SERIES}/manifests/")
    store.put(key, store.get(key).replace(b'"format":1', b'"format":2'))


def newer_layout(store: MemoryStore) -> None:
    (key,) = store.keys(f"snapshots/{SERIES}/manifests/")
    store.put(key, store.get(key).replace(b'"layout":2', b'"layout":3'))


def other_bytes(store: MemoryStore) -> None:
    """A part whole as it was written, of something that is none."""
    snapshot = newest(store, SERIES, lambda reason, line: None)
    assert snapshot is not None
    store.delete(snapshot.key)
    parts = [
        (name, b"\x93 no rows" if name == "open/0" else read(store, part)) for name, part in snapshot.parts.items()
    ]
    save(store, SERIES, snapshot.position, parts, snapshot.about)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (damage_open, "damaged"),
        (damage_index, "damaged"),
        (lose_part, "a part is missing"),
        (damage_manifest, "damaged"),
        (newer_manifest, "written by a newer release"),
        (newer_layout, "written by a newer release"),
        (other_bytes, "damaged"),
    ],
)
def test_a_snapshot_that_cannot_be_used_is_said_and_counted_and_the_log_is_folded(
    harm: object, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        log, store, first = await stored_once(tmp_path / "a")
        first.close()
        harm(store)  # type: ignore[operator]
        metrics = Metrics("process")
        before = await outcome(log)
        second = await opened(log, tmp_path / "b", metrics, committed=first.next_offset)
        assert (second.next_offset, second.num_open()) == (first.next_offset, first.num_open())
        assert counted(metrics, "snapshots") == {f"snapshots_refused{{reason={reason}}}": 1.0}
        assert await outcome(log) == before
        second.close()

    asyncio.run(run())
    assert len([one for one in caplog.messages if one.startswith("collect_snapshot_refused partition=0")]) == 1


@pytest.mark.parametrize("count", [1, 9])
def test_a_snapshot_of_another_log_is_not_taken_and_goes(count: int, tmp_path: Path) -> None:
    async def run() -> None:
        _, store, first = await stored_once(tmp_path / "a")
        first.close()
        other = await filled(some(count), store, from_ms=5_000_000)
        metrics = Metrics("process")
        second = await opened(other, tmp_path / "b", metrics)
        assert second.next_offset == 0
        assert counted(metrics, "snapshots") == {"snapshots_refused{reason=of another log}": 1.0}
        await second.take(await everything(other))
        for _ in range(3):  # its own are the newest now, though they begin lower
            await second.snapshot()
        assert [one.position for one in candidates(store, SERIES, lambda reason, line: None)] == [3 * count]
        second.close()

    asyncio.run(run())


@pytest.mark.parametrize("beyond", [-1, 1])
def test_a_snapshot_older_than_the_log_or_waiting_for_a_trimmed_block_is_not_taken(beyond: int, tmp_path: Path) -> None:
    async def run() -> None:
        log, _, first = await stored_once(tmp_path / "a")
        first.close()
        for _ in range(3):
            await log.publish(VERIFIED, tick())
        await log.bus.delete_records(Partition(log.name(VERIFIED), 0), first.next_offset + beyond)
        metrics = Metrics("process")
        second = await opened(log, tmp_path / "b", metrics)
        assert second.num_open() == 0
        assert counted(metrics, "snapshots_refused") == {"snapshots_refused{reason=older than the log}": 1.0}
        second.close()

    asyncio.run(run())


def test_a_store_that_is_away_costs_a_snapshot_and_no_record(tmp_path: Path) -> None:
    class StoreThatIsAway(MemoryStore):
        def keys(self, prefix: str):  # type: ignore[no-untyped-def]
            raise StoreError("the store is away")

        def put(self, key: str, data: bytes) -> None:
            raise StoreError("the store is away")

    async def run() -> None:
        log = await filled(some(8), StoreThatIsAway())
        metrics = Metrics("process")
        collector = collector_of(log, tmp_path, metrics)
        collector._snapshots.store_away_s = 0.0
        await collector.recover(0, lambda: False)
        await collector.take(await everything(log))
        await collector.snapshot()
        assert collector.next_offset == 24
        assert counted(metrics, "snapshots") == {
            "snapshots_refused{reason=the store was away}": 1.0,
            "snapshots_failed": 1.0,
        }
        collector.close()

    asyncio.run(run())


def test_a_closed_group_that_lies_in_the_store_alone_is_not_joined_anew_and_damage_there_ends_the_worker(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        log, store, first = await stored_once(tmp_path / "a")
        first.close()
        snapshot = newest(store, SERIES, lambda reason, line: None)
        assert snapshot is not None
        closed = snapshot.parts["closed/0"]
        second = await opened(log, tmp_path / "b")
        whole = store.get(closed.key)
        store.put(closed.key, b"something else")
        await log.publish(VERIFIED, record_of("said", 0, 3))
        last = (await everything(log))[-1:]
        with pytest.raises(SnapshotDamaged):
            await second.take(last)
        second.close()
        assert whole and not list(candidates(store, SERIES, lambda reason, line: None))
        third = await opened(log, tmp_path / "b", committed=first.next_offset)
        await third.take(last)
        third.close()
        plain = await filled([*some(8), ("said", 0, 3)], None)
        reader = await opened(plain, tmp_path / "plain")
        await reader.take((await everything(plain))[:-1])
        await reader.take((await everything(plain))[-1:])
        reader.close()
        closures = [one for one in (await outcome(log))[0]]
        assert closures == (await outcome(plain))[0]

    asyncio.run(run())


def test_a_block_that_is_gone_ends_the_worker_before_it_decides_without_it(tmp_path: Path) -> None:
    async def run() -> None:
        log, _, first = await stored_once(tmp_path / "a")
        first.close()
        second = await opened(log, tmp_path / "b")
        await log.bus.delete_records(Partition(log.name(VERIFIED), 0), first.next_offset)
        log.bus.clock.now_ms += DAY_MS  # type: ignore[attr-defined]
        await log.publish(VERIFIED, tick())
        before = await outcome(log)
        with pytest.raises(NotInLog, match="verified/0 offset"):
            await second.take([one.record async for one in log.scan(VERIFIED)])
        second.close()
        assert await outcome(log) == before

    asyncio.run(run())
