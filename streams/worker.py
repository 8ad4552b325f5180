"""The Faust worker: one Faust app per stage, each feeding a driver that does not know Faust; its reports, and the watchdog that
ends it when stuck.

Guarantees: at least once. A driver acknowledges a record after the record's outputs are confirmed. A worker ends within
END_S of a signal, or of an error, in any state of its broker.

    faust (fetch, rebalance) ─> agent ─> WindowDriver (tasks, verify) or CollectDriver (collect) ─> infra.log ─> log
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from infra.chain.chain import Step
from infra.log.bus import Partition, RecordPosition
from infra.log.log import Log
from infra.log.memory import wall_ms
from infra.observe.metrics import Metrics
from infra.observe.release import full_release
from infra.roles.process import EXIT_STUCK, ClaimedFolder, ends_within
from infra.roles.role import Role
from schemas import FeedbackWait, Progress
from schemas.errors import BrokerUnavailable, causes
from schemas.topics import EXPERIENCES, EXPERTS, REPORTS, TASKSET_RAW, VERIFIED
from streams.collect.collector import CollectSettings
from streams.collect.inbox import CollectDriver
from streams.collect.rules import collect_rules
from streams.collect.snapshots import SnapshotPolicy
from streams.config import StreamsConfig
from streams.hosted import BrokerLogin, HostedStage, StageName
from streams.sources.source import build_sources, run_sources
from streams.stages.chain_builder import build_collect, build_tasks, build_verify
from streams.stages.driver import WindowDriver
from streams.stages.stage import EXIT_BROKER, end_process
from streams.stages.tasks_stage import TaskStage
from streams.stages.verify import Verifier

logger = logging.getLogger(__name__)

ALL_STAGES: tuple[StageName, ...] = ("tasks", "verify", "collect")
RUNNING, STOPPED = "running", "stopped"
END_S = 60.0  # of all stages together, in any state of Faust
STUCK_S = 180.0
Steps = dict[StageName, tuple[Step, ...]]
REPORT_S = 2.0
WATCH_S = 5.0
REPEAT_S = 10.0
SLACK_MS = 5_000  # a clock that is off by less changes nothing
CLIENT_LOGGERS = (
    "faust", "mode", "aiokafka", "aiokafka.cluster", "aiokafka.conn", "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator", "aiokafka.producer.sender",
)  # fmt: skip


class LogTime:
    """wall_ms: the machine's clock."""

    def __init__(self, wall_ms: Callable[[], int] = wall_ms) -> None:
        self._wall_ms = wall_ms
        self._off_ms = 0

    def now_ms(self) -> int:
        return self._wall_ms() - self._off_ms

    async def hear(self, storing: Awaitable[RecordPosition]) -> None:
        """Store a record and look when the broker says that it was: between the two moments, where this clock is right."""
        before_ms = self._wall_ms()
        stored_ms = (await storing).timestamp_ms
        off_ms = max(0, before_ms - stored_ms) or min(0, self._wall_ms() - stored_ms)
        off_ms = off_ms if abs(off_ms) > SLACK_MS else 0
        if bool(off_ms) != bool(self._off_ms):
            logger.warning("clock_off seconds=%d: stages go by the broker's clock", off_ms // 1000)
        self._off_ms = off_ms


class HeldTopic(NamedTuple):
    """A topic (full name) of which a worker holds partitions; marks: per partition, a number that changes with work on it."""

    topic: str
    group: str
    partitions: set[int]
    marks: dict[int, int]


async def run_worker(
    role: Role, config: StreamsConfig, login: BrokerLogin, *, stages: Sequence[StageName] = ALL_STAGES
) -> None:
    """Host `stages` until the role is stopped. The topics must exist.

    login: where Faust finds the brokers of the role's log.
    Raises ConfigError for settings that cannot hold, BrokerUnavailable naming the address.
    """
    quieten_clients()
    floor, log, metrics = role.floor, role.log, role.metrics
    steps: Steps = {
        "tasks": build_tasks(config),
        "verify": build_verify(config, floor.model_path),
        "collect": build_collect(config, floor.model_path),
    }
    sources = build_sources(config.feedback, floor.folder, config.verify.redact)
    folder = ClaimedFolder(floor.folder / "state")
    try:
        async with asyncio.TaskGroup() as tasks:
            hosts, log_time = [], LogTime()
            for stage in stages:
                chain = " ".join(step.stamp for step in steps[stage])
                hosts.append(HostedStage(log, login, stage, folder.path, chain))
                snapshots = SnapshotPolicy(config.collect.snapshot_s, config.collect.snapshot_records)
                settings = CollectSettings(
                    folder.path, collect_rules(floor, config), steps["collect"], snapshots=snapshots
                )
                _feed(hosts[-1], role, tasks, steps, settings, log_time)
            listening = tasks.create_task(run_sources(sources, log, metrics, folder.path.parent))
            try:
                await _host(hosts, role, log_time)
            finally:
                listening.cancel()
    except BaseExceptionGroup as errors:
        raise causes(errors)[0] from errors
    finally:
        folder.release()


def _feed(
    host: HostedStage, role: Role, tasks: asyncio.TaskGroup, steps: Steps, settings: CollectSettings, log_time: LogTime
) -> None:
    log, metrics = role.log, role.metrics
    if host.stage == "tasks":
        host.add(TASKSET_RAW, WindowDriver("tasks", TaskStage(steps["tasks"]), log, metrics, tasks))
    elif host.stage == "verify":
        for topic in (EXPERIENCES, EXPERTS):
            host.add(topic, WindowDriver("verify", Verifier(steps["verify"]), log, metrics, tasks))
    else:
        committed = _committed(log, host.group)
        host.add(VERIFIED, CollectDriver(log, metrics, settings, committed, tasks, wall_ms=log_time.now_ms))


async def _host(hosts: Sequence[HostedStage], role: Role, log_time: LogTime) -> None:
    log, metrics, instance, stop = role.log, role.metrics, role.instance, role.stop
    state = ["starting"]
    metrics.check("worker", lambda: "" if state[0] == RUNNING else state[0])
    async with asyncio.TaskGroup() as around:
        now = partial(_progress, hosts, metrics, instance, log_time.now_ms)
        watchers = [around.create_task(report(log, lambda: now(state[0]), log_time))]
        try:
            async with asyncio.TaskGroup() as starting:
                for host in hosts:
                    starting.create_task(host.start())
            watchers += [around.create_task(host.guard()) for host in hosts]
            watchers.append(around.create_task(watch(log, lambda: _held(hosts), metrics, STUCK_S)))
            state[0] = RUNNING
            logger.info("worker_ready instance=%s stages=%s", instance, ",".join(host.stage for host in hosts))
            await stop.wait()
        finally:
            state[0] = STOPPED
            # A broker that has gone leaves Faust waiting for acknowledgements that never come, and it ignores cancellation.
            with ends_within("the stop of the stages", END_S):
                for watcher in watchers:
                    watcher.cancel()
                for host in hosts:
                    await host.stop()
                    for driver in host.drivers.values():
                        await driver.finish()
    await log.publish(REPORTS, now(state[0]))


def _progress(
    hosts: Sequence[HostedStage], metrics: Metrics, instance: str, now_ms: Callable[[], int], state: str
) -> Progress:
    waits = FeedbackWait()
    for host in hosts:
        if host.stage == "collect":
            (driver,) = host.drivers.values()
            waiting = driver.waiting()
            waits = waiting.feedback
            metrics.gauge("groups_pending").set(waiting.groups)
            oldest_s = max(0.0, now_ms() - waiting.oldest_ms) / 1000 if waiting.oldest_ms else 0.0
            metrics.gauge("oldest_waiting_s").set(oldest_s)
            metrics.gauge("turns_held").set(waiting.turns)
        in_flight = sum(driver.num_in_flight() for driver in host.drivers.values())
        metrics.gauge("records_in_flight", stage=host.stage).set(in_flight)
    return Progress(
        role="process",
        instance=instance,
        counters=metrics.counters(),
        gauges=metrics.gauges(),
        state=state,
        life="ended" if state == STOPPED else "working" if state == RUNNING else "starting",
        chains={host.stage: host.chain for host in hosts},
        partitions={} if state == STOPPED else {host.stage: host.partitions() for host in hosts},
        release=full_release(),
        waits=None if state == STOPPED else waits,
    )


def _held(hosts: Sequence[HostedStage]) -> list[HeldTopic]:
    return [
        HeldTopic(name, host.group, partitions, {index: host.drivers[name].mark(index) for index in partitions})
        for host in hosts
        for name, partitions in host.assignment().items()
        if name in host.drivers
    ]


def _committed(log: Log, group: str) -> Callable[[int], Any]:
    topic = log.name(VERIFIED)

    async def committed(partition: int) -> int:
        return (await log.bus.committed(group, topic)).get(Partition(topic, partition), 0)

    return committed


class QuietRepeats(logging.Filter):
    """Passes a message once per REPEAT_S: while a broker is away its client logs that sixty times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._said_s.get(str(record.msg), -REPEAT_S) < REPEAT_S:
            return False
        self._said_s[str(record.msg)] = now_s
        return True


def quieten_clients() -> None:
    for name in CLIENT_LOGGERS:
        client = logging.getLogger(name)
        client.setLevel(max(logging.WARNING, client.level))
        if not any(isinstance(known, QuietRepeats) for known in client.filters):
            client.addFilter(QuietRepeats())


async def report(log: Log, now: Callable[[], Progress], log_time: LogTime) -> None:
    while True:
        try:
            await log_time.hear(log.publish(REPORTS, now()))
        except BrokerUnavailable as error:
            end_process(str(error), EXIT_BROKER)
        await asyncio.sleep(REPORT_S)


async def watch(log: Log, held: Callable[[], list[HeldTopic]], metrics: Metrics, stuck_s: float) -> None:
    """End the process when a partition with lag does not advance for stuck_s and this worker, or no worker of its group, holds
    it. The restart joins the group again if the group never admitted this worker or assigned it nothing. Never returns.
    """
    moved: dict[Partition, tuple[int, int, float]] = {}  # offset, mark, and since when they are these
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(WATCH_S)
        for topic, group, partitions, marks in held():
            try:
                ends = await log.bus.end_offsets(topic)
                offsets = await log.bus.committed(group, topic)
                others = await log.bus.held(group, topic) - partitions
            except BrokerUnavailable as error:
                logger.warning("watch_failed error=%s", error)
                continue
            lags = {at: max(0, end - offsets.get(at, 0)) for at, end in ends.items() if at.index not in others}
            for at in [at for at in moved if at.topic == topic and at not in lags]:
                del moved[at]  # another worker's: its time begins again when it comes back
            for at, lag in lags.items():
                now = (offsets.get(at, 0), marks.get(at.index, 0))
                if lag <= 0 or moved.get(at, ())[:2] != now:
                    moved[at] = (*now, clock())
                still_s = clock() - moved[at][2]
                if still_s > stuck_s:
                    holder = "held here" if at.index in partitions else f"held by no worker of {group}"
                    behind = f"{lag} records behind and nothing moved for {still_s:.0f} s"
                    end_process(f"{topic}/{at.index}, {holder}: {behind}", EXIT_STUCK)
            metrics.gauge("lag", topic=topic).set(sum(lag for at, lag in lags.items() if at.index in partitions))
