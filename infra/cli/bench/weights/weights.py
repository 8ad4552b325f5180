"""Measures the way of weights from the trainer to before an engine's pause, on bfloat16 weights made up for it.

Each version moves a share of the values by one ulp, as a step of reinforcement at a small learning rate does. What is timed
is what the roles call, at some versions of a run: the trainer's copy, its check and `publish`; the explorer's `fetch` into
a file for the engine's workers, its own check and comparison. An explorer follows step by step, one sleeps from one of those
versions to the next, others join at the last of them, and one reads the anchor through the cache of its machine. The store is a
folder in memory, so no disk and no network is in it. torch has one thread and the allocator gives large blocks back, as in a
trainer of several ranks. Beside them stand the library safetensors (save and load of the whole) and xor with zstd-1. CPU
seconds are of all threads but the one that watches, per GB (10⁹ bytes) of weights. Wall over CPU is of the version that took
the least wall for its CPU; beside it is the number of cores that other processes took meanwhile. A stall is the longest time
that another thread, which asks for the interpreter every millisecond, had to wait beyond that millisecond, in all that a side
does, the anchor and joining too.
"""

import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from infra.cli.bench.common.peak import held_bytes
from infra.cli.bench.weights.memory import engine_memory, in_a_folder
from infra.observe.metrics import Metrics
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import hash_tensor
from infra.policies.policy import Policy
from infra.policies.prune import prune
from infra.policies.publish import NewVersion, publish
from infra.policies.share import HashedTensors
from infra.policies.tensors import Tensor, bits, from_torch_all, to_torch
from infra.policies.version_files import VersionFiles
from infra.roles.memory import give_back_large_blocks
from infra.store.directory import DirectoryStore
from infra.store.host_cache import CachedStore, HostCache
from infra.store.rooms import Rooms
from infra.store.store import Store
from schemas import PolicyEvent

WIDTH = 4096
KEPT = 15  # versions that the store keeps, and what they are rebuilt from
TRAINER = ("trainer_copy", "trainer_check", "publish")
EXPLORER = ("fetch", "engine_check")
NEAR = 3  # versions in a row that are measured: what a machine does besides is in each of them
SHM = "/dev/shm"


class WeightsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. gb: bfloat16 weights. share: of the values that a version moves. versions: at which, ascending, and at
    the two after each: the least counts, as it does of the first version and of who comes late, each three times. memory: of
    engines too.
    """

    gb: float = 0.5
    share: float = 0.014
    versions: tuple[int, ...] = (1, 5, 20, 50)
    memory: bool = True


class Cost(msgspec.Struct):
    """Of one piece of work. cpu_s, wall_s: of all its threads. stall_s: see the module. others_s: CPU seconds of other
    processes meanwhile.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0
    stall_s: float = 0.0
    others_s: float = 0.0


