"""A store that fails in front of an engine that serves: the old version serves on, the reason is told, nothing is left."""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actors.engines.engine import LoadReport, Sampling
from actors.engines.reload import PolicyFollower
from actors.engines.scripted import TENSOR, ScriptedEngine
from actors.engines.vllm.engine import in_a_file
from infra.observe.metrics import Metrics
from infra.policies.policy import Policy
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy
from infra.policies.version_files import VersionFiles
from infra.store.host_cache import CachedStore, HostCache
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import NotInStore, StoreError
from schemas.topics import POLICIES
from tests.actors.rig import FLOOR, TopicArrivals, memory_log, running, until
from tests.role import role_of
from tests.stored import content_name

VOCABULARY = 48
SAMPLING = Sampling(max_tokens=6, temperature=1.0, stop=())
Weights = dict[str, Tensor]


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
    return MemoryStore.get(store, older(store, key))


def misses_objects(store: FaultyStore, key: str) -> bytes:
    if "/manifests/" in key:
        return MemoryStore.get(store, key)
    raise NotInStore(f"get {key}: not there yet")


def older(store: MemoryStore, key: str) -> str:
    """What version 1 has in the place of this object of version 2; the key itself of any other."""
    if "/deltas/1-2/" in key:
        return next(store.keys(f"{key.partition('/deltas/')[0]}/deltas/0-1/"))
    return key.replace("/manifests/2.", "/manifests/1.")


def published(store: Store) -> tuple[list[PolicyEvent], list[Weights]]:
    """An anchor and deltas from it."""
    table = np.random.default_rng(5).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    events: list[PolicyEvent] = []
    weights: list[Weights] = []
    for version in range(4):
        table = table.copy()
        table[version] += 0.01
        tensors = {TENSOR: from_numpy(table)}
        new = NewVersion(policy="main", token=3, version=version, parent=version - 1, step=version)
        events.append(publish(store, new, tensors, previous=weights[-1] if weights else None, probe=None))
        weights.append(tensors)
    return events, weights


@pytest.mark.parametrize("cached", [False, True], ids=["alone", "cached"])
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
    fault: Callable[[FaultyStore, str], bytes],
    told: str,
    cached: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FaultyStore()
    events, weights = published(store)
    served: list[int] = []

    async def ask(engine: ScriptedEngine) -> None:
        while True:
            served.append(len((await engine.generate([1, 2, 3], SAMPLING)).tokens))

    async def run() -> None:
        log, metrics, engine = await memory_log(), Metrics("explore"), ScriptedEngine(num_vocabulary=VOCABULARY)
        await engine.start()
        heard = TopicArrivals(log, POLICIES)
        behind = CachedStore(store, HostCache(tmp_path, max_bytes=10_000_000, metrics=metrics)) if cached else store
        follower = PolicyFollower(role_of("explore", FLOOR, log, behind, metrics=metrics), engine, slow_s=0.05)
        loops = [asyncio.create_task(one) for one in (follower.read(), follower.load(), heard.listen(), ask(engine))]
        async with running(*loops):
            await log.publish(POLICIES, events[1])
            await until(lambda: engine.version == 1)
            store.fault = fault
            await log.publish(POLICIES, events[2])
            await until(lambda: metrics.counters().get(told, 0) >= 1)
            if told == "policies_refused":
                await until(lambda: any(one.event == "refused" for one in heard.of(PolicyEvent)))
                assert all(one.version == 2 and one.reason for one in heard.of(PolicyEvent) if one.event == "refused")
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
    kept = [*(tmp_path / "objects").glob("*")]
    assert bool(kept) == cached
    assert all(path.name == content_name(path.read_bytes()) for path in kept), "nothing unfinished, nothing damaged"


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
    events, weights = published(store)
    room = [10**9]

    async def run() -> str:
        log, metrics = await memory_log(), Metrics("explore")
        engine = PassingEngine(VersionFiles([tmp_path], free=lambda place: room[0]))
        await engine.start()
        heard = TopicArrivals(log, POLICIES)
        follower = PolicyFollower(role_of("explore", FLOOR, log, store, metrics=metrics), engine)
        loops = [asyncio.create_task(one) for one in (follower.read(), follower.load(), heard.listen())]
        async with running(*loops):
            await log.publish(POLICIES, events[1])
            await until(lambda: engine.version == 1)
            room[0] = 1000
            await log.publish(POLICIES, events[2])
            await until(lambda: any(one.event == "refused" for one in heard.of(PolicyEvent)))
            assert engine.version == 1 and len((await engine.generate([1, 2, 3], SAMPLING)).tokens) == 6
            assert engine.tensors[TENSOR] == weights[1][TENSOR] and metrics.counters()["policies_refused"] == 2
            room[0] = 10**9
            await log.publish(POLICIES, events[3])
            await until(lambda: engine.version == 3)
            (reason,) = (one.reason for one in heard.of(PolicyEvent) if one.event == "refused")
            return str(reason)

    assert "give the container a larger /dev/shm" in asyncio.run(run())
    assert not [*tmp_path.glob("*/*.safetensors")]
