"""The follower of an engine: the versions it begins with, a store that fails, and summaries of `policies`."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from actors.engines.engine import LoadReport, Sampling
from actors.engines.reload import PolicyFollower
from actors.engines.scripted import TENSOR, ScriptedEngine
from actors.engines.vllm.engine import in_a_file
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.policies.beginning import LOOK
from infra.policies.policy import Policy
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy
from infra.policies.version_files import VersionFiles
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import NotInStore, PolicyRefused, StoreError
from schemas.fields import Channel
from schemas.topics import POLICIES
from tests.actors.rig import FLOOR, memory_log, running, until
from tests.infra.weights.test_fetch import Counting
from tests.role import role_of
from tests.starts import CountingBus, summarize
from trainer.loop.publication import SUMMARIZE_EVERY

VOCABULARY = 48


class RefusingEngine(ScriptedEngine):
    """An engine that refuses some versions."""

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        super().__init__(num_vocabulary=VOCABULARY)
        self._refused_versions = refused

    async def load(self, policy: Policy) -> LoadReport:
        if policy.version in self._refused_versions:
            raise PolicyRefused(f"policy {policy.version}: not reproduced")
        return await super().load(policy)


def published(store: Store, num_versions: int = 5) -> tuple[list[PolicyEvent], list[dict[str, Tensor]]]:
    """An anchor and deltas from it: only 16-bit values have deltas."""
    table = np.random.default_rng(5).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float16)
    events: list[PolicyEvent] = []
    weights: list[dict[str, Tensor]] = []
    for version in range(num_versions):
        table = table.copy()
        table[version] += 0.01
        tensors = {TENSOR: from_numpy(table)}
        new = NewVersion(policy="main", token=3, version=version, parent=version - 1, step=version)
        events.append(publish(store, new, tensors, previous=weights[-1] if weights else None, probe=None))
        weights.append(tensors)
    return events, weights


def folders_of(keys: list[str]) -> set[str]:
    return {"/".join(key.split("/")[3:5]) for key in keys if "/manifests/" not in key}


def is_decided(engine: RefusingEngine, follower: PolicyFollower, version: int) -> bool:
    """True if a version serves or was given up."""
    return engine.version == version or version in follower.refused


async def follow(store: Store, engine: RefusingEngine, steps: list[tuple[list[PolicyEvent], int]]) -> Metrics:
    """Tell these events, a few at a time, each time until the engine serves that version."""
    log, metrics = await memory_log(), Metrics("explore")
    await engine.start()
    follower = PolicyFollower(role_of("explore", FLOOR, log, store, metrics=metrics), engine)
    for event in steps[0][0]:
        await log.publish(POLICIES, event)
    loops = [asyncio.create_task(loop) for loop in (follower.read(), follower.load())]
    async with running(*loops):
        await until(lambda: engine.version == steps[0][1])
        for events, version in steps[1:]:
            for event in events:
                await log.publish(POLICIES, event)
                await until(partial(is_decided, engine, follower, event.version))
            assert engine.version == version
    await engine.close()
    return metrics


async def test_after_a_version_whose_objects_were_refused_the_next_reads_deltas_alone() -> None:
    store = Counting()
    events, weights = published(store)
    bad = PolicyEvent(event="published", policy="main", version=2, parent=1, token=3, manifest=events[2].manifest,
                      manifest_sha256="0" * 64)  # fmt: skip
    engine = RefusingEngine()

    store.read.clear()
    metrics = await follow(store, engine, [(events[1:2], 1), ([bad, events[3]], 3)])
    assert metrics.counters()["policies_refused"] == 2
    assert engine.tensors[TENSOR] == weights[3][TENSOR]
    assert folders_of(store.read) == {"anchors/0", "deltas/0-1", "deltas/1-2", "deltas/2-3"}
    assert sum("/anchors/" in key for key in store.read) == 1, "the held copy was thrown away"


SAMPLING = Sampling(max_tokens=6, temperature=1.0, stop=())


class FaultyStore(MemoryStore):
    """A store whose `get` goes wrong while `fault` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[FaultyStore, str], bytes] = MemoryStore.get
        self.mended = threading.Event()

    def get(self, key: str) -> bytes:
        return self.fault(self, key)

    def mend(self) -> None:
        self.fault = MemoryStore.get
        self.mended.set()


