"""A stream worker without Faust: the drivers of all stages, fed and acknowledged as Faust's consumers do it.

Offsets are committed every half second, up to the first record that is not acknowledged; a rebalance retires what the
older generation holds, as `streams/stages/hosted.py` does.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from infra.log.bus import CommitRefused, Partition, Record
from infra.log.log import Log
from infra.observe.metrics import Metrics
from schemas.errors import BrokerUnavailable
from schemas.topics import EXPERIENCES, EXPERTS, TASKSET_RAW, VERIFIED, Topic
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.collect.snapshots import SnapshotPolicy
from streams.sources.source import build_sources, run_sources
from streams.stages.chain_builder import build_tasks
from streams.stages.driver import WindowDriver
from streams.stages.tasks_stage import TaskStage
from streams.stages.verify import Verifier
from streams.worker import rules_of
from tests.simulator.network import ClientReader
from tests.simulator.scenario import Scenario, chains

COMMIT_S = 0.5
SNAPSHOT_S, SNAPSHOT_RECORDS = 1.0, 10
STAGE_OF = {TASKSET_RAW.name: "tasks", EXPERIENCES.name: "verify", EXPERTS.name: "verify", VERIFIED.name: "collect"}


def group_of_topic(log: Log, topic: Topic) -> str:
    """The consumer group that reads a topic: one each, so that two topics of a stage rebalance apart."""
    return f"{log.group(STAGE_OF[topic.name])}.{topic.name}"


class Acknowledged:
    """What is acknowledged of one generation: per partition, offsets in the order they were delivered."""

    def __init__(self) -> None:
        self.delivered: dict[Partition, list[int]] = {}
        self.done: dict[Partition, set[int]] = {}

    def take(self, at: Partition, offset: int) -> None:
        """A record is handed out."""
        self.delivered.setdefault(at, []).append(offset)

    def finish(self, at: Partition, offset: int) -> None:
        """It was acknowledged."""
        self.done.setdefault(at, set()).add(offset)

    def nexts(self) -> dict[Partition, int]:
        """What may be committed."""
        found: dict[Partition, int] = {}
        for at, offsets in self.delivered.items():
            done = self.done.get(at, set())
            while offsets and offsets[0] in done:
                done.remove(offsets[0])
                found[at] = offsets.pop(0) + 1
        return found


class PlainDelivery:
    """A Delivery of one record of one generation."""

    def __init__(self, record: Record, generation: int, acknowledged: Acknowledged) -> None:
        self.record = record
        self.generation = generation
        self._acknowledged = acknowledged

    def acknowledge(self) -> None:
        """See Delivery."""
        self._acknowledged.finish(Partition(self.record.topic, self.record.partition), self.record.offset)

    def abandon(self) -> None:
        """See Delivery: it stays unacknowledged."""


async def consume(log: Log, topic: Topic, driver: WindowDriver | CollectDriver) -> None:
    """Feed a driver for ever."""
    reader = await log.bus.subscribed([log.name(topic)], group=group_of_topic(log, topic))
    assert isinstance(reader, ClientReader)
    generation, acknowledged = -1, Acknowledged()
    clock = asyncio.get_running_loop().time
    commit_at = clock() + COMMIT_S
    nexts: dict[Partition, int] = {}
    while True:
        try:
            records = await reader.get_many(timeout_s=max(0.05, commit_at - clock()), max_records=64)
        except BrokerUnavailable:
            continue
        if reader.generation != generation:
            driver.retire(generation)
            driver.abandon()
            generation, acknowledged, nexts = reader.generation, Acknowledged(), {}
            driver.assigned({partition.index for partition in reader.positions()}, generation)
        for record in records:
            acknowledged.take(Partition(record.topic, record.partition), record.offset)
            await driver.accept(PlainDelivery(record, generation, acknowledged))
        if clock() >= commit_at:
            commit_at = clock() + COMMIT_S
            nexts |= acknowledged.nexts()
            try:
                if nexts:
                    await reader.commit(nexts)
                nexts = {}
            except (CommitRefused, BrokerUnavailable):
                continue  # the next round commits, or finds what the rebalance has dealt


async def run_streams(scenario: Scenario, log: Log, metrics: Metrics, folder: Path, wall_ms: Callable[[], int]) -> None:
    """All stages and the feedback source of one worker."""
    verify_steps, collect_steps = chains(scenario.late, scenario.picky, bool(scenario.num_customers))
    sources = build_sources(scenario.streams.feedback, folder)

    async def committed(partition: int) -> int:
        offsets = await log.bus.committed(group_of_topic(log, VERIFIED), log.name(VERIFIED))
        return offsets.get(Partition(log.name(VERIFIED), partition), 0)

    async with asyncio.TaskGroup() as tasks:
        settings = CollectSettings(
            folder,
            rules_of(scenario.floor, scenario.streams),
            collect_steps,
            snapshots=SnapshotPolicy(SNAPSHOT_S, SNAPSHOT_RECORDS),
        )
        drivers: list[tuple[Topic, WindowDriver | CollectDriver]] = [
            (TASKSET_RAW, WindowDriver("tasks", TaskStage(build_tasks(scenario.streams), log), log, metrics, tasks)),
            (EXPERIENCES, WindowDriver("verify", Verifier(verify_steps), log, metrics, tasks)),
            (EXPERTS, WindowDriver("verify", Verifier(verify_steps), log, metrics, tasks)),
            (VERIFIED, CollectDriver(log, metrics, settings, committed, tasks, wall_ms=wall_ms)),
        ]
        for topic, driver in drivers:
            tasks.create_task(consume(log, topic, driver))
        tasks.create_task(run_sources(sources, log, metrics, folder))
