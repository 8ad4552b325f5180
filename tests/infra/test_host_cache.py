"""The cache of weights that the engines of one machine share: once over the network, within its bound, never in the way."""

import fcntl
import logging
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infra.cli.connect import cache_folder
from infra.cli.settings import Settings
from infra.observe.metrics import Metrics
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy
from infra.settings.config import StoreConfig
from infra.store.directory import DirectoryStore
from infra.store.host_cache import HostCache
from infra.store.store import Hashed, Store, digest_of
from schemas import PolicyEvent
from schemas.errors import StoreError
from tests.infra.host_processes import fetched_by_a_holder_that_hangs, follow
from tests.starts import content_name

NUM_FOLLOWERS = 8
NUM_VERSIONS = 7
Counters = dict[str, float]


def published(store: Store) -> tuple[list[PolicyEvent], list[dict[str, Tensor]]]:
    """Versions in deltas and slices, and an anchor of several objects."""
    generator = np.random.default_rng(5)
    table = generator.normal(size=(64, 64)).astype(np.float32)
    events: list[PolicyEvent] = []
    weights: list[dict[str, Tensor]] = []
    for version in range(NUM_VERSIONS):
        table = table.copy()
        table[version] += 0.01
        tensors = {f"w{row}": from_numpy(table[8 * row : 8 * row + 8].copy()) for row in range(8)}
        new = NewVersion(policy="main", token=3, version=version, parent=version - 1, step=version)
        previous = weights[-1] if weights else None
        events.append(publish(store, new, tensors, previous=previous, probe=None, shard_bytes=4096))
        weights.append(tensors)
    return events, weights


