"""Measures the way of weights from the trainer to before an engine's pause, on bfloat16 weights made up for it.

Each version moves a share of the values by one ulp, as a step of reinforcement at a small learning rate does. What is timed
is what the roles call: the trainer's copy and its check, `publish` (a plain delta, every fifth one with a delta from the
anchor, an anchor), the explorer's `fetch` of one delta, its own check and comparison, and the file for the engine's workers.
The store is in memory, so no disk and no network is in it. Beside them stand the library safetensors (save and load of the
whole) and xor with zstd-1. CPU seconds are of all threads, per GB (10⁹ bytes) of weights. A stall is the longest time that
another thread, which asks for the interpreter every millisecond, had to wait beyond that millisecond.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from infra.cli.bench.peak import held_bytes, most_bytes
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import hash_tensor
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, bits, first_not_finite, from_torch, to_torch
from infra.store.memory import MemoryStore
from schemas import PolicyEvent

WIDTH = 4096
DELTA_AFTER = 5  # the version whose delta from the anchor is made too


class WeightsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. gb: bfloat16 weights. share: of the values that a version moves."""

    gb: float = 0.5
    share: float = 0.014


class Cost(msgspec.Struct):
    """Of one piece of work. stall_s: see the module."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    stall_s: float = 0.0


def run(plan: WeightsPlan, say: Callable[[str], None]) -> dict[str, float]:
    """The figures; `*_cpu_s_per_gb`, and what they add up to on both sides."""
    say(f"making up {plan.gb:g} GB of weights and {DELTA_AFTER + 1} versions of them")
    generator = np.random.default_rng(0)
    versions = [made_up(plan.gb, generator)]
    costs: dict[str, Cost] = {}
    store, events = MemoryStore(), []
    fetcher = PolicyFetcher(store, "main")
    full_gb = sum(one.num_bytes for one in versions[0].values()) / 1e9
    for version in range(DELTA_AFTER + 1):
        new = versions[-1] if version == 0 else moved(versions[-1], plan.share, generator)
        versions = [*versions[-1:], new]
        name = "publish_anchor" if version == 0 else "publish_fifth" if version == DELTA_AFTER else "publish_delta"
        with measured(costs, name):
            events.append(_publish(store, version, new, versions[0] if version else None))
        if version == 0:
            with measured(costs, "fetch_anchor"):
                fetcher.fetch(events[0])
        else:
            _engine_side(costs, fetcher, events[-1], versions[0])
        _trainer_side(costs, new)
        say(f"version {version}: {name} {costs[name].cpu_s / full_gb:.2f} CPU s per GB")
    del fetcher
    with measured(costs, "fetch_late"):
        late = PolicyFetcher(store, "main").fetch(events[-1])
    assert all(hash_tensor(late.tensors[name]) == hash_tensor(tensor) for name, tensor in versions[-1].items())
    say("the peers: safetensors, xor with zstd-1")
    _peers(costs, versions[0], versions[-1])
    return figures(costs, full_gb, events[1])


def figures(costs: Mapping[str, Cost], full_gb: float, event: PolicyEvent) -> dict[str, float]:
    """By name; seconds at 8B and 70B are computed from the wall seconds a GB here."""
    found: dict[str, float] = {"gb": full_gb, "full_over_delta": event.stats["full_bytes"] / event.stats["bytes"]}
    for name, cost in costs.items():
        found[f"{name}_cpu_s_per_gb"] = cost.cpu_s / full_gb
    trainer = ("trainer_copy", "trainer_check", "publish_delta")
    explorer = ("fetch_delta", "engine_check", "engine_file")
    for side, parts in (("trainer", trainer), ("explorer", explorer)):
        cpu_s, wall_s = (sum(getattr(costs[one], field) for one in parts) for field in ("cpu_s", "wall_s"))
        found[f"{side}_cpu_s_per_gb"] = cpu_s / full_gb
        found[f"{side}_wall_over_cpu"] = wall_s / cpu_s
        found[f"{side}_stall_ms"] = max(costs[one].stall_s for one in parts) * 1000
        for billions in (8, 70):
            found[f"{side}_s_computed_{billions}b"] = wall_s / full_gb * 2 * billions
    found["peak_gb_over_weights"] = (most_bytes() / 1e9) / full_gb
    return found


def made_up(gb: float, generator: np.random.Generator) -> dict[str, Tensor]:
    """Normal weights in bfloat16, matrices of WIDTH columns, 32 MiB each and one smaller."""
    rows_left = max(1, int(gb * 1e9 / 2 / WIDTH))
    tensors: dict[str, Tensor] = {}
    while rows_left:
        rows = min(rows_left, WIDTH)
        values = generator.standard_normal((rows, WIDTH), dtype=np.float32) * np.float32(0.02)
        patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
        tensors[f"layers.{len(tensors)}.weight"] = Tensor(
            "BF16", (rows, WIDTH), patterns.reshape(-1).view(np.uint8).data
        )
        rows_left -= rows
    return tensors


def moved(tensors: Mapping[str, Tensor], share: float, generator: np.random.Generator) -> dict[str, Tensor]:
    """The next version: a share of the values one ulp up or down."""
    following = {}
    for name, tensor in tensors.items():
        patterns = bits(tensor).copy()
        at = np.flatnonzero(generator.random(patterns.size, dtype=np.float32) < share)
        at = at[(patterns[at] & 0x7FFF) > 0]  # below zero's bits lie those of NaN
        patterns[at] += generator.choice(np.array([1, 0xFFFF], np.uint16), at.size)
        following[name] = Tensor("BF16", tensor.shape, patterns.view(np.uint8).data)
    return following


@contextmanager
def measured(costs: dict[str, Cost], name: str) -> Iterator[None]:
    """Adds what the block costs under a name; of several, what took the least CPU counts."""
    stop, worst = threading.Event(), [0.0]

    def ask() -> None:
        before = time.perf_counter()
        while not stop.wait(0.001):
            now = time.perf_counter()
            worst[0] = max(worst[0], now - before - 0.001)
            before = now

    watcher = threading.Thread(target=ask)
    watcher.start()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    try:
        yield
    finally:
        cost = Cost(time.process_time() - cpu_s, time.perf_counter() - wall_s)
        stop.set()
        watcher.join()
        cost.stall_s = worst[0]
        costs[name] = min(cost, costs.get(name, cost), key=lambda one: one.cpu_s)


def _publish(
    store: MemoryStore, version: int, tensors: Mapping[str, Tensor], previous: Mapping[str, Tensor] | None
) -> PolicyEvent:
    new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
    return publish(store, new, tensors, previous=previous, probe=None)


def _engine_side(
    costs: dict[str, Cost], fetcher: PolicyFetcher, event: PolicyEvent, held: Mapping[str, Tensor]
) -> None:
    from actors.engines.checks import changed_names, check_tensors
    from actors.engines.vllm.exchange import Exchange

    with measured(costs, "fetch_delta"):
        policy = fetcher.fetch(event)
    with measured(costs, "engine_check"):
        check_tensors(policy, {name: tensor.shape for name, tensor in policy.tensors.items()})
        changed_names(held, policy.tensors)
    exchange = Exchange()
    with measured(costs, "engine_file"):
        path = exchange.write(policy.tensors)
    exchange.discard(path)
    exchange.close()


def _trainer_side(costs: dict[str, Cost], tensors: Mapping[str, Tensor]) -> None:
    with measured(costs, "trainer_check"):
        assert not first_not_finite(tensors)
    parameters = {name: to_torch(tensor) for name, tensor in tensors.items()}
    with measured(costs, "trainer_copy"):
        for parameter in parameters.values():
            from_torch(parameter)
    held_bytes()


def _peers(costs: dict[str, Cost], old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    from safetensors.torch import load, save_file

    parameters = {name: to_torch(tensor) for name, tensor in new.items()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "model.safetensors"
        with measured(costs, "safetensors_save"):
            save_file(parameters, path)
        with measured(costs, "safetensors_load"):
            load(path.read_bytes())
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    with measured(costs, "xor_encode"):
        packed = {name: compressor.compress((bits(old[name]) ^ bits(new[name])).data) for name in new}
    with measured(costs, "xor_apply"):
        for name, body in packed.items():
            applied = np.frombuffer(decompressor.decompress(body), np.uint16) ^ bits(old[name])
            assert applied.size == bits(new[name]).size
