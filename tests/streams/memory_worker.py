"""A stream worker on the memory log: the drivers of `streams/hosted.py`, fed by group readers instead of Faust."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from infra.log.bus import Partition, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.settings.config import Floor
from schemas.topics import EXPERIENCES, EXPERTS, TASKSET_RAW, VERIFIED, Topic
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.collect.rules import collect_rules
from streams.config import StreamsConfig
from streams.stages.chain_builder import build_collect, build_tasks, build_verify
from streams.stages.driver import WindowDriver
from streams.stages.tasks_stage import TaskStage
from streams.stages.verify import Verifier

STAGES: tuple[tuple[Topic, str], ...] = (
    (TASKSET_RAW, "tasks"), (EXPERIENCES, "verify"), (EXPERTS, "verify"), (VERIFIED, "collect"),
)  # fmt: skip


class GroupDelivery:
    """A Delivery that commits for its group while the group has not rebalanced."""

    def __init__(self, bus: MemoryBus, group: str, record: Record, generation: int) -> None:
        self.record = record
        self.generation = generation
        self._bus = bus
        self._group = group

    def acknowledge(self) -> None:
        group = self._bus.group(self._group)
        if group.generation == self.generation:
            group.committed[Partition(self.record.topic, self.record.partition)] = self.record.offset + 1

    def abandon(self) -> None:
        """It stays uncommitted."""


async def work(log: Log, config: StreamsConfig, folder: Path, *, limit: int = 64, model: str = "") -> None:
    """Tasks, verify and collect until cancelled; a cancelled worker is one that was killed."""
    metrics = Metrics("process")
    async with asyncio.TaskGroup() as tasks:
        for topic, stage in STAGES:
            if stage == "collect":
                settings = CollectSettings(
                    folder, collect_rules(Floor(app=log.app), config), build_collect(config, model)
                )
                group, name = log.group(stage), log.name(topic)

                async def committed(partition: int, group: str = group, name: str = name) -> int:
                    return (await log.bus.committed(group, name)).get(Partition(name, partition), 0)

                driver: Any = CollectDriver(log, metrics, settings, committed, tasks)
            else:
                made = TaskStage(build_tasks(config)) if stage == "tasks" else Verifier(build_verify(config, model))
                driver = WindowDriver(stage, made, log, metrics, tasks, limit=limit)
            tasks.create_task(_feed(log, topic, f"{stage}", driver))


async def _feed(log: Log, topic: Topic, stage: str, driver: Any) -> None:
    bus = log.bus
    assert isinstance(bus, MemoryBus)
    name = log.group(stage)
    reader = await log.subscribed(topic, group=stage)
    held = -1
    try:
        while True:
            records = await reader.get_many(timeout_s=0.2, max_records=16)
            generation = bus.group(name).generation
            if generation != held:
                driver.retire(held)
                held = generation
                driver.assigned({at.index for at in reader.positions()}, generation)
            for record in records:
                if bus.group(name).generation == generation:
                    await driver.accept(GroupDelivery(bus, name, record, generation))
    finally:
        await reader.close()


@asynccontextmanager
async def working(log: Log, config: StreamsConfig, folder: Path) -> AsyncIterator[asyncio.Task[None]]:
    """A worker for the length of a block."""
    worker = asyncio.create_task(work(log, config, folder))
    try:
        yield worker
    finally:
        await kill(worker)


async def kill(worker: asyncio.Task[None]) -> None:
    """End a worker wherever it stands."""
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)


async def settled(log: Log, *, quiet_rounds: int = 4) -> None:
    """Until all stages have committed all there is, and nothing comes any more."""
    calm, before = 0, -1
    async with asyncio.timeout(60):
        while calm < quiet_rounds:
            lag, total = 0, 0
            for topic, stage in STAGES:
                ends = await log.bus.end_offsets(log.name(topic))
                done = await log.bus.committed(log.group(stage), log.name(topic))
                lag += sum(end - done.get(at, 0) for at, end in ends.items())
                total += sum(ends.values())
            calm = calm + 1 if lag == 0 and total == before else 0
            before = total
            await asyncio.sleep(0.05)
