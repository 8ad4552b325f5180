"""Logs in memory as an app leaves them after some days, and what a role reads of them at its start."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from actors.config import MasterConfig
from actors.engines.reload import PolicyFollower
from actors.engines.scripted import ScriptedEngine
from actors.master.master import run_master
from infra.log.bus import Partition, Reader, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus, MemoryReader, wall_ms
from infra.observe.metrics import Metrics
from infra.policies.beginning import write_summary
from infra.policies.fold import PoliciesFold
from infra.roles.role import Role
from infra.settings.config import Floor, Pacing
from infra.store.memory import MemoryStore
from infra.store.snapshots import Refused, SnapshotManifest, candidates
from infra.store.store import Store, digest_of, name_of
from schemas import (
    Block,
    Closure,
    Control,
    Directive,
    Drawn,
    Issued,
    Message,
    PolicyEvent,
    Progress,
    Task,
    encode,
    kafka_headers,
)
from schemas.topics import POLICIES, PROGRESS, TASKS, TASKSET, Topic
from trainer.buffer.buffer import Buffer
from trainer.buffer.intake import Intake, hear_directives
from trainer.loop.publication import SUMMARIZE_EVERY
from trainer.replay.resume import read_policies

APP = "bench"
GAP_MS = 1000 // 35  # between reports of 70 roles
NUM_TASKS = 500
REPORT = Progress(
    role="explore", instance="explore/host/1", life="working",
    counters={f"counter_{number}": 1000.0 * number for number in range(16)},
    gauges={f"gauge_{number}": 0.5 * number for number in range(16)},
)  # fmt: skip


class CountingBus(MemoryBus):
    """A bus that counts what is read from it. read: records by topic."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, int] = {}

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        return _CountingReader(self, dict(starts), group=group)


class _CountingReader(MemoryReader):
    def __init__(self, bus: CountingBus, starts: dict[Partition, int], *, group: str | None) -> None:
        super().__init__(bus, starts, group=group)
        self._counted = bus.read

    async def get_many(self, *, timeout_s: float, max_records: int = 500) -> list[Record]:
        records = await super().get_many(timeout_s=timeout_s, max_records=max_records)
        for record in records:
            self._counted[record.topic] = self._counted.get(record.topic, 0) + 1
        return records


def summarize(log: Log) -> None:
    """Store the summaries that a trainer would have written of a log in memory."""
    bus, fold, since = log.bus, PoliciesFold(), 0
    assert isinstance(bus, MemoryBus) and log.store is not None
    for record in bus.log(Partition(log.name(POLICIES), 0)).records:
        message = log.decode(record)
        is_version = isinstance(message.value, PolicyEvent) and message.value.event == "published"
        if is_version and record.offset - since >= SUMMARIZE_EVERY:
            write_summary(log.store, log.app, fold.summary())
            since = record.offset
        fold.take(message)


def store_records(log: Log, topic: Topic, records: Sequence[Block | Control]) -> None:
    """Append these records to a topic, at the rate of reports and up to now."""
    bus = log.bus
    assert isinstance(bus, MemoryBus)
    held = list(bus.log(Partition(log.name(topic), 0)).records)
    first = len(held)
    frames: dict[int, bytes] = {}  # the same record many times is one frame
    start_ms = wall_ms() - GAP_MS * len(records)
    for number, record in enumerate(records, first):
        frame = frames.get(id(record)) or frames.setdefault(id(record), encode(record))
        at_ms = start_ms + GAP_MS * (number - first)
        held.append(Record(log.name(topic), 0, number, at_ms, b"", frame, kafka_headers(record)))
    bus.restore(log.name(topic), held)


async def log_of_groups(groups: int, bus: MemoryBus | None = None, store: MemoryStore | None = None) -> Log:
    """A log in which so many groups were issued, closed and drawn."""
    log = Log(bus or MemoryBus(), APP, store=store or MemoryStore())
    await log.create_topics(partitions=1, keep_ms=-1)
    await log.publish(POLICIES, Directive(order="lease", owner="first"))
    tasks = [Task(id=f"t{number}", messages=(Message(role="user", content="1+1="),)) for number in range(NUM_TASKS)]
    await log.publish_all(TASKSET, tasks)
    issued = [
        Issued(
            group=f"t{at % NUM_TASKS}.{at // NUM_TASKS}", attempt=0, num_episodes=2, max_tokens=4, sequence=at
        )
        for at in range(groups)
    ]  # fmt: skip
    store_records(log, TASKS, [Task(id=tasks[0].id, messages=tasks[0].messages, issued=each) for each in issued])
    ended: list[Closure | Drawn] = [
        Closure(group=each.group, outcome="buffered", sequence=each.sequence, mean_reward=0.5) for each in issued
    ]
    ended += [
        Drawn(token=1, step=at // 8, version=0, groups=tuple(each.group for each in issued[at : at + 8]))
        for at in range(0, groups, 8)
    ]
    store_records(log, PROGRESS, ended)
    return log


def store_versions(log: Log, count: int) -> None:
    """Publish so many versions, each followed by a word of the gate, and the summaries of a trainer."""
    said = []
    for version in range(count):
        stats = {f"name_{number}": 0.5 for number in range(12)}
        manifest = f"policies/main/{0:012d}/manifests/{version:012d}.json"
        said += [
            PolicyEvent(
                event="published", policy="main", version=version, step=version, manifest=manifest, stats=stats
            ),
            PolicyEvent(event="held", policy="main", version=version, channel="stable", owner="ann", stats=stats),
        ]
    store_records(log, POLICIES, said)
    summarize(log)


async def start_master(log: Log, store: MemoryStore) -> None:
    """Run a master until it reports and a snapshot of its state lies in the store."""
    metrics, stop = Metrics("master"), asyncio.Event()
    floor = Floor(app=APP, pacing=Pacing(groups_per_step=8))
    role = Role(floor=floor, log=log, store=store, metrics=metrics, stop=stop, instance="master/bench")
    running = asyncio.create_task(run_master(role, MasterConfig(num_episodes=2)))
    while not metrics.counters().get("master_snapshots{result=written}"):  # noqa: ASYNC110 - written in a thread
        await asyncio.sleep(0.005)
    stop.set()
    await running


async def start_trainer(log: Log, version: int) -> None:
    """Read what a trainer reads beside its checkpoint, which is of this version, and beside its journal."""
    _, past = await read_policies(log, "main", version)
    await hear_directives(log, Intake(Buffer({}), buffer_next=0, progress_next=0, clock=time.monotonic), past)


async def start_engine(log: Log, store: MemoryStore) -> None:
    """Read what an explorer and a gateway read before they load a version."""
    metrics, stop = Metrics("explore"), asyncio.Event()
    role = Role(floor=Floor(app=APP), log=log, store=store, metrics=metrics, stop=stop, instance="explore/1")
    follower = PolicyFollower(role, ScriptedEngine())
    reading = asyncio.create_task(follower.read())
    await follower.caught_up.wait()
    reading.cancel()
    await asyncio.wait([reading])


async def cpu_s(act: Callable[[], Awaitable[object]]) -> float:
    """CPU seconds of this process while it acts."""
    began_s = time.process_time()
    await act()
    return time.process_time() - began_s


def content_name(data: bytes) -> str:
    """Name of an object of these bytes."""
    return name_of(digest_of((data,)))


def newest(store: Store, series: str, refused: Refused) -> SnapshotManifest | None:
    """The newest whole snapshot."""
    return next(candidates(store, series, refused), None)
