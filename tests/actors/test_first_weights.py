"""What a follower begins with, and what it keeps: the engine's model folder, and the copy from before a refusal."""

import asyncio
from collections.abc import Mapping
from functools import partial

import msgspec
import numpy as np

from actors.engines.engine import LoadReport
from actors.engines.reload import PolicyFollower
from actors.engines.scripted import TENSOR, ScriptedEngine
from infra.observe.metrics import Metrics
from infra.policies.policy import Policy
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import PolicyRefused
from schemas.topics import POLICIES
from tests.actors.rig import FLOOR, TopicArrivals, memory_log, running, until
from tests.infra.weights.test_fetch import Counting
from tests.role import role_of

VOCABULARY = 48


class FolderEngine(ScriptedEngine):
    """One that began with a folder of these weights, and refuses some versions."""

    def __init__(self, folder: Mapping[str, Tensor] | None = None, refused: tuple[int, ...] = ()) -> None:
        super().__init__(num_vocabulary=VOCABULARY)
        self._folder = folder or {}
        self._refused_versions = refused
        self.asked = 0

    def folder_weights(self) -> Mapping[str, Tensor]:
        self.asked += 1
        return self._folder

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


def is_decided(engine: FolderEngine, heard: TopicArrivals, version: int) -> bool:
    """Whether a version serves or was given up."""
    told = [one.version for one in heard.of(PolicyEvent) if one.event == "refused"]
    return engine.version == version or version in told


async def follow(store: Store, engine: FolderEngine, steps: list[tuple[list[PolicyEvent], int]]) -> Metrics:
    """Tell these events, a few at a time, each time until the engine serves that version."""
    log, metrics = await memory_log(), Metrics("explore")
    await engine.start()
    follower = PolicyFollower(role_of("explore", FLOOR, log, store, metrics=metrics), engine)
    heard = TopicArrivals(log, POLICIES)
    for event in steps[0][0]:
        await log.publish(POLICIES, event)
    loops = [asyncio.create_task(one) for one in (follower.read(), follower.load(), heard.listen())]
    async with running(*loops):
        await until(lambda: engine.version == steps[0][1])
        for events, version in steps[1:]:
            for event in events:
                await log.publish(POLICIES, event)
                await until(partial(is_decided, engine, heard, event.version))
            assert engine.version == version
    await engine.close()
    return metrics


def test_a_first_start_reads_what_changed_since_the_folder_alone() -> None:
    store = Counting()
    events, weights = published(store)
    store.read.clear()
    engine = FolderEngine(weights[0])
    asyncio.run(follow(store, engine, [(events[:4], 3), (events[4:], 4)]))
    assert engine.tensors[TENSOR] == weights[4][TENSOR] and engine.asked == 1
    assert {one.partition("/")[0] for one in folders_of(store.read)} == {"deltas"}


def test_where_the_folder_is_another_model_the_anchor_is_read() -> None:
    store = Counting()
    events, weights = published(store)
    store.read.clear()
    engine = FolderEngine(weights[2])
    asyncio.run(follow(store, engine, [(events[:4], 3)]))
    assert engine.tensors[TENSOR] == weights[3][TENSOR]
    assert "anchors/0" in folders_of(store.read)


def test_a_folder_is_not_asked_for_where_version_0_is_not_known() -> None:
    store = Counting()
    events, weights = published(store)
    engine = FolderEngine(weights[0])
    asyncio.run(follow(store, engine, [(events[1:4], 3)]))
    assert engine.tensors[TENSOR] == weights[3][TENSOR] and not engine.asked


def test_after_a_version_whose_objects_were_refused_the_next_reads_deltas_alone() -> None:
    store = Counting()
    events, weights = published(store)
    bad = PolicyEvent(event="published", policy="main", version=2, parent=1, token=3, manifest=events[2].manifest,
                      manifest_sha256="0" * 64)  # fmt: skip
    engine = FolderEngine()

    async def run() -> None:
        metrics = await follow(store, engine, [(events[1:2], 1), ([bad, events[3]], 3)])
        assert metrics.counters()["policies_refused"] == 2

    store.read.clear()
    asyncio.run(run())
    assert engine.tensors[TENSOR] == weights[3][TENSOR]
    assert folders_of(store.read) == {"anchors/0", "deltas/0-1", "deltas/1-2", "deltas/2-3"}
    assert sum("/anchors/" in key for key in store.read) == 1, "the held copy was thrown away"


def test_after_a_version_that_the_engine_refused_the_next_reads_its_delta_alone() -> None:
    store = Counting()
    events, weights = published(store)
    engine = FolderEngine(refused=(2,))
    store.read.clear()
    asyncio.run(follow(store, engine, [(events[1:2], 1), (events[2:4], 3)]))
    assert engine.tensors[TENSOR] == weights[3][TENSOR]
    objects = [key for key in store.read if "/manifests/" not in key]
    assert len(objects) == len(set(objects)), "an object was read again"


class AnyEngine(FolderEngine):
    """One that takes versions of other tensors than it held."""

    async def load(self, policy: Policy) -> LoadReport:
        return await super().load(msgspec.structs.replace(policy, tensors={TENSOR: policy.tensors[TENSOR]}))


def test_a_version_of_other_tensors_than_the_held_one_is_taken_by_who_looks_anew() -> None:
    store = MemoryStore()
    events, _ = published(store, 2)
    table = from_numpy(np.zeros((VOCABULARY, VOCABULARY), np.float32))
    new = NewVersion(policy="main", token=9, version=2, parent=1, step=2)
    event = publish(store, new, {TENSOR: table, "more": table}, previous=None, probe=None)
    engine = AnyEngine()
    metrics = asyncio.run(follow(store, engine, [(events[1:], 1), ([event], 2)]))
    assert metrics.counters()["policies_refused"] == 1 and engine.tensors[TENSOR] == table
