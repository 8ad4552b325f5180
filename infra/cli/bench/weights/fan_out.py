"""Many followers of one version: what a store is asked for, how fast it gives, and when the last of them has the weights.

The store is a MinIO server. In front of it is a proxy whose every connection passes `mb_per_s`, as one of a real network or of
a real S3 does, scaled down to what this machine can move; each host has a door of its own there, which counts. First one object
is read and written over one connection, and as `S3Store` does it. Then hosts × followers processes fetch a version, all its
weights, and the one after it, a delta: once with a cache for each host, as explorers and gateways have it, and once without. A
host here is a cache folder and a door: all of them share the cores of this machine, its memory and its disk.
"""

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from infra.cli.bench.common import minio
from infra.cli.bench.weights.throttle import ThrottledPort, throttled
from infra.observe.metrics import Metrics
from infra.policies.fetch import PolicyFetcher
from infra.store.host_cache import CachedStore, HostCache
from infra.store.s3 import PART_BYTES, S3Store
from infra.store.s3_keys import S3Credentials
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import ConfigError

BUCKET = "fan-out"
OBJECT_BYTES = 128 * 1024 * 1024  # as large as a shard of weights becomes
WAIT_S = 600.0
AHEAD_S = 0.5  # between saying when a version is announced, and that moment
CHANGED = 0.014  # of the values, from one version to the next


class FanOutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    mb: of weights, 10⁶ bytes. mb_per_s: of one connection. hosts: that fetch. followers: processes of each host.
    object_bytes: of the object that is read and written over one connection and over many.
    """

    mb: float = 32.0
    mb_per_s: float = 2.0
    hosts: int = 8
    followers: int = 8
    object_bytes: int = OBJECT_BYTES


class Place(msgspec.Struct, frozen=True):
    """Where a follower fetches from. endpoint: host:port. access_key, secret_key: of the store. cache: a folder, "" for
    none.
    """

    endpoint: str
    access_key: str
    secret_key: str
    cache: str = ""

    def store(self) -> S3Store:
        """The bucket, without the cache."""
        credentials = S3Credentials(access_key=self.access_key, secret_key=self.secret_key)
        return S3Store(BUCKET, endpoint=self.endpoint, credentials=credentials, region=minio.REGION)


class Arrivals(msgspec.Struct, frozen=True):
    """Of one version at all followers. bytes_per_host: that came from the store. last_s: until the last one had it."""

    bytes_per_host: float
    last_s: float


def run(plan: FanOutPlan, say: Callable[[str], None]) -> dict[str, float]:
    """The figures. Raises ConfigError where there is no MinIO."""
    program = minio.find_or_build(minio.default_cache())
    if program is None:
        raise ConfigError("bench fan-out: no minio on PATH, and no Go to build it with")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "minio", "certifi"])
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-fan-out-") as name,
        minio.running(program, Path(name)) as server,
        throttled(urlsplit(server.endpoint).port or 0, plan.mb_per_s * 1e6, plan.hosts) as doors,
    ):
        store = server.store(BUCKET)
        places = [Place(door.url, server.access_key, server.secret_key) for door in doors]
        say(f"one object of {plan.object_bytes / 1e6:,.0f} MB, {plan.mb_per_s:g} MB/s a connection")
        figures = _one_client(context, places[0], plan.object_bytes)
        events = _published(store, plan)
        figures["version_mb"], figures["delta_mb"] = (event.stats["bytes"] / 1e6 for event in events)
        for kind in ("cached", "alone"):
            say(f"{plan.hosts} hosts of {plan.followers} followers, {kind}")
            own = [
                msgspec.structs.replace(place, cache=str(Path(name) / f"host-{number}") if kind == "cached" else "")
                for number, place in enumerate(places)
            ]
            arrived = _followed(context, [one for one in own for _ in range(plan.followers)], events, doors)
            for what, event, one in zip(("version", "delta"), events, arrived, strict=True):
                figures[f"{kind}_{what}_bytes_per_host"] = one.bytes_per_host / event.stats["bytes"]
                figures[f"{kind}_{what}_last_s"] = one.last_s
    return figures


def _published(store: Store, plan: FanOutPlan) -> list[PolicyEvent]:
    """All weights, and a delta from them."""
    import numpy as np

    from infra.cli.bench.weights.weights import made_up, moved
    from infra.policies.publish import NewVersion, publish

    generator = np.random.default_rng(0)
    first = made_up(plan.mb / 1000, generator)
    events = []
    for version, (tensors, previous) in enumerate(((first, None), (moved(first, CHANGED, generator), first))):
        new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
        events.append(publish(store, new, tensors, previous=previous, probe=None))
    return events


def _one_client(context: ForkServerContext, place: Place, num_bytes: int) -> dict[str, float]:
    """MB/s of one connection and of a store's `get` and `put`, by a process of its own."""
    results = context.Queue()
    process = context.Process(target=transfer, args=(place, num_bytes, results))
    process.start()
    try:
        figures: dict[str, float] | str = results.get(timeout=WAIT_S)
    finally:
        process.join()
    if isinstance(figures, str):
        raise RuntimeError(figures)
    for verb in ("get", "put"):
        figures[f"{verb}_over_one_connection"] = (
            figures[f"{verb}_mb_per_s"] / figures[f"one_connection_{verb}_mb_per_s"]
        )
    return figures


