"""The host memory that engines of one machine take for weights: of their processes, and of the files in memory they share.

Each follows a store in a folder through the cache of the machine, as `headrace explore` does, but for the model itself: it
fetches the first version, then the next one, and checks it while it still holds both. The first holds both as long as the
second works, as in a reload of both.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from infra.observe.metrics import Metrics
from infra.policies.fetch import PolicyFetcher
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor
from infra.policies.version_files import VersionFiles
from infra.store.directory import DirectoryStore
from infra.store.host_cache import CachedStore, HostCache
from schemas import PolicyEvent

POLL_S = 0.002


def engine_memory(first: Mapping[str, Tensor], second: Mapping[str, Tensor], folder: Path) -> dict[str, float]:
    """Times the weights: what the first engine of a machine takes at most, and by how much a second one raises that. Looked
    at every two milliseconds.
    """
    store, events = DirectoryStore(folder / "store"), []
    for version, (tensors, previous) in enumerate(((first, None), (second, first))):
        new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
        events.append(publish(store, new, tensors, previous=previous, probe=None))
    full_bytes = sum(tensor.num_bytes for tensor in first.values())
    with _engine(folder, events) as one:
        peak = _peak_bytes(folder, [one])
        with _engine(folder, events) as other:
            more = _peak_bytes(folder, [one, other])
    return {"engine_peak_over_weights": peak / full_bytes, "second_engine_peak_over_weights": more / full_bytes}


class FollowerProcess:
    """A process that follows. Begins at a message."""

    def __init__(self, process: multiprocessing.context.SpawnProcess, pipe: Connection) -> None:
        self.pipe = pipe
        self._status = Path(f"/proc/{process.pid}/status")

    def own_bytes(self) -> int:
        """Memory of the process that no file has."""
        lines = self._status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def _engine(folder: Path, events: list[PolicyEvent]) -> Iterator[FollowerProcess]:
    """One that is ready, and holds what it fetched until the `with` ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_follow, args=(folder, events, theirs))
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield FollowerProcess(process, ours)
    finally:
        ours.close()
        process.join()


def _peak_bytes(folder: Path, engines: list[FollowerProcess]) -> int:
    """The most that all hold above what they hold now, while the last one works."""

    def held() -> int:
        files = sum(path.stat().st_blocks * 512 for path in _place(folder).glob("*/*"))
        return files + sum(engine.own_bytes() for engine in engines)

    before = most = held()
    working = engines[-1].pipe
    working.send("begin")
    while not working.poll(POLL_S):
        most = max(most, held())
    working.recv()
    return max(most, held()) - before


def _follow(folder: Path, events: list[PolicyEvent], pipe: Connection) -> None:
    """Fetch both versions, say so, and hold them until the other end is closed."""
    from actors.engines.checks import changed_names, check_tensors

    cache = HostCache(folder / "cache", max_bytes=2**40, metrics=Metrics("bench"), left_free=0.0)
    _place(folder).mkdir(exist_ok=True)
    files = VersionFiles([_place(folder)])
    fetcher = PolicyFetcher(CachedStore(DirectoryStore(folder / "store"), cache), "main", files)
    pipe.send("ready")
    pipe.recv()
    held: list[Mapping[str, Tensor]] = [{}]
    for event in events:
        policy = fetcher.fetch(event)
        check_tensors(policy, {name: tensor.shape for name, tensor in policy.tensors.items()})
        changed_names(held[-1], policy.tensors)
        held.append(policy.tensors)
    pipe.send("done")
    try:
        pipe.recv()
    except EOFError:
        held.clear()


def _place(folder: Path) -> Path:
    """Where the versions' files are; it takes the place of /dev/shm, so that no other engine of this machine is counted."""
    return folder / "memory"


def in_a_folder(measure: Callable[[Path], dict[str, float]]) -> dict[str, float]:
    """What is measured with a folder that goes afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder))
