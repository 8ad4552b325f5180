"""Measures what each role reads at its start, over logs in memory that grow: reports of other roles, and groups that ended.

    as before     reports lie in `progress`, as older writers put them, and the master has no snapshot
    without       reports lie in `reports`, no snapshot
    snapshot      with the snapshot that a master before has left

CPU seconds of this process, from the first read to the first report. Reports come 35 a second, those of 70 roles; a broker
adds 20 to 25 µs to each record that is read from it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from actors.config import MasterConfig
from actors.master.master import run_master
from infra.cli.look.newest import newest, newest_reports
from infra.ledger.audit import audit
from infra.log.bus import Partition, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.log.reports import lately
from infra.observe.metrics import Metrics
from infra.roles.role import Role
from infra.settings.config import Floor, Pacing
from infra.store.memory import MemoryStore
from schemas import Closure, Directive, Drawn, Issued, Message, PolicyEvent, Progress, Task, encode, kafka_headers
from schemas.topics import POLICIES, PROGRESS, REPORTS, TASKS, TASKSET, Topic

APP = "bench"
GAP_MS = 1000 // 35
GROUPS = 1_000  # that ended, where reports grow
NUM_TASKS = 500
REPORT = Progress(
    role="explore", instance="explore/host/1", life="working",
    counters={f"counter_{number}": 1000.0 * number for number in range(16)},
    gauges={f"gauge_{number}": 0.5 * number for number in range(16)},
)  # fmt: skip


def run(*, counts: tuple[int, ...] = (10_000, 100_000, 1_000_000)) -> dict[str, float]:
    """CPU seconds by what was read, and how much of it there was."""
    figures: dict[str, float] = {}
    for count in counts:
        figures |= asyncio.run(_over_reports(count))
    for count in counts:
        figures |= asyncio.run(_over_groups(count))
    return figures


async def _over_reports(count: int) -> dict[str, float]:
    name = f"{count}_reports"
    before, log, store = await log_of_groups(GROUPS), await log_of_groups(GROUPS), MemoryStore()
    store_records(before, PROGRESS, [REPORT] * count)
    store_records(log, REPORTS, [REPORT] * count)
    figures = {f"{name}_master_as_before": await master_start(before, MemoryStore())}
    figures[f"{name}_master_without"] = await master_start(log, store)
    figures[f"{name}_master_snapshot"] = await master_start(log, store)
    for role, act in READERS.items():
        figures[f"{name}_{role}"] = await cpu_s(lambda: act(log))  # noqa: B023
    return figures


async def _over_groups(count: int) -> dict[str, float]:
    log, store = await log_of_groups(count), MemoryStore()
    name = f"{count}_groups_master"
    return {f"{name}_without": await master_start(log, store), f"{name}_snapshot": await master_start(log, store)}


async def _trainer(log: Log) -> None:
    """What a trainer reads beside its checkpoint."""
    async for _ in log.scan(REPORTS, await lately(log)):
        pass
    async for _ in log.read_all(POLICIES):
        pass


async def _policies(log: Log) -> None:
    """What an explorer and a gateway read."""
    async for _ in log.read_all(POLICIES):
        pass


async def _status(log: Log) -> None:
    await newest_reports(partial(newest, log), 2000)


async def _audit(log: Log) -> None:
    await audit(log, APP)


READERS: dict[str, Callable[[Log], Coroutine[None, None, None]]] = {
    "trainer": _trainer, "explorer_gateway": _policies, "status": _status, "audit": _audit
}  # fmt: skip


async def master_start(log: Log, store: MemoryStore) -> float:
    """CPU seconds until it reports, and a snapshot of its state lies in the store."""
    floor = Floor(app=APP, pacing=Pacing(groups_per_step=8))
    metrics, stop = Metrics("master"), asyncio.Event()
    role = Role(floor=floor, log=log, store=store, metrics=metrics, stop=stop, instance="master/bench")

    async def begin() -> None:
        running = asyncio.create_task(run_master(role, MasterConfig(num_episodes=2)))
        while not metrics.counters().get("master_snapshots{result=written}"):  # noqa: ASYNC110 - written in a thread
            await asyncio.sleep(0.005)
        stop.set()
        await running

    return await cpu_s(begin)


async def cpu_s(act: Callable[[], Coroutine[None, None, None]]) -> float:
    """Of this process, while it acts."""
    began_s = time.process_time()
    await act()
    return time.process_time() - began_s


async def log_of_groups(groups: int, bus: MemoryBus | None = None) -> Log:
    """A log in which so many groups were issued, closed and drawn."""
    log = Log(bus or MemoryBus(), APP)
    await log.create_topics(partitions=1, keep_ms=-1)
    await log.publish(POLICIES, Directive(order="lease", owner="first"))
    tasks = [Task(id=f"t{number}", messages=(Message(role="user", content="1+1="),)) for number in range(NUM_TASKS)]
    await log.publish_all(TASKSET, tasks)
    issued = [
        Issued(group=_group(number), attempt=0, num_episodes=2, max_tokens=4, sequence=number)
        for number in range(groups)
    ]
    store_records(log, TASKS, [Task(id=tasks[0].id, messages=tasks[0].messages, issued=one) for one in issued])
    closed = (Closure(group=one.group, outcome="buffered", sequence=one.sequence, mean_reward=0.5) for one in issued)
    steps = (
        Drawn(token=1, step=at // 8, version=0, groups=tuple(one.group for one in issued[at : at + 8]))
        for at in range(0, groups, 8)
    )
    ended: list[Closure | Drawn] = [*closed, *steps]
    store_records(log, PROGRESS, ended)
    return log


def _group(number: int) -> str:
    return f"t{number % NUM_TASKS}.{number // NUM_TASKS}"


def store_records(log: Log, topic: Topic, records: Sequence[Task | Progress | Closure | Drawn | PolicyEvent]) -> None:
    """Make a topic of these records, at the rate of reports and up to now, behind what it holds."""
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