def transfer(place: Place, num_bytes: int, results: Any) -> None:
    """Read and write through a throttled door; the speeds go to `results`, or what went wrong."""
    import numpy as np

    try:
        store, data = place.store(), np.random.default_rng(1).bytes(num_bytes)
        store.put("warm", b"")

        def mb_per_s(work: Callable[[], object], moved_bytes: int) -> float:
            began = time.monotonic()
            work()
            return moved_bytes / 1e6 / (time.monotonic() - began)

        few = min(num_bytes, PART_BYTES)
        found = {"one_connection_put_mb_per_s": mb_per_s(lambda: store.put("few", data[:few]), few)}
        found["put_mb_per_s"] = mb_per_s(lambda: store.put("large", data), num_bytes)
        found["one_connection_get_mb_per_s"] = mb_per_s(lambda: store.read("large", 0, few), few)
        found["get_mb_per_s"] = mb_per_s(lambda: store.get("large"), num_bytes)
    except Exception as error:  # the parent would wait for ever
        results.put(f"{type(error).__name__}: {error}")
    else:
        results.put(found)


def _followed(
    context: ForkServerContext, places: list[Place], events: list[PolicyEvent], doors: list[ThrottledPort]
) -> list[Arrivals]:
    """What it took until a process at each place had one version, and then the next."""
    results, starts = context.Queue(), context.RawArray("d", len(events))
    processes = [context.Process(target=follow, args=(place, events, starts, results)) for place in places]
    for process in processes:
        process.start()
    arrived = []
    try:
        _all_results(results, len(processes))
        for number, _ in enumerate(events):
            read_before = sum(door.bytes_read for door in doors)
            starts[number] = time.monotonic() + AHEAD_S
            last = max(_all_results(results, len(processes)))
            read_bytes = sum(door.bytes_read for door in doors) - read_before
            arrived.append(Arrivals(read_bytes / len(doors), last - starts[number]))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return arrived


def _all_results(results: Any, count: int) -> list[float]:
    """What so many followers tell. Raises RuntimeError where one failed."""
    found = [results.get(timeout=WAIT_S) for _ in range(count)]
    if wrong := [one for one in found if isinstance(one, str)]:
        raise RuntimeError(f"{len(wrong)} of {count} followers failed: {wrong[0]}")
    return found


def follow(place: Place, events: list[PolicyEvent], starts: Sequence[float], results: Any) -> None:
    """A follower. That it is ready, and the time at which it has each version, go to `results`, or what went wrong.

    starts: when each version is announced, on the clock of the machine; 0 before that is known.
    """
    try:
        store: Store = place.store()
        if place.cache:
            store = CachedStore(store, HostCache(Path(place.cache), max_bytes=10**12, metrics=Metrics("follower")))
        fetcher = PolicyFetcher(store, "main")
        results.put(0.0)
        for number, event in enumerate(events):
            while not starts[number]:
                time.sleep(AHEAD_S / 10)
            time.sleep(max(0.0, starts[number] - time.monotonic()))
            fetcher.confirm(fetcher.fetch(event))
            results.put(time.monotonic())
    except Exception as error:  # the parent would wait for ever
        results.put(f"{type(error).__name__}: {error}")
    signal.pause()  # until all have arrived
