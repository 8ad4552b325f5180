"""A thousand damages to what was published, in front of an engine that serves: nothing of them is loaded, no request fails."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from actors.engines.engine import Sampling
from actors.engines.scripted import TENSOR, ScriptedEngine
from infra.observe.metrics import Metrics
from infra.policies.fetch import PolicyFetcher
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy
from infra.store.host_cache import CachedStore, HostCache
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import PolicyRefused

DAMAGES = 1000
NUM_VERSIONS = 20
VOCABULARY = 48
SAMPLING = Sampling(max_tokens=6, temperature=1.0, stop=())
Objects = dict[str, bytes]


def published() -> tuple[MemoryStore, list[PolicyEvent], list[dict[str, Tensor]]]:
    """Versions in deltas and slices, in shards of two tables' rows."""
    store = MemoryStore()
    generator = np.random.default_rng(5)
    table = generator.normal(size=(VOCABULARY, VOCABULARY)).astype(np.float16)
    other = np.zeros((4, 4), np.float16)
    events: list[PolicyEvent] = []
    weights: list[dict[str, Tensor]] = []
    for version in range(NUM_VERSIONS):
        tensors = {TENSOR: from_numpy(table), "other": from_numpy(other)}
        event = publish(
            store,
            NewVersion(policy="main", token=3, version=version, parent=version - 1, step=version),
            tensors,
            previous=weights[-1] if weights else None,
            probe=None,
            shard_bytes=4096,
        )
        events.append(event)
        weights.append(tensors)
        table, other = table.copy(), other + 1
        rows = generator.choice(VOCABULARY, 3, replace=False)
        table[rows] += 0.01
    return store, events, weights


def damaged(chosen: random.Random, objects: Objects) -> tuple[str, Objects]:
    """The objects with one or two of them truncated, flipped, reordered, exchanged or missing."""
    altered = dict(objects)
    kind = chosen.choice(("truncated", "flipped", "reordered", "exchanged", "missing", "extended"))
    for key in chosen.sample(sorted(altered), chosen.choice((1, 1, 2))):
        data = altered[key]
        if kind == "truncated":
            altered[key] = data[: chosen.randrange(len(data))]
        elif kind == "flipped":
            at = chosen.randrange(len(data))
            altered[key] = data[:at] + bytes([data[at] ^ 1 << chosen.randrange(8)]) + data[at + 1 :]
        elif kind == "reordered":
            one, two = sorted(chosen.sample(range(1, len(data)), 2))
            altered[key] = data[two:] + data[one:two] + data[:one]
        elif kind == "exchanged":
            other = chosen.choice(sorted(altered))
            altered[key], altered[other] = altered[other], data
        elif kind == "missing":
            del altered[key]
        else:
            altered[key] = data + chosen.randbytes(chosen.randint(1, 64))
        if kind == "exchanged":
            break
    return kind, altered


def stored(objects: Objects) -> MemoryStore:
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    return store


def cached(chosen: random.Random, store: MemoryStore, objects: Objects, folder: Path, metrics: Metrics) -> Store:
    """The store behind a cache that holds some of the objects, about half of them damaged like those of the store."""
    cache = HostCache(folder, max_bytes=10_000_000, metrics=metrics)
    (folder / "objects").mkdir(parents=True, exist_ok=True)
    weights = [key for key in sorted(objects) if "/manifests/" not in key]
    for key in weights:
        digest = Path(key).stem
        cache.drop(digest)
        if chosen.random() < 0.4:
            _, altered = damaged(
                chosen, {one: objects[one] for one in (key, chosen.choice(weights), weights[0], weights[1])}
            )
            (folder / "objects" / digest).write_bytes(altered.get(key, b""))
    return CachedStore(store, cache)


def test_a_thousand_damages_load_nothing_and_fail_no_request() -> None:
    outcomes = asyncio.run(serve_through_damages(lambda chosen, store, objects: store))
    assert min(outcomes.values()) >= 20, outcomes


def test_a_thousand_damages_load_nothing_and_fail_no_request_with_the_cache_damaged_too(tmp_path: Path) -> None:
    metrics = Metrics("follower")
    outcomes = asyncio.run(
        serve_through_damages(lambda chosen, store, objects: cached(chosen, store, objects, tmp_path, metrics))
    )
    assert min(outcomes.values()) >= 20, outcomes
    counts = metrics.counters()
    assert min(counts["host_cache_damaged"], counts["host_cache_hits"]) >= 50, counts
    assert "host_cache_skipped" not in counts


async def serve_through_damages(behind: Callable[[random.Random, MemoryStore, Objects], Store]) -> Counter[str]:
    """What became of each damage. behind: the store that is damaged → the one that is followed."""
    store, events, weights = published()
    objects = {key: store.get(key) for key in store.keys("")}
    kinds = {key.split("/")[3] for key in objects}
    assert kinds == {"anchors", "deltas", "manifests", "slices"}, "all ways to a version are there to be damaged"
    served = [{TENSOR: one[TENSOR]} for one in weights]
    chosen = random.Random(9)
    engine = ScriptedEngine(num_vocabulary=VOCABULARY)
    await engine.start()
    table = engine.tensors[TENSOR]
    outcomes: Counter[str] = Counter()
    for _ in range(DAMAGES):
        kind, altered = damaged(chosen, objects)
        version = chosen.randrange(1, NUM_VERSIONS)
        kept = behind(chosen, stored(altered), objects)
        follower = PolicyFetcher(kept, "main")
        if chosen.random() < 0.5:  # one that follows step by step holds the version before
            before = NewVersion(policy="main", token=4, version=version - 1, parent=-1, step=version - 1)
            follower.fetch(publish(kept, before, weights[version - 1], previous=None, probe=None))
        held = follower.version
        request = asyncio.create_task(engine.generate([1, 2, 3], SAMPLING))
        await asyncio.sleep(0)
        try:
            policy = follower.fetch(events[version])
        except PolicyRefused:
            outcomes[kind] += 1
            assert follower.version == held
        else:
            assert dict(policy.tensors) == weights[version], f"{kind}: altered weights passed for version {version}"
            outcomes["not needed"] += 1
        assert len((await request).tokens) == SAMPLING.max_tokens
        assert engine.tensors[TENSOR] == table
        if chosen.random() < 0.05:  # what verifies is loaded, so that the server is seen to follow
            good = PolicyFetcher(store, "main").fetch(events[version])
            await engine.load(replace(good, tensors=served[version], touched=frozenset({TENSOR})))
            table = engine.tensors[TENSOR]
            assert table == weights[version][TENSOR]
    await engine.close()
    assert sum(outcomes.values()) == DAMAGES
    assert len(outcomes) == 7
    return outcomes
