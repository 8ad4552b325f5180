"""Around the stages of one worker: its folder, its reports, and the watchdog that ends it when stuck."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from infra.log.bus import Partition, RecordPosition
from infra.log.log import Log
from infra.log.memory import wall_ms
from infra.observe.metrics import Metrics
from infra.roles.process import EXIT_STUCK
from infra.settings.config import Floor, duration_s
from schemas import Progress
from schemas.errors import BrokerUnavailable
from schemas.topics import REPORTS
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from streams.config import StreamsConfig
from streams.stages.stage import EXIT_BROKER, end_process

logger = logging.getLogger(__name__)

REPORT_S = 2.0
WATCH_S = 5.0
REPEAT_S = 10.0
SLACK_MS = 5_000  # a clock that is off by less changes nothing
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


class LogTime:
    """wall_ms: the machine's clock."""

    def __init__(self, wall_ms: Callable[[], int] = wall_ms) -> None:
        self._wall_ms = wall_ms
        self._off_ms = 0

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the broker's clock."""
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
    """Have Kafka's clients speak of trouble only, and not all the time."""
    for name in CLIENT_LOGGERS:
        client = logging.getLogger(name)
        client.setLevel(max(logging.WARNING, client.level))
        if not any(isinstance(known, QuietRepeats) for known in client.filters):
            client.addFilter(QuietRepeats())


def collect_rules(floor: Floor, config: StreamsConfig) -> Rules:
    """Make the rules of collect from the settings."""
    sources = {
        source.name: FeedbackRules(
            window_ms=int(duration_s(source.window) * 1000),
            default=None if isinstance(source.default, str) else float(source.default),
            late=source.late,
            discount=source.discount,
        )
        for source in config.feedback
    }
    return Rules(
        deadline_ms=int(config.collect.deadline_s * 1000),
        keep_ms=int(duration_s(floor.keep.replay) * 1000),
        sources=sources,
        corrects=config.collect.correct.on,
        revisions=config.collect.revisions,
        retrainings=config.collect.retrainings,
        session_ms=int(config.collect.session_s * 1000),
        session_turns=config.collect.session_turns,
        limits=config.collect.limits,
    )


async def report(log: Log, now: Callable[[], Progress], log_time: LogTime) -> None:
    """Say every REPORT_S how this worker is doing; a broker that is away past its deadline ends the process."""
    while True:
        try:
            await log_time.hear(log.publish(REPORTS, now()))
        except BrokerUnavailable as error:
            end_process(str(error), EXIT_BROKER)
        await asyncio.sleep(REPORT_S)


class HeldTopic(msgspec.Struct, frozen=True):
    """A topic of which a worker holds partitions.

    topic, group: full names. partitions: indexes. marks: per partition, a number that changes while it is worked on.
    """

    topic: str
    group: str
    partitions: set[int]
    marks: dict[int, int]


class Movement:
    """The last movement of each partition: of its offset, of its mark, or that nothing is left to do."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}
        self._moved_s: dict[tuple[str, int], float] = {}

    def stuck_for_s(self, topic: str, partition: int, lag: int, committed: int, mark: int, now_s: float) -> float:
        key = (topic, partition)
        if lag <= 0 or self._seen.get(key) != (committed, mark):
            self._moved_s[key] = now_s
        self._seen[key] = (committed, mark)
        return now_s - self._moved_s[key]

    def keep(self, topic: str, partitions: set[int]) -> None:
        """Forget the topic's other partitions, which other workers hold: their time begins anew when they come back."""
        for key in [key for key in self._seen if key[0] == topic and key[1] not in partitions]:
            del self._seen[key]


async def watch(log: Log, held: Callable[[], list[HeldTopic]], metrics: Metrics, stuck_s: float) -> None:
    """End the process when a partition has lag and does not move for stuck_s, though it is this worker's or, of the worker's
    group, not held by any: a group that never let this worker in, or dealt it nothing, is joined anew. Never returns.
    """
    movement = Movement()
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(WATCH_S)
        for held_topic in held():
            try:
                ends = await log.bus.end_offsets(held_topic.topic)
                offsets = await log.bus.committed(held_topic.group, held_topic.topic)
                others = await log.bus.held(held_topic.group, held_topic.topic) - held_topic.partitions
            except BrokerUnavailable as error:
                logger.warning("watch_failed error=%s", error)
                continue
            lags = {at.index: max(0, end - offsets.get(at, 0)) for at, end in ends.items() if at.index not in others}
            movement.keep(held_topic.topic, set(lags))
            for partition, lag in lags.items():
                committed = offsets.get(Partition(held_topic.topic, partition), 0)
                mark = held_topic.marks.get(partition, 0)
                still_s = movement.stuck_for_s(held_topic.topic, partition, lag, committed, mark, clock())
                if still_s > stuck_s:
                    holder = (
                        "held here"
                        if partition in held_topic.partitions
                        else f"held by no worker of {held_topic.group}"
                    )
                    behind = f"{lag} records behind and nothing moved for {still_s:.0f} s"
                    end_process(f"{held_topic.topic}/{partition}, {holder}: {behind}", EXIT_STUCK)
            metrics.gauge("lag", topic=held_topic.topic).set(
                sum(lags.get(partition, 0) for partition in held_topic.partitions)
            )