def answers_500(store: FaultyStore, key: str) -> bytes:
    raise StoreError(f"get {key}: 500 Internal Server Error")


def is_slow(store: FaultyStore, key: str) -> bytes:
    store.mended.wait(60)
    return MemoryStore.get(store, key)


def gives_a_part(store: FaultyStore, key: str) -> bytes:
    data = MemoryStore.get(store, key)
    return data[: len(data) // 2]


def gives_old_bytes(store: FaultyStore, key: str) -> bytes:
    """The object of version 1 that stands for this object of version 2; any other as it is."""
    if "/deltas/1-2/" in key:
        key = next(store.keys(f"{key.partition('/deltas/')[0]}/deltas/0-1/"))
    return MemoryStore.get(store, key.replace("/manifests/2.", "/manifests/1."))


def misses_objects(store: FaultyStore, key: str) -> bytes:
    if "/manifests/" in key:
        return MemoryStore.get(store, key)
    raise NotInStore(f"get {key}: not there yet")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (answers_500, "policy_fetch_failed"),
        (is_slow, "policy_fetch_slow"),
        (gives_a_part, "policies_refused"),
        (gives_old_bytes, "policies_refused"),
        (misses_objects, "policies_refused"),
    ],
)
def test_while_a_store_fails_the_old_version_serves_on_and_the_reason_is_an_event_and_a_metric(
    fault: Callable[[FaultyStore, str], bytes], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore()
    events, weights = published(store, 4)
    served: list[int] = []

    async def ask(engine: ScriptedEngine) -> None:
        while True:
            served.append(len((await engine.generate([1, 2, 3], SAMPLING)).tokens))

    async def run() -> None:
        log, metrics, engine = await memory_log(), Metrics("explore"), ScriptedEngine(num_vocabulary=VOCABULARY)
        await engine.start()
        follower = PolicyFollower(role_of("explore", FLOOR, log, store, metrics=metrics), engine, slow_s=0.05)
        loops = [asyncio.create_task(loop) for loop in (follower.read(), follower.load(), ask(engine))]
        async with running(*loops):
            await log.publish(POLICIES, events[1])
            await until(lambda: engine.version == 1)
            store.fault = fault
            await log.publish(POLICIES, events[2])
            await until(lambda: metrics.counters().get(told, 0) >= 1)
            if told == "policies_refused":
                await until(lambda: follower.refused.keys() == {2} and bool(follower.refused[2]))
            answered = len(served)
            await until(lambda: len(served) > answered + 3)
            assert engine.version == 1 and engine.tensors[TENSOR] == weights[1][TENSOR]
            store.mend()
            expected = 3 if told == "policies_refused" else 2
            if expected == 3:
                await log.publish(POLICIES, events[3])
            await until(lambda: engine.version == expected)
            assert engine.tensors[TENSOR] == weights[expected][TENSOR]
        await engine.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert set(served) == {SAMPLING.max_tokens}, "no request failed, and none was cut"
    event = "policy_refused" if told == "policies_refused" else told
    assert any(record.getMessage().startswith(f"{event} version=2") for record in caplog.records)


class PassingEngine(ScriptedEngine):
    """One that passes weights on through files, as vLLM's does."""

    def __init__(self, files: VersionFiles) -> None:
        super().__init__(num_vocabulary=VOCABULARY)
        self._files = files

    async def load(self, policy: Policy) -> LoadReport:
        file = in_a_file(self._files, policy.tensors)
        assert file.path.exists()
        return await super().load(policy)


def test_where_memory_and_disk_have_no_room_for_a_version_the_old_one_serves_on_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    events, weights = published(store, 4)
    room = [10**9]

    async def run() -> str:
        log, metrics = await memory_log(), Metrics("explore")
        engine = PassingEngine(VersionFiles([tmp_path], free=lambda place: room[0]))
        await engine.start()
        follower = PolicyFollower(role_of("explore", FLOOR, log, store, metrics=metrics), engine)
        loops = [asyncio.create_task(loop) for loop in (follower.read(), follower.load())]
        async with running(*loops):
            await log.publish(POLICIES, events[1])
            await until(lambda: engine.version == 1)
            room[0] = 1000
            await log.publish(POLICIES, events[2])
            await until(lambda: bool(follower.refused))
            assert engine.version == 1 and len((await engine.generate([1, 2, 3], SAMPLING)).tokens) == 6
            assert engine.tensors[TENSOR] == weights[1][TENSOR] and metrics.counters()["policies_refused"] == 2
            room[0] = 10**9
            await log.publish(POLICIES, events[3])
            await until(lambda: engine.version == 3)
            return follower.refused[2]

    assert "give the container a larger /dev/shm" in asyncio.run(run())
    assert not [*tmp_path.glob("*/*.safetensors")]


LATER = 3 * LOOK  # versions that were published since the first ones


def stable(kind: str, version: int) -> PolicyEvent:
    return PolicyEvent(event=kind, policy="main", version=version, channel="stable", owner="ann")  # type: ignore[arg-type]


class Life:
    """A log of a long life, and an engine that begins. Only the first five versions and the newest are in the store."""

    def __init__(self, channel: Channel) -> None:
        self.bus, self.store, self.metrics = CountingBus(), MemoryStore(), Metrics("serve")
        self.log = Log(self.bus, FLOOR.app, store=self.store)
        self.events, self.weights = published(self.store)
        self.engine = RefusingEngine()
        role = role_of("serve", FLOOR, self.log, self.store, metrics=self.metrics)
        self.follower = PolicyFollower(role, self.engine, channel=channel)

    async def lived(self, *moves: PolicyEvent, late: tuple[PolicyEvent, ...] = ()) -> None:
        """moves: before the later versions. late: after them."""
        await self.log.create_topics(partitions=1, keep_ms=-1)
        for event in (*self.events[:4], *moves):
            await self.log.publish(POLICIES, event)
        for version in range(10, 10 + LATER):
            away = PolicyEvent(event="published", policy="main", version=version, token=3, manifest=f"gone/{version}")
            await self.log.publish(POLICIES, away)
        for event in late:
            await self.log.publish(POLICIES, event)
        summarize(self.log)
        self.bus.read.clear()

    @property
    def read(self) -> int:
        return self.bus.read.get(self.log.name(POLICIES), 0)

    async def serves(self, version: int) -> None:
        await until(lambda: self.engine.version == version and self.metrics.counters().get("reloads", 0) > 0)


async def served(life: Life, *, version: int) -> None:
    await life.engine.start()
    async with running(asyncio.create_task(life.follower.read()), asyncio.create_task(life.follower.load())):
        await life.serves(version)
    await life.engine.close()


async def test_a_gateway_serves_what_is_stable_however_old_and_reads_no_more_for_it() -> None:
    life = Life("stable")
    await life.lived(stable("promoted", 2), stable("pinned", 3))
    await served(life, version=3)
    assert life.read <= LOOK + 1 + 2 * SUMMARIZE_EVERY
    assert (life.follower.stable.version, life.follower.stable.pinned) == (3, True)
    gauges = life.metrics.gauges()
    assert (gauges["policy_version_stable"], gauges["policy_version_published"]) == (3, 9 + LATER)


async def test_a_version_from_before_the_summary_is_served_as_soon_as_it_is_stable() -> None:
    life = Life("stable")
    await life.lived(stable("promoted", 2), stable("pinned", 3))
    await life.engine.start()
    async with running(asyncio.create_task(life.follower.read()), asyncio.create_task(life.follower.load())):
        await life.serves(3)
        read = life.read
        await life.log.publish(POLICIES, stable("rolled_back", 1))
        await life.serves(1)
        assert life.read > read + LATER, "only the first records tell of it"
        read = life.read
        await life.log.publish(POLICIES, stable("promoted", 2))
        await life.serves(2)
        assert life.read == read + 1
    await life.engine.close()


async def test_what_a_gateway_knows_from_the_summary_stays_in_force_while_it_reads_all() -> None:
    life = Life("stable")
    await life.lived(stable("promoted", 2), late=(stable("pinned", 3),))
    await life.log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=10 + LATER, manifest="gone"))
    await life.engine.start()
    seen: set[int] = set()

    async def look() -> None:
        while True:
            seen.add(life.follower.stable.version)
            await asyncio.sleep(0)

    loops = [asyncio.create_task(loop) for loop in (life.follower.read(), life.follower.load(), look())]
    async with running(*loops):
        await life.serves(3)
    await life.engine.close()
    assert life.read > LATER, "the summary does not tell where version 3 is"
    assert seen == {-1, 3}, "never what was stable in between"
