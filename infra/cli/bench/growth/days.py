"""Measures what roles read at their start over a log as retention leaves it after one day and after thirty.

Counted are the records that are read, and CPU seconds. The log lies in memory and holds what a start depends on: groups that
were issued, closed and drawn, tasks, an hour of reports, and what is said of each version. Of answers there are `answers` a
day, which stand for a million: a master continues from its snapshot, and the other two do not read their records. Versions
come one each STEP_S seconds, and the gate says a word about each. A broker adds 20 to 25 µs to each record that is read from
it. Collect is measured by `headrace bench takeover`: it continues from what was stored, on any day.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from actors.engines.reload import PolicyFollower
from actors.engines.scripted import ScriptedEngine
from infra.cli.bench.growth.starts import APP, REPORT, log_of_groups, master_start, store_records
from infra.log.bus import Partition, Reader, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus, MemoryReader
from infra.observe.metrics import Metrics
from infra.policies.fold import PoliciesFold
from infra.policies.summary import HEADER, packed
from infra.roles.role import Role
from infra.settings.config import Floor
from infra.store.memory import MemoryStore
from schemas import PolicyEvent
from schemas.topics import POLICIES, REPORTS
from trainer.buffer.buffer import Buffer
from trainer.buffer.intake import Intake, hear_directives
from trainer.loop.publication import SUMMARIZE_EVERY
from trainer.replay.resume import read_policies

STEP_S = 30
CHECKPOINT_VERSIONS = 20  # as trainer.checkpoint_every is by default
REPORTS_AN_HOUR = 10_000


class CountingBus(MemoryBus):
    """A bus that counts what is read from it. read: records by topic."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, int] = {}

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        """See Bus."""
        return _Counting(self, dict(starts), group=group)


class _Counting(MemoryReader):
    """A reader of a CountingBus."""

    def __init__(self, bus: CountingBus, starts: dict[Partition, int], *, group: str | None) -> None:
        super().__init__(bus, starts, group=group)
        self._counted = bus.read

    async def get_many(self, *, timeout_s: float, max_records: int = 500, topic: str | None = None) -> list[Record]:
        """See Reader."""
        records = await super().get_many(timeout_s=timeout_s, max_records=max_records, topic=topic)
        for record in records:
            self._counted[record.topic] = self._counted.get(record.topic, 0) + 1
        return records


def run(
    *, answers: int = 10_000, versions: int = 86_400 // STEP_S, days: tuple[int, ...] = (1, 30)
) -> dict[str, float]:
    """Records read and CPU seconds by day and role; `answers` and `versions` a day."""
    figures: dict[str, float] = {}
    for day in days:
        figures |= asyncio.run(_start_of(day, answers, versions))
    return figures


async def _start_of(day: int, answers: int, versions: int) -> dict[str, float]:
    bus, store = CountingBus(), MemoryStore()
    log = await log_of_groups(answers * day, bus)
    said: list[PolicyEvent] = []
    for version in range(versions * day):
        stats = {f"name_{number}": 0.5 for number in range(12)}
        name = f"policies/main/{0:012d}/manifests/{version:012d}.json"
        said.append(
            PolicyEvent(event="published", policy="main", version=version, step=version, manifest=name, stats=stats)
        )
        said.append(
            PolicyEvent(event="held", policy="main", version=version, channel="stable", owner="ann", stats=stats)
        )
    store_records(log, POLICIES, said)
    summarize(log)
    store_records(log, REPORTS, [REPORT] * REPORTS_AN_HOUR)
    await master_start(log, store)  # leaves a snapshot, as the master before has
    figures: dict[str, float] = {}
    roles: dict[str, Callable[[], Awaitable[object]]] = {
        "master": lambda: master_start(log, store),
        "trainer": lambda: _trainer(log, versions * day - 1 - CHECKPOINT_VERSIONS),
        "engine": lambda: _engine(log, store),
    }
    for role, start in roles.items():
        bus.read.clear()
        began_s = time.process_time()
        await start()
        figures[f"day_{day}_{role}_s"] = time.process_time() - began_s
        figures[f"day_{day}_{role}_records"] = float(sum(bus.read.values()))
        figures[f"day_{day}_{role}_of_policies"] = float(bus.read.get(log.name(POLICIES), 0))
    return figures


def summarize(log: Log) -> None:
    """Give versions of a log in memory the header that a trainer would have given them."""
    bus, fold, since = log.bus, PoliciesFold(), 0
    assert isinstance(bus, MemoryBus)
    records = bus.log(Partition(log.name(POLICIES), 0)).records
    for place, record in enumerate(records):
        message = log.decode(record)
        is_version = isinstance(message.value, PolicyEvent) and message.value.event == "published"
        if is_version and record.offset - since >= SUMMARIZE_EVERY:
            header = (HEADER, packed(fold.summary()))
            records[place] = msgspec.structs.replace(record, headers=(*record.headers, header))
            since = record.offset
        fold.take(message)


async def _trainer(log: Log, version: int) -> None:
    """What a trainer reads beside its checkpoint, which is of this version, and what was journaled since."""
    _, past = await read_policies(log, "main", version)
    await hear_directives(log, Intake(Buffer({}), buffer_next=0, progress_next=0, clock=time.monotonic), past)


async def _engine(log: Log, store: MemoryStore) -> None:
    """What an explorer and a gateway read before they load a version."""
    metrics = Metrics("explore")
    role = Role(floor=Floor(app=APP), log=log, store=store, metrics=metrics, stop=asyncio.Event(), instance="explore/1")
    follower = PolicyFollower(role, ScriptedEngine())
    reading = asyncio.create_task(follower.read())
    await follower.caught_up.wait()
    reading.cancel()
    await asyncio.wait([reading])