@contextmanager
def holder(folder: Path, digest: str) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that fetches an object and never ends."""
    process = multiprocessing.get_context("spawn").Process(target=fetched_by_a_holder_that_hangs, args=(folder, digest))
    folder.mkdir(exist_ok=True)
    process.start()
    while not (folder / "held").exists():
        assert process.is_alive()
        process.join(0.02)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def counters(metrics: Metrics) -> Counters:
    return {name.removeprefix("host_cache_"): value for name, value in metrics.counters().items()}


def named(number: int, size: int = 100) -> tuple[str, bytes]:
    data = bytes([number]) * size
    return content_name(data), data


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name == "objects"]


def fails() -> Hashed:
    raise StoreError("nothing may be asked of the store")


def test_eight_followers_on_one_host_read_each_object_from_the_store_once(tmp_path: Path) -> None:
    events, _ = published(DirectoryStore(tmp_path / "store"))
    processes = [
        multiprocessing.get_context("spawn").Process(target=follow, args=(tmp_path, events))
        for _ in range(NUM_FOLLOWERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [done.read_text() for done in tmp_path.glob("done-*")] == [str(NUM_VERSIONS - 1)] * NUM_FOLLOWERS
    asked = (tmp_path / "asked").read_text().splitlines()
    weights = [key for key in asked if "/manifests/" not in key]
    assert len(weights) == len(set(weights)) >= NUM_VERSIONS, "each object of weights came over the network once"
    assert {key.split("/")[3] for key in weights} == {"anchors", "deltas"}


def test_whoever_asks_while_another_fetches_waits_for_it(tmp_path: Path) -> None:
    digest, data = named(1)
    begun, go, fetches = threading.Event(), threading.Event(), []

    def slow() -> Hashed:
        fetches.append(1)
        begun.set()
        go.wait()
        return hashed(data)

    def ask(_: int) -> None:
        cache = HostCache(tmp_path, max_bytes=1000, metrics=Metrics("x"))  # a process of its own, as far as locks see
        assert got(cache, digest, slow) == data

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    begun.wait()
    go.set()
    for thread in threads:
        thread.join()
    assert len(fetches) == 1


def test_a_holder_that_is_killed_lets_the_next_one_fetch(tmp_path: Path) -> None:
    digest, data = named(1)
    metrics = Metrics("x")
    with holder(tmp_path, digest) as process:
        process.kill()
        assert (
            got(HostCache(tmp_path, max_bytes=1000, metrics=metrics, wait_s=600.0), digest, lambda: hashed(data))
            == data
        )
    assert counters(metrics) == {"misses": 1.0}


def test_a_holder_that_hangs_is_waited_for_no_longer_than_is_said(tmp_path: Path) -> None:
    digest, data = named(1)
    metrics = Metrics("x")
    with holder(tmp_path, digest):
        assert (
            got(HostCache(tmp_path, max_bytes=1000, metrics=metrics, wait_s=0.05), digest, lambda: hashed(data)) == data
        )
    assert counters(metrics) == {"misses": 1.0, "skipped": 1.0}


def test_the_longest_unused_goes_first_and_the_bound_holds(tmp_path: Path) -> None:
    metrics = Metrics("x")
    cache = HostCache(tmp_path, max_bytes=350, metrics=metrics)
    for number in range(3):
        cache.get(*held(number))
        os.utime(tmp_path / "objects" / named(number)[0], (number, number))
    cache.get(named(0)[0], fails)  # used again
    cache.get(*held(3))
    assert {path.name for path in files(tmp_path)} == {named(number)[0] for number in (0, 2, 3)}
    gauges = metrics.gauges()
    assert (gauges["host_cache_bytes"], gauges["host_cache_max_bytes"]) == (300.0, 350.0)


def got(cache: HostCache, name: str, fetch: Callable[[], Hashed]) -> bytes:
    """The object, its digest looked at."""
    data, digest = cache.get(name, fetch)
    assert digest == digest_of((data,))
    return bytes(data)


def hashed(data: bytes) -> Hashed:
    return data, digest_of((data,))


def held(number: int, size: int = 100) -> tuple[str, Callable[[], Hashed]]:
    digest, data = named(number, size)
    return digest, lambda: hashed(data)


def test_the_last_of_a_disk_is_left_to_others(tmp_path: Path) -> None:
    metrics = Metrics("x")
    cache = HostCache(tmp_path, max_bytes=1000, metrics=metrics, left_free=1.0)
    assert got(cache, *held(1)) == named(1)[1]
    assert not files(tmp_path) and counters(metrics) == {"misses": 1.0, "skipped": 1.0}


@pytest.mark.parametrize("goes", ["when a process begins", "when an object is added"])
def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(tmp_path: Path, goes: str) -> None:
    cache = HostCache(tmp_path, max_bytes=1000, metrics=Metrics("x"))
    cache.get(*held(1))
    left, written = (tmp_path / "objects" / f"{two}{'0' * 30}.part" for two in ("aa", "bb"))
    with open(tmp_path / "locks" / "bb", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        left.write_bytes(b"h" * 100)
        written.write_bytes(b"h" * 100)
        if goes == "when a process begins":
            HostCache(tmp_path, max_bytes=1000, metrics=Metrics("x"))
        else:
            cache.get(*held(3))
        assert not left.exists() and written.exists()


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"\1" * 99, b"\1" * 101], ids=["empty", "zeros", "short", "long"])
def test_a_damaged_entry_is_noticed_by_its_digest_and_fetched_again(tmp_path: Path, damage: bytes) -> None:
    metrics = Metrics("x")
    cache = HostCache(tmp_path, max_bytes=1000, metrics=metrics)
    digest, data = named(1)
    cache.get(digest, lambda: hashed(data))
    (tmp_path / "objects" / digest).write_bytes(damage)
    assert got(cache, digest, lambda: hashed(data)) == data
    assert got(cache, digest, fails) == data, "it was put in order"
    assert counters(metrics) == {"misses": 2.0, "damaged": 1.0, "hits": 1.0}


def test_a_full_disk_is_gone_on_without_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("x")
    cache = HostCache(tmp_path, max_bytes=10_000_000, metrics=metrics)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # the kernel refuses to write more
            try:
                found = got(cache, *held(number, 100_000))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert found == named(number, 100_000)[1]
    assert counters(metrics) == {"misses": 3.0, "skipped": 3.0} and not files(tmp_path)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["host_cache_skipped"]
    assert got(cache, *held(1)) and len(files(tmp_path)) == 1, "it is used again once it can be"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (StoreConfig(), None),
        (StoreConfig(cache="kept"), "app/kept"),
        (StoreConfig(cache="kept", cache_gb=0), None),
        (StoreConfig(use="plugins:Shelf"), None),
        (StoreConfig(use="plugins:Shelf", cache="kept"), "app/kept"),
        (StoreConfig(url="s3://bucket", cache_gb=0), None),
        (StoreConfig(url="s3://bucket", cache="kept"), "app/kept"),
    ],
)
def test_a_store_behind_a_network_is_kept_and_a_folder_only_where_it_is_said(
    config: StoreConfig, expected: str | None
) -> None:
    settings = msgspec.structs.replace(Settings(app="app"), store=config, folder=Path("app"))
    assert cache_folder(settings) == (expected and Path(expected))
