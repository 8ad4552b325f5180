"""One stage as a Faust app of its own, feeding drivers that do not know Faust.

Guarantees: Faust delivers, keeps the group's place and nothing else: it decodes nothing, produces nothing and keeps no
table. A record is acknowledged by its driver; offsets that were trimmed stop the worker instead of being skipped. Nothing
escapes an agent.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import faust
from faust.auth import SASLCredentials, SSLCredentials
from faust.exceptions import ConsumerNotStarted

from infra.log.access import Access
from infra.log.bus import Record
from infra.log.kafka import METADATA_AGE_MS
from infra.log.log import Log
from schemas.topics import MAX_RECORD_BYTES, Topic
from streams.collect.inbox import CollectDriver
from streams.stages.driver import WindowDriver
from streams.stages.stage import end_crashed, end_for

logger = logging.getLogger(__name__)

StageName = Literal["tasks", "verify", "collect"]
START_S = 120.0
STOP_S = 30.0
DRAIN_S = 5.0
POLL_S = 0.1
Driver = WindowDriver | CollectDriver


class OrderedEvent(faust.Event):  # type: ignore[misc]
    """An event that only its driver acknowledges: Faust itself also acks events that it skips during a rebalance."""

    released = False

    def ack(self) -> bool:
        return bool(super().ack()) if self.released else False


class FaustDelivery:
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


class BrokerLogin(NamedTuple):
    """The brokers, and how this client logs in.

    bootstrap: host:port, several with commas. access: protocol and secrets.
    """

    bootstrap: str
    access: Access


def credentials(access: Access) -> Any:
    if access.protocol == "PLAINTEXT":
        return None
    if access.protocol == "SSL":
        return SSLCredentials(access.context)
    return SASLCredentials(
        username=access.username, password=access.password, ssl_context=access.context, mechanism=access.mechanism
    )


class HostedStage:
    """One Faust app with an agent per topic. chain: the steps of the stage, as `status` shows them."""

    def __init__(self, log: Log, address: BrokerLogin, stage: StageName, folder: Path, chain: str) -> None:
        self.stage = stage
        self.chain = chain
        self.group = log.group(stage)
        self.drivers: dict[str, Driver] = {}
        self._log = log
        self._generation = -1
        self._assigned_in = -1  # the rebalance that ended in the assignment we hold
        (folder / "faust").mkdir(parents=True, exist_ok=True)
        self.app = faust.App(
            self.group,
            broker=[f"kafka://{server.strip()}" for server in address.bootstrap.split(",")],
            broker_credentials=credentials(address.access),
            datadir=folder / "faust",
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
            consumer_metadata_max_age_ms=METADATA_AGE_MS,
            consumer_auto_offset_reset="none",
            broker_commit_interval=0.5,
            broker_commit_livelock_soft_timeout=24 * 3600.0,
            broker_session_timeout=10.0,
            broker_heartbeat_interval=1.0,
            broker_request_timeout=30.0,
            broker_max_poll_interval=600.0,
        )

    def add(self, topic: Topic, driver: Driver) -> None:
        name = self._log.name(topic)
        self.drivers[name] = driver
        source = self.app.topic(
            name, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw", internal=False
        )

        async def consume(stream: Any) -> None:
            try:
                async for event in stream.noack().events():
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
        """Finish the records in flight within STOP_S, commit and leave the group; slower records are delivered again."""
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
        found: dict[str, set[int]] = {name: set() for name in self.drivers}
        try:
            assigned = self.app.consumer.assignment()
        except ConsumerNotStarted:  # Faust says "started" before the thread of its consumer has begun
            assigned = ()
        for partition in assigned:
            found.setdefault(partition.topic, set()).add(partition.partition)
        return found

    def partitions(self) -> tuple[int, ...]:
        return tuple(sorted(set().union(*self.assignment().values()))) if self.app.started else ()

    def _is_revoking(self) -> bool:
        return bool(self.app.rebalancing) and self.app.rebalancing_count != self._assigned_in

    async def _let_go(self) -> None:
        since_s = time.monotonic()
        while self._is_revoking():
            for driver in self.drivers.values():
                driver.retire(self._generation)
            if time.monotonic() - since_s > DRAIN_S:
                self._abandon()
            await asyncio.sleep(POLL_S)

    async def _abandon_late(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._abandon()

    def _abandon(self) -> None:
        for driver in self.drivers.values():
            driver.abandon()

    async def _on_assigned(self, app: Any, assigned: set[Any], **_: object) -> None:
        self._generation, self._assigned_in = self.app.consumer_generation_id, self.app.rebalancing_count
        for name, driver in self.drivers.items():
            driver.assigned({at.partition for at in assigned if at.topic == name}, self._generation)