def run(plan: WeightsPlan, say: Callable[[str], None]) -> dict[str, float]:
    """The figures: CPU seconds a GB of both sides at each version, of those who come late, of the peers, and what follows."""
    import torch

    torch.set_num_threads(1)
    give_back_large_blocks()
    say(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores before anything is done")
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        costs, versions, first_event = _followed(DirectoryStore(Path(folder)), plan, say)
    memory: dict[str, float] = {}
    if plan.memory:
        say("the memory of two engines, in processes of their own")
        memory = in_a_folder(lambda folder: engine_memory(versions[0], versions[1], folder))
    say("the peers: safetensors, xor with zstd-1")
    _peers(costs, versions[0], versions[1])
    full_gb = sum(one.num_bytes for one in versions[0].values()) / 1e9
    say(f"load average {os.getloadavg()[0]:.1f} at the end, this included")
    return figures(costs, full_gb, first_event, plan) | memory


def _followed(
    store: Store, plan: WeightsPlan, say: Callable[[str], None]
) -> tuple[dict[str, Cost], list[HashedTensors], PolicyEvent]:
    """What both sides cost at each version, the last two versions, and the event of the first that was measured."""
    say(f"making up {plan.gb:g} GB of weights and {plan.versions[-1]} versions of them")
    generator = np.random.default_rng(0)
    costs: dict[str, Cost] = {}
    for _ in range(NEAR - 1):
        with tempfile.TemporaryDirectory(dir=SHM) as spare:
            _trainer_side(costs, "_v0", DirectoryStore(Path(spare)), 0, made_up(plan.gb, generator), None, Rooms())
    steady = _explorer(store)
    rooms = Rooms()
    event, *versions = _trainer_side(costs, "_v0", store, 0, made_up(plan.gb, generator), None, rooms)
    full_gb = sum(one.num_bytes for one in versions[0].values()) / 1e9
    asleep = steady.fetch(event)  # what those hold who sleep
    first_event = slept_since = event
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        _from_cache(costs, store, Path(folder), event)
    near = {version + more: version for version in reversed(plan.versions) for more in range(NEAR)}
    for version in range(1, plan.versions[-1] + NEAR):
        versions = versions[-1:]  # the one before goes before the next is made
        before, following = versions[0], moved(versions[0], plan.share, generator)
        prune(store, "main", oldest=version - 1 - KEPT)
        if version not in near:
            versions = [before, HashedTensors(following)]
            following.clear()
            steady.fetch(_publish(store, version, versions[1], before))
            continue
        event, after = _trainer_side(costs, f"_v{near[version]}", store, version, following, before, rooms)
        versions = [before, after]
        _engine_side(costs, f"_v{near[version]}", steady, event, versions[0])
        if version == plan.versions[0]:
            first_event = event
        elif version in plan.versions:
            end = f"_behind_{version - slept_since.version}"
            asleep = _late(costs, end, store, event, versions[0], slept_since, asleep.tensors)
            slept_since = event
        said = ", ".join(
            f"{_summed(costs, f'_v{near[version]}', pieces, full_gb)} {what}"
            for what, pieces in (("to publish", TRAINER), ("before the pause", EXPLORER))
        )
        say(f"version {version}: {said}")
    del steady, asleep
    late = _late(costs, "_joining", store, event, versions[1])
    assert all(hash_tensor(late.tensors[name]) == hash_tensor(tensor) for name, tensor in versions[1].items())
    return costs, versions, first_event


def figures(costs: Mapping[str, Cost], full_gb: float, event: PolicyEvent, plan: WeightsPlan) -> dict[str, float]:
    """By name; seconds at 8B and 70B are computed from the wall seconds a GB here."""
    found: dict[str, float] = {"gb": full_gb, "full_over_delta": event.stats["full_bytes"] / event.stats["bytes"]}
    ends = [f"_v{version}" for version in plan.versions]
    later = [name.removeprefix("fetch") for name in costs if name.startswith("fetch_behind_")]
    sums = {f"trainer{end}": [one + end for one in TRAINER] for end in ("_v0", *ends)}
    sums |= {f"explorer{end}": [one + end for one in EXPLORER] for end in (*ends, *later, "_joining")}
    for name, parts in sums.items():
        found[f"{name}_cpu_s_per_gb"] = sum(costs[one].cpu_s for one in parts) / full_gb
    for one in (*TRAINER, *EXPLORER):  # of which the sums are, at the version that cost least
        found[f"{one}_cpu_s_per_gb"] = min(costs[one + end].cpu_s for end in ends) / full_gb
    for name in ("cached_anchor", "safetensors_save", "safetensors_load", "xor_encode", "xor_apply"):
        found[f"{name}_cpu_s_per_gb"] = costs[name].cpu_s / full_gb
    for side, pieces in (("trainer", TRAINER), ("explorer", EXPLORER)):
        sums_of = [_sum([costs[one + end] for one in pieces]) for end in ends]
        quiet = min(sums_of, key=lambda one: one.wall_s / one.cpu_s)
        found[f"{side}_wall_over_cpu"] = quiet.wall_s / quiet.cpu_s
        found[f"{side}_cores_others_took"] = quiet.others_s / quiet.wall_s
        wall_s = min(one.wall_s for one in sums_of)
        found[f"{side}_stall_ms"] = max(costs[name].stall_s for name in costs if name.startswith(pieces)) * 1000
        for billions in (8, 70):
            found[f"{side}_s_computed_{billions}b"] = wall_s / full_gb * 2 * billions
    return found


def _sum(costs: list[Cost]) -> Cost:
    return Cost(
        cpu_s=sum(one.cpu_s for one in costs),
        wall_s=sum(one.wall_s for one in costs),
        stall_s=max(one.stall_s for one in costs),
        others_s=sum(one.others_s for one in costs),
    )


def _summed(costs: Mapping[str, Cost], end: str, pieces: Sequence[str], full_gb: float) -> str:
    one = _sum([costs[name + end] for name in pieces])
    return f"{one.cpu_s / full_gb:.2f} CPU s per GB, wall {one.wall_s / one.cpu_s:.2f} of it"


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
        gaps = generator.geometric(share, int(1.2 * share * patterns.size) + 100)
        at = np.cumsum(gaps) - 1
        at = at[at < patterns.size]
        at = at[(patterns[at] & 0x7FFF) > 0]  # below zero's bits lie those of NaN
        patterns[at] += generator.choice(np.array([1, 0xFFFF], np.uint16), at.size)
        following[name] = Tensor("BF16", tensor.shape, patterns.view(np.uint8).data)
    return following


def take_memory(tensors: Mapping[str, Tensor]) -> None:
    """Hold as much memory as the weights for a moment: a virtual machine may have to be given it first."""
    np.full(sum(tensor.num_bytes for tensor in tensors.values()), 1, np.uint8)


def busy_cpu_s() -> float:
    """CPU seconds of all processes of the machine since its start, to a hundredth."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def measured(costs: dict[str, Cost], name: str) -> Iterator[None]:
    """Notes what the block costs under a name; of several, what took the least CPU counts."""
    stop, worst, own_s = threading.Event(), [0.0], [0.0]

    def ask() -> None:
        before = time.perf_counter()
        while not stop.wait(0.001):
            now = time.perf_counter()
            worst[0] = max(worst[0], now - before - 0.001)
            before = now
        own_s[0] = time.thread_time()

    watcher = threading.Thread(target=ask)
    watcher.start()
    busy_s, cpu_s, wall_s = busy_cpu_s(), time.process_time(), time.perf_counter()
    try:
        yield
    finally:
        cost = Cost(time.process_time() - cpu_s, time.perf_counter() - wall_s)
        cost.others_s = max(0.0, busy_cpu_s() - busy_s - cost.cpu_s)
        stop.set()
        watcher.join()
        cost.cpu_s -= own_s[0]
        cost.stall_s = worst[0]
        costs[name] = min(cost, costs.get(name, cost), key=lambda one: one.cpu_s)


def _trainer_side(
    costs: dict[str, Cost],
    end: str,
    store: Store,
    version: int,
    tensors: dict[str, Tensor],
    previous: HashedTensors | None,
    rooms: Rooms,
) -> tuple[PolicyEvent, HashedTensors]:
    """Copy, look for what is not finite, publish; the event and the copy. `tensors` is emptied: one copy less is held. rooms:
    of the learner, for its copies.
    """
    take_memory(tensors)
    parameters = {name: to_torch(tensors.pop(name)) for name in [*tensors]}
    with measured(costs, f"trainer_copy{end}"):
        copied = HashedTensors(from_torch_all(parameters, rooms))
    with measured(costs, f"trainer_check{end}"):
        assert not copied.not_finite
    del parameters
    held_bytes()
    with measured(costs, f"publish{end}"):
        return _publish(store, version, copied, previous), copied


def _publish(store: Store, version: int, tensors: HashedTensors, previous: HashedTensors | None) -> PolicyEvent:
    new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
    return publish(store, new, tensors, previous=previous, probe=None)


def _engine_side(
    costs: dict[str, Cost], end: str, fetcher: PolicyFetcher, event: PolicyEvent, held: Mapping[str, Tensor]
) -> Policy:
    from actors.engines.checks import changed_names, check_tensors

    take_memory(held)
    with measured(costs, f"fetch{end}"):
        policy = fetcher.fetch(event)
    with measured(costs, f"engine_check{end}"):
        check_tensors(policy, {name: tensor.shape for name, tensor in policy.tensors.items()})
        changed_names(held, policy.tensors)
    return policy


def _late(
    costs: dict[str, Cost],
    end: str,
    store: Store,
    event: PolicyEvent,
    before: Mapping[str, Tensor],
    slept_since: PolicyEvent | None = None,
    asleep: Mapping[str, Tensor] | None = None,
) -> Policy:
    """The newest version: by one explorer after the other that holds nothing; or by one that holds what is `asleep`, and still
    has the room of a version before that.
    """
    explorer = _explorer(store)
    for left in reversed(range(NEAR)):
        if slept_since is not None and asleep is not None:
            explorer.adopt(slept_since, asleep)
        else:
            explorer = _explorer(store)
        policy = _engine_side(costs, end, explorer, event, before)
        if not left:
            return policy
        del policy  # one version less is held
    raise AssertionError("unreachable: the last one returns")


def _explorer(store: Store) -> PolicyFetcher:
    """One that is alone on its machine. Its folder goes with it, and its files with their tensors."""
    place = tempfile.TemporaryDirectory(dir=SHM, ignore_cleanup_errors=True)
    fetcher = PolicyFetcher(store, "main", VersionFiles([Path(place.name)]))
    weakref.finalize(fetcher, place.cleanup)
    return fetcher


def _from_cache(costs: dict[str, Cost], store: Store, folder: Path, event: PolicyEvent) -> None:
    """The anchor, by the second who reads it on a machine."""
    metrics = Metrics("bench")
    cached = CachedStore(store, HostCache(folder, max_bytes=2**40, metrics=metrics, left_free=0.0))
    PolicyFetcher(cached, "main").fetch(event)
    for _ in range(NEAR):
        with measured(costs, "cached_anchor"):
            PolicyFetcher(cached, "main").fetch(event)
    assert metrics.counters()["host_cache_hits"], "there was no room to keep it"


def _peers(costs: dict[str, Cost], old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    from safetensors.torch import load, save_file

    parameters = {name: to_torch(tensor) for name, tensor in new.items()}
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
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
