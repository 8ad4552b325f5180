"""The host memory that engines of one machine take for weights, in processes of their own, beside the measured file of workers.

Each follows a store in a folder through the cache of the machine, as `headrace explore` does, but for the model itself: it
fetches the first version, then the next one, checks it, and writes the file for the workers while it still holds both.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from infra.cli.bench.peak import held_bytes, peak_bytes
from infra.observe.metrics import Metrics
from infra.policies.fetch import PolicyFetcher
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor
from infra.store.cached import CachedStore
from infra.store.directory import DirectoryStore
from infra.store.host_cache import HostCache
from schemas import PolicyEvent


def engine_memory(first: Mapping[str, Tensor], second: Mapping[str, Tensor], folder: Path) -> dict[str, float]:
    """Times the weights: what the first engine of a machine takes at most, and by how much a second one raises that."""
    store, events = DirectoryStore(folder / "store"), []
    for version, (tensors, previous) in enumerate(((first, None), (second, first))):
        new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
        events.append(publish(store, new, tensors, previous=previous, probe=None))
    full_bytes = sum(tensor.num_bytes for tensor in first.values())
    return {
        f"{name}_peak_over_weights": _of_another_process(folder, events) / full_bytes
        for name in ("engine", "second_engine")
    }


def _of_another_process(folder: Path, events: list[PolicyEvent]) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_follow, args=(folder, events, theirs))
    process.start()
    theirs.close()
    try:
        return float(ours.recv())
    finally:
        process.join()


def _follow(folder: Path, events: list[PolicyEvent], told: Connection) -> None:
    """Say the most bytes above what the process holds before it begins, its file for the workers included."""
    from actors.engines.checks import changed_names, check_tensors
    from actors.engines.vllm.exchange import Exchange

    cache = HostCache(folder / "cache", max_bytes=2**40, metrics=Metrics("bench"), left_free=0.0)
    fetcher = PolicyFetcher(CachedStore(DirectoryStore(folder / "store"), cache), "main")
    files: list[int] = []

    def work() -> None:
        exchange = Exchange()
        held: Mapping[str, Tensor] = {}
        for event in events:
            policy = fetcher.fetch(event)
            check_tensors(policy, {name: tensor.shape for name, tensor in policy.tensors.items()})
            changed_names(held, policy.tensors)
            path = exchange.write(policy.tensors)
            files.append(path.stat().st_size)
            exchange.discard(path)
            held = policy.tensors
        exchange.close()

    held_bytes()
    told.send(peak_bytes(work, "cpu") + max(files))
    told.close()


def in_a_folder(measure: Callable[[Path], dict[str, float]]) -> dict[str, float]:
    """What is measured with a folder that goes afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder))
