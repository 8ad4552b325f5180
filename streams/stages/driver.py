"""Drives a stage without state: many records in flight, acknowledged in order.

    recall what came before the first delivery ─┐
                       ┌─> handle ─> publish, confirmed ─┐
    deliveries ─> window (64 per partition)              ├─> window ─> acknowledge, in offset order
                       └─> handle ─> publish, confirmed ─┘

Guarantees: at least once, whatever dies when; outputs of records with one key keep the order of the records; what a stage
remembers sees the records of a partition in log order, and after a rebalance it is rebuilt from the log before the first
of them is handled; nothing escapes: what fails is retried, then dead-lettered, else the process ends before the
acknowledgement.
"""

import asyncio
import logging
from typing import Protocol

from infra.chain.chain import ChainTurn
from infra.log.bus import Record
from infra.log.log import Log, LogMessage
from infra.observe.failpoint import reach
from infra.observe.metrics import Metrics
from schemas.errors import RecordTooLarge
from streams.stages.recall import Remembers, recall
from streams.stages.stage import Delivery, Handled, Waiting, count, end_for, publish_all, read
from streams.stages.window import Ticket, Window

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0


class Stage(Remembers, Protocol):
    """A stage that decides about one record at a time."""

    async def handle(self, message: LogMessage, turn: ChainTurn | None = None) -> Handled:
        """Decide about the record; does no I/O on the log. turn: waited for before anything is remembered."""

    def failed(self, message: LogMessage, reason: str, error: str) -> Handled:
        """Return the outputs for a record that could not be handled."""

    def forget(self) -> None:
        """The partitions were taken away."""


class WindowDriver:
    """Runs one stage over one topic."""

    def __init__(
        self,
        name: str,
        stage: Stage,
        log: Log,
        metrics: Metrics,
        tasks: asyncio.TaskGroup,
        *,
        limit: int = 64,
        timeout_s: float = TIMEOUT_S,
        give_up_s: float = 120.0,
    ) -> None:
        """limit: records in flight per partition. timeout_s: of handling one record. give_up_s: of publishing it."""
        self.name = name
        self._stage = stage
        self._log = log
        self._metrics = metrics
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._give_up_s = give_up_s
        self._window: Window[Delivery] = Window(limit)
        self._room = asyncio.Event()
        self._generation = -1
        self._last_of_key: dict[tuple[int, bytes], asyncio.Task[None]] = {}
        self._turns: dict[int, ChainTurn] = {}  # of the newest record of each partition
        self._recalls: dict[int, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def accept(self, delivery: Delivery) -> None:
        """Take a record into flight; waits while its partition's window is full."""
        record = delivery.record
        if delivery.generation > self._generation:
            self._generation = delivery.generation
            self.abandon()
            self._last_of_key.clear()
            self._turns.clear()
            self._recalls.clear()
            self._stage.forget()
        while self._window.is_full(record.partition, delivery.generation):
            self._room.clear()
            await self._room.wait()
        ticket = self._window.take(record.partition, record.offset, delivery.generation, delivery)
        if ticket is None:
            delivery.abandon()
            return
        if record.partition not in self._recalls:
            self._recalls[record.partition] = self._tasks.create_task(self._recall(record))
        turn = self._turns[record.partition] = ChainTurn(self._turns.get(record.partition))
        key = (record.partition, record.key)
        task = self._tasks.create_task(self._run(delivery, ticket, turn, self._last_of_key.get(key)))
        self._last_of_key[key] = task
        self._running.add(task)
        task.add_done_callback(lambda done: self._forget(key, done))

    def abandon(self) -> None:
        """Wait for nothing in flight any more: a rebalance must not hang on a slow record, or on a long memory."""
        for recalling in self._recalls.values():
            recalling.cancel()
        for delivery in self._window.forget():
            delivery.abandon()
        self._room.set()

    def assigned(self, partitions: set[int], generation: int) -> None:
        """Nothing begins before the first record comes."""

    def retire(self, generation: int) -> None:
        """Work in flight continues until it is abandoned."""

    def num_in_flight(self) -> int:
        return self._window.num_in_flight()

    def waiting(self) -> Waiting:
        """Nothing: each record is handled by itself."""
        return Waiting()

    def marks(self) -> dict[int, int]:
        """Nothing moves here but the group's offset."""
        return {}

    async def finish(self) -> None:
        """Give up what is still in flight: it will be delivered again."""
        self.abandon()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _recall(self, record: Record) -> None:
        try:
            await recall(self._log, self._stage, record.topic, record.partition, record.offset)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            end_for(error, f"{self.name}: {record.topic}/{record.partition} below {record.offset}")

    async def _run(
        self, delivery: Delivery, ticket: Ticket, turn: ChainTurn, before: "asyncio.Task[None] | None"
    ) -> None:
        recalling = self._recalls[delivery.record.partition]
        try:
            message = await read(self._log, delivery.record, self._give_up_s)
            if not recalling.done():  # to wait for what is done takes a turn of the loop
                await asyncio.wait((recalling,))
            if recalling.cancelled() or delivery.generation < self._generation:
                return  # given up with everything in flight: it is delivered again
            handled = await decided(self._stage, message, turn, self._timeout_s)
            if before is not None and not before.done():
                await asyncio.wait((before,))
            await self._published(message, handled)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            end_for(error, f"{self.name}: {delivery.record.topic}/{delivery.record.partition} {delivery.record.offset}")
        finally:
            turn.end()
        for done in self._window.complete(ticket):
            reach("stage.before_ack")
            done.acknowledge()
            reach("stage.after_ack")
        self._room.set()

    async def _published(self, message: LogMessage, handled: Handled) -> None:
        try:
            await publish_all(self._log, handled.first, self._give_up_s)
            await publish_all(self._log, handled.then, self._give_up_s)
        except* (RecordTooLarge, ValueError) as refused:
            error: BaseException = refused
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            reason = "record too large" if isinstance(error, RecordTooLarge) else "cannot be encoded"
            handled = self._stage.failed(message, reason, str(error))
            await publish_all(self._log, handled.then, self._give_up_s)
        count(self._metrics, self.name, handled)

    def _forget(self, key: tuple[int, bytes], done: "asyncio.Task[None]") -> None:
        self._running.discard(done)
        if self._last_of_key.get(key) is done:
            del self._last_of_key[key]


async def decided(stage: Stage, message: LogMessage, turn: ChainTurn, timeout_s: float) -> Handled:
    """Handle a record within `timeout_s`, without its wait for other records; never raises."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            turn.limit = limit
            return await stage.handle(message, turn)
    except Exception as error:
        reason = "timed out" if limit.expired() else "stage failed"
        where = f"{message.record.topic}/{message.partition}@{message.offset}"
        logger.warning("record_failed at=%s reason=%s", where, reason, exc_info=error)
        return stage.failed(message, reason, f"{type(error).__name__}: {error}")
    finally:
        turn.end()
