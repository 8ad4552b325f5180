"""The Faust worker: one Faust app per stage, each feeding a driver that does not know Faust.

Guarantees: at least once. Faust delivers, keeps the group's place and nothing else: it decodes nothing, produces
nothing and keeps no table. A record is acknowledged by its driver, after what it led to is confirmed; offsets that were
trimmed stop the worker instead of being skipped. Nothing escapes an agent.

    faust (fetch, rebalance) ─> agent ─> WindowDriver (tasks, verify) or CollectDriver (collect) ─> infra.bus ─> log
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import faust
from faust.exceptions import ConsumerNotStarted

from infra.bus.bus import Partition, Record
from infra.bus.kafka import KafkaBus
from infra.bus.log import Log
from infra.claimed import ClaimedFolder
from infra.config import Floor
from infra.deadline import ends_within
from infra.metrics import Metrics
from infra.store import Store
from schemas import Progress
from schemas.topics import EXPERIENCES, EXPERTS, MAX_RECORD_BYTES, PROGRESS, TASKSET_RAW, VERIFIED, Topic
from streams.chain_builder import build_collect, build_tasks, build_verify
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.companion import companions
from streams.config import StreamsConfig
from streams.driver import WindowDriver
from streams.source import build_sources, run_sources
from streams.stage import Delivery, causes, end_crashed, end_for
from streams.tasks_stage import TaskStage
from streams.verify import Verifier
from streams.worker import (
    Held,
    instance_name,
    quieten_clients,
    report,
    rules_of,
    watch,
)

logger = logging.getLogger(__name__)

StageName = Literal["tasks", "verify", "collect"]
ALL_STAGES: tuple[StageName, ...] = ("tasks", "verify", "collect")
STOPPED = "stopped"
START_S = 120.0
STOP_S = 30.0
END_S = 60.0  # of all stages together, whatever Faust does
DRAIN_S = 5.0
POLL_S = 0.1
STUCK_S = 180.0


class Driver(Protocol):
    """What an agent hands its records to."""

    async def accept(self, delivery: Delivery) -> None: ...

    def num_in_flight(self) -> int: ...

    def marks(self) -> dict[int, int]: ...

    async def finish(self) -> None: ...


class OrderedEvent(faust.Event):  # type: ignore[misc]
    """An event that only its driver acknowledges: Faust itself also acks what it skips during a rebalance."""

    released = False

    def ack(self) -> bool:
        return bool(super().ack()) if self.released else False


class FaustDelivery:
    """A Delivery of a Faust event."""

    __slots__ = ("_app", "_event", "generation", "record")

    def __init__(self, app: faust.App, event: Any) -> None:
        message = event.message
        self._app = app
        self._event = event
        self.generation: int = message.generation_id
        self.record = Record(
            topic=message.topic,
            partition=message.partition,
            offset=message.offset,
            timestamp_ms=round(message.timestamp * 1000),
            key=message.key or b"",
            value=message.value or b"",
            headers=tuple(message.headers or ()),
        )

    def acknowledge(self) -> None:
        self._event.released = True
        self._event.ack()

    def abandon(self) -> None:
        self._app.consumer.unacked.discard(self._event.message)


class HostedStage:
    """One Faust app with an agent per topic. chain: the steps of the stage, as `status` shows them."""

    def __init__(self, log: Log, bootstrap: str, stage: StageName, folder: Path, chain: str) -> None:
        self.stage = stage
        self.chain = chain
        self.group = log.group(stage)
        self.drivers: dict[str, Driver] = {}
        self._log = log
        self._generation = -1
        self._assigned_in = -1  # the rebalance that ended in the assignment we hold
        self.app = faust.App(
            self.group,
            broker=[f"kafka://{address.strip()}" for address in bootstrap.split(",")],
            datadir=_made(folder / "faust"),
            store="memory://",
            Event=OrderedEvent,
            autodiscover=False,
            web_enabled=False,
            topic_disable_leader=True,
            topic_allow_declare=False,
            table_standby_replicas=0,
            stream_wait_empty=True,
            stream_buffer_maxsize=256,
            stream_processing_timeout=24 * 3600.0,  # the watchdog of worker.py looks at this
            producer_acks=-1,
            producer_max_request_size=MAX_RECORD_BYTES,
            consumer_max_fetch_size=MAX_RECORD_BYTES,
            consumer_auto_offset_reset="none",
            broker_commit_interval=0.5,
            broker_commit_livelock_soft_timeout=24 * 3600.0,
            broker_session_timeout=10.0,
            broker_heartbeat_interval=1.0,
            broker_request_timeout=30.0,
            broker_max_poll_interval=600.0,
        )

    def add(self, topic: Topic, driver: Driver) -> None:
        """Hand the records of `topic` to `driver`."""
        name = self._log.name(topic)
        self.drivers[name] = driver
        source = self.app.topic(
            name, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw", internal=False
        )

        async def consume(stream: Any) -> None:
            try:
                async for event in _events(stream):
                    await driver.accept(FaustDelivery(self.app, event))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                end_for(error, f"{self.stage}: agent of {name}")

        self.app.agent(source, name=f"{self.stage}.{topic.name}")(consume)

    async def start(self) -> None:
        """Commit the beginning where the group has no place yet, then join it."""
        for name in self.drivers:
            await self._log.bus.commit_beginnings(self.group, name)
        self.app.on_partitions_assigned.connect(self._on_assigned)
        async with asyncio.timeout(START_S):
            await self.app.start()

    async def stop(self) -> None:
        """Finish what is in flight, commit and leave the group; what takes longer than STOP_S is delivered again."""
        if not self.app.started:
            return
        abandoning = asyncio.create_task(self._abandon_late(STOP_S / 2))
        try:
            async with asyncio.timeout(STOP_S):
                await self.app.stop()
        except TimeoutError:
            logger.warning("stop_slow stage=%s", self.stage)
        finally:
            abandoning.cancel()

    async def guard(self) -> None:
        """Watch the app until cancelled: a rebalance must not hang on slow records, a crash ends the process."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.app.crashed or self.app.should_stop:
                end_crashed(self.stage, self.app.crash_reason)
            if self._is_revoking():
                await self._let_go()

    def assignment(self) -> dict[str, set[int]]:
        """Partitions this worker holds, by topic."""
        found: dict[str, set[int]] = {name: set() for name in self.drivers}
        try:
            assigned = self.app.consumer.assignment()
        except ConsumerNotStarted:  # Faust says "started" before the thread of its consumer has begun
            assigned = ()
        for partition in assigned:
            found.setdefault(partition.topic, set()).add(partition.partition)
        return found

    def partitions(self) -> tuple[int, ...]:
        """Those this worker holds of any of the stage's topics; none before it has joined."""
        return tuple(sorted(set().union(*self.assignment().values()))) if self.app.started else ()

    def _is_revoking(self) -> bool:
        """Whether what we hold is being taken away: a rebalance has begun and has not assigned anything yet."""
        return bool(self.app.rebalancing) and self.app.rebalancing_count != self._assigned_in

    async def _let_go(self) -> None:
        since_s = time.monotonic()
        while self._is_revoking():
            for driver in self.drivers.values():
                if isinstance(driver, CollectDriver):
                    driver.retire(self._generation)
            if time.monotonic() - since_s > DRAIN_S:
                self._abandon()
            await asyncio.sleep(POLL_S)

    async def _abandon_late(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._abandon()

    def _abandon(self) -> None:
        for driver in self.drivers.values():
            if isinstance(driver, WindowDriver):
                driver.abandon()

    async def _on_assigned(self, app: Any, assigned: set[Any], **_: object) -> None:
        self._generation, self._assigned_in = self.app.consumer_generation_id, self.app.rebalancing_count
        for name, driver in self.drivers.items():
            if isinstance(driver, CollectDriver):
                indexes = {partition.partition for partition in assigned if partition.topic == name}
                driver.assigned(indexes, self._generation)


def _made(folder: Path) -> Path:
    """The folder, there: Faust makes only the last part of a path."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _events(stream: Any) -> AsyncIterable[Any]:
    """Events that only the driver acknowledges."""
    events: AsyncIterable[Any] = stream.noack().events()
    return events


async def run_worker(
    floor: Floor,
    config: StreamsConfig,
    *,
    bootstrap: str,
    store: Store | None,
    metrics: Metrics,
    stop: asyncio.Event,
    stages: Sequence[StageName] = ALL_STAGES,
    state_folder: Path | None = None,
    stuck_s: float = STUCK_S,
) -> None:
    """Host `stages` until `stop` is set. The topics must exist.

    state_folder: where workers of this machine keep their state files, by default `state` beside the TOML.
    Raises ConfigError for settings that cannot hold, BrokerUnavailable naming the address.
    """
    quieten_clients()
    task_steps, verify_steps, collect_steps = (
        build_tasks(config),
        build_verify(config),
        build_collect(config, floor.model_path),
    )
    sources = build_sources(config.feedback, floor.folder, config.verify.redact)
    folder = ClaimedFolder(state_folder or floor.folder / "state")
    bus = KafkaBus(bootstrap, deadline_s=floor.kafka.deadline_s)
    log = Log(bus, floor.app, store=store)
    try:
        await bus.start()
        await log.require_topics()
        async with asyncio.TaskGroup() as tasks:

            def hosted(stage: StageName) -> HostedStage:
                steps = {"tasks": task_steps, "verify": verify_steps, "collect": collect_steps}[stage]
                host = HostedStage(log, bootstrap, stage, folder.path, " ".join(step.stamp for step in steps))
                if stage == "tasks":
                    host.add(TASKSET_RAW, WindowDriver(stage, TaskStage(task_steps, log), log, metrics, tasks))
                elif stage == "verify":
                    for topic in (EXPERIENCES, EXPERTS):
                        host.add(topic, WindowDriver(stage, Verifier(verify_steps), log, metrics, tasks))
                else:
                    settings = CollectSettings(folder.path, rules_of(floor, config), collect_steps)
                    host.add(VERIFIED, CollectDriver(log, metrics, settings, _committed(log, host.group), tasks))
                return host

            hosts = [hosted(stage) for stage in stages]
            listening = tasks.create_task(run_sources(sources, log, metrics, folder.path))
            beside = [
                tasks.create_task(one.accompany(log, metrics)) for one in companions([*verify_steps, *collect_steps])
            ]
            try:
                await _host(hosts, log, metrics, instance_name(folder.path), stop, stuck_s)
            finally:
                for task in (listening, *beside):
                    task.cancel()
    except BaseExceptionGroup as errors:
        raise causes(errors)[0] from errors
    finally:
        await bus.close()
        folder.release()


async def _host(
    hosts: Sequence[HostedStage], log: Log, metrics: Metrics, instance: str, stop: asyncio.Event, stuck_s: float
) -> None:
    """Start, watch, stop."""
    state = ["starting"]
    metrics.check("worker", lambda: "" if state[0] == "running" else state[0])
    async with asyncio.TaskGroup() as around:
        watchers = [around.create_task(report(log, lambda: _progress(hosts, metrics, instance, state[0])))]
        try:
            async with asyncio.TaskGroup() as starting:
                for host in hosts:
                    starting.create_task(host.start())
            watchers += [around.create_task(host.guard()) for host in hosts]
            watchers.append(around.create_task(watch(log, lambda: _held(hosts), metrics, stuck_s)))
            state[0] = "running"
            logger.info("worker_ready instance=%s stages=%s", instance, ",".join(host.stage for host in hosts))
            await stop.wait()
        finally:
            state[0] = STOPPED
            # A broker that has gone leaves Faust waiting for acknowledgements that never come, deaf to cancellation.
            with ends_within("the stop of the stages", END_S):
                for watcher in watchers:
                    watcher.cancel()
                for host in hosts:
                    await host.stop()
                    for driver in host.drivers.values():
                        await driver.finish()
    await log.publish(PROGRESS, _progress(hosts, metrics, instance, state[0]))


def _progress(hosts: Sequence[HostedStage], metrics: Metrics, instance: str, state: str) -> Progress:
    """How this worker is doing; sets the gauges that are read, not counted."""
    for host in hosts:
        for driver in host.drivers.values():
            if isinstance(driver, CollectDriver):
                metrics.gauge("groups_pending").set(driver.num_open())
        in_flight = sum(driver.num_in_flight() for driver in host.drivers.values())
        metrics.gauge("records_in_flight", stage=host.stage).set(in_flight)
    return Progress(
        role="process",
        instance=instance,
        counters=metrics.counters(),
        gauges=metrics.gauges(),
        state=state,
        chains={host.stage: host.chain for host in hosts},
        partitions={} if state == STOPPED else {host.stage: host.partitions() for host in hosts},
    )


def _held(hosts: Sequence[HostedStage]) -> list[Held]:
    """For the watchdog: what this worker holds of each topic."""
    return [
        Held(topic=name, group=host.group, partitions=partitions, marks=host.drivers[name].marks())
        for host in hosts
        for name, partitions in host.assignment().items()
        if name in host.drivers
    ]


def _committed(log: Log, group: str) -> Callable[[int], Any]:
    """Next offset of a partition of `verified`, as the group has it."""
    topic = log.name(VERIFIED)

    async def committed(partition: int) -> int:
        return (await log.bus.committed(group, topic)).get(Partition(topic, partition), 0)

    return committed
