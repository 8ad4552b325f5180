"""Around the stages of one worker: its folder, its reports to `progress`, and the watchdog that ends it when stuck."""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from infra.bus.bus import Partition
from infra.bus.log import Log
from infra.config import Floor, duration_s
from infra.metrics import Metrics
from schemas import Progress
from schemas.errors import BrokerUnavailable, ConfigError
from schemas.topics import PROGRESS
from streams.collect.credit import Source
from streams.collect.fold import Rules
from streams.config import StreamsConfig
from streams.stage import EXIT_STUCK, end_process

logger = logging.getLogger(__name__)

REPORT_S = 2.0
WATCH_S = 5.0
MAX_WORKERS = 1024
REPEAT_S = 10.0
CLIENT_LOGGERS = (
    "faust",
    "mode",
    "aiokafka",
    "aiokafka.cluster",
    "aiokafka.conn",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.sender",
)


class QuietRepeats(logging.Filter):
    """Passes a message once per REPEAT_S: while a broker is away its client says so sixty times a second."""

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
    """Have Kafka's clients speak of trouble only, and not all the time."""
    for name in CLIENT_LOGGERS:
        client = logging.getLogger(name)
        client.setLevel(max(logging.WARNING, client.level))
        if not any(isinstance(known, QuietRepeats) for known in client.filters):
            client.addFilter(QuietRepeats())


class ClaimedFolder:
    """A folder that belongs to this process until it ends: the first of worker-0, worker-1, … that nobody holds.

    A worker that restarts finds its own state files again; with several on one machine it may find another's, which the
    collector brings up to date.
    """

    def __init__(self, base: Path) -> None:
        self.path, self._lock = _claim(base)

    def release(self) -> None:
        """Let the next process have it."""
        self._lock.close()


def _claim(base: Path) -> tuple[Path, IO[str]]:
    for index in range(MAX_WORKERS):
        path = base / f"worker-{index}"
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("w", encoding="ascii")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return path, lock
    raise ConfigError(f"{base}: got {MAX_WORKERS} workers on one machine, expected fewer")


def rules_of(floor: Floor, config: StreamsConfig) -> Rules:
    """What collect waits for, from the settings."""
    sources = {
        source.name: Source(
            window_ms=int(duration_s(source.window) * 1000),
            default=None if isinstance(source.default, str) else float(source.default),
            late=source.late,
        )
        for source in config.feedback
    }
    return Rules(
        deadline_ms=int(config.collect.deadline_s * 1000),
        keep_ms=int(duration_s(floor.keep.replay) * 1000),
        sources=sources,
    )


async def report(log: Log, metrics: Metrics, instance: str, state: Callable[[], str]) -> None:
    """Say every REPORT_S how this worker is doing, until cancelled."""
    while True:
        await report_once(log, metrics, instance, state())
        await asyncio.sleep(REPORT_S)


async def report_once(log: Log, metrics: Metrics, instance: str, state: str) -> None:
    """One Progress record; a broker that is away is the stages' business."""
    progress = Progress(
        role="process", instance=instance, counters=metrics.counters(), gauges=metrics.gauges(), state=state
    )
    try:
        await log.publish(PROGRESS, progress)
    except BrokerUnavailable as error:
        logger.warning("report_failed error=%s", error)


def instance_name(folder: Path) -> str:
    """Who speaks in Progress records: the claimed folder and the process."""
    return f"process-{folder.name.rpartition('-')[2]}/{os.getpid()}"


async def watch(
    log: Log,
    topics: Callable[[], dict[str, tuple[str, set[int], float]]],
    metrics: Metrics,
    stuck_s: float,
) -> None:
    """End the process when a topic has lag and nothing moved for stuck_s; never returns.

    topics: full topic name to (consumer group, assigned partitions, monotonic time of the last movement).
    """
    idle_since_s: dict[str, float] = {}
    while True:
        await asyncio.sleep(WATCH_S)
        for topic, (group, partitions, moved_at_s) in topics().items():
            try:
                lag = await _lag(log, topic, group, partitions)
            except BrokerUnavailable as error:
                logger.warning("watch_failed error=%s", error)
                continue
            metrics.gauge("lag", topic=topic).set(lag)
            if lag == 0:
                idle_since_s[topic] = time.monotonic()
            last_s = max(moved_at_s, idle_since_s.setdefault(topic, time.monotonic()))
            if time.monotonic() - last_s > stuck_s:
                end_process(f"{topic}: {lag} records behind and nothing moved for {stuck_s:g} s; stopped", EXIT_STUCK)


async def _lag(log: Log, topic: str, group: str, partitions: set[int]) -> int:
    if not partitions:
        return 0
    ends = await log.bus.end_offsets(topic)
    committed = await log.bus.committed(group, topic)
    return sum(
        max(0, ends[at] - committed.get(at, 0))
        for at in (Partition(topic, index) for index in partitions)
        if at in ends
    )
