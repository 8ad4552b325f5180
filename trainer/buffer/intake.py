"""Consumes `buffer`, `progress`, `reports` and `policies` for the trainer: groups, closures, and leases that end its own.

    buffer ────> Intake.buffer (candidates)  ─┐
    progress ──> Intake.closed (issue order)  ├─ `changed` wakes the loop in train.py
    reports ───> end of new groups            │
    policies ──> FencedOut, Intake.paused,    ─┘
                 Intake.must_forget

Loss: a record of `buffer` that cannot be read or trained is dropped with a reason that the audit finds.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from infra.log.log import Log, LogMessage, lately
from infra.observe.metrics import Metrics
from infra.policies.beginning import read_on
from infra.policies.fold import PoliciesFold
from infra.store.seal import FRESH_S
from schemas import Block, Closure, Directive, Progress, topics
from trainer.buffer.buffer import Buffer, block_frame, record_digest
from trainer.buffer.pool import missing

logger = logging.getLogger(__name__)

TellDropped = Callable[[dict[str, str]], Awaitable[None]]
REPEATS = frozenset({"already trained", "duplicate"})  # the first copy is accounted for


class Intake:
    """The trainer's ears. buffer_next, progress_next: offsets a restart reads on from. floor: oldest issue number that may
    still be missed. closed: numbers that are not waited for. clock: seconds, of the event loop.
    """

    def __init__(
        self, buffer: Buffer, *, buffer_next: int, progress_next: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.buffer = buffer
        self.buffer_next = buffer_next
        self.progress_next = progress_next
        self.changed = asyncio.Event()
        self.floor = 0
        self.draining = False
        self.paused = False
        self.forget_at_s = math.inf  # when every lookup of a key tells that it was destroyed
        self.outstanding_groups = 0
        self.arrived_s = clock()  # of the newest block
        self._arrived: set[int] = set()
        self.closed: set[int] = set()

    @property
    def must_forget(self) -> bool:
        """True if a user was forgotten whose data is still in memory."""
        return self.clock() >= self.forget_at_s

    def absent(self) -> list[int]:
        """Issue numbers that neither arrived nor were closed, below the newest arrival."""
        return missing(sorted(self._arrived), self.closed, self.floor)

    def known(self, start: int) -> tuple[int, ...]:
        """Issue numbers from `start` on that arrived or were closed."""
        return tuple(sorted(number for number in self._arrived | self.closed if number >= start))

    def settle(self, sequences: list[int]) -> None:
        """Stop waiting for groups below the newest of these, which were drawn or dropped."""
        absent = self.absent()
        top = max(sequences, default=-1)
        self.floor = max(self.floor, min([number for number in absent if number <= top], default=top + 1))
        self._arrived = {number for number in self._arrived if number >= self.floor}
        self.closed = {number for number in self.closed if number >= self.floor}

    def take_block(self, message: LogMessage, block: Block) -> str:
        """Keep a block of `buffer`; return "" or the reason of its refusal."""
        self.arrived_s = self.clock()
        return self.keep(message.offset, block_frame(message, block), block, record_digest(message))

    def keep(self, offset: int, frame: bytes, block: Block, digest: bytes) -> str:
        """`take_block` for a block that an earlier process may have read."""
        reason = self.buffer.add(offset, frame, block, digest)
        sequence = block.experiences[0].sequence
        if sequence >= self.floor:
            self._arrived.add(sequence)
        return reason

    def take_report(self, report: Progress) -> None:
        """The master says whether more groups will come, and how many are still on their way or waiting here."""
        if report.master is not None:
            self.draining = report.master.issues_no_more
            self.outstanding_groups = report.master.outstanding

    def take_directive(self, directive: Directive) -> None:
        """An operator says whether to learn, where the newest order holds, or that a user is forgotten."""
        if directive.order == "forget":
            self.forget_at_s = self.clock() + FRESH_S
        if directive.is_of_learning:
            self.paused = directive.order == "pause"
            self.changed.set()

    def take_closure(self, closure: Closure) -> None:
        """Remember that a group will never reach the buffer."""
        if closure.outcome == "dropped" and closure.sequence >= self.floor:
            self.closed.add(closure.sequence)


async def follow_buffer(log: Log, intake: Intake, metrics: Metrics, tell_dropped: TellDropped) -> None:
    """Read `buffer` until cancelled, in offset order."""
    async with aclosing(log.tail(topics.BUFFER, {0: intake.buffer_next})) as messages:
        async for message in messages:
            await take_in(log, intake, metrics, tell_dropped, message)
            intake.buffer_next = message.offset + 1  # a checkpoint at any time has counted all earlier records
            intake.changed.set()


async def take_in(log: Log, intake: Intake, metrics: Metrics, tell_dropped: TellDropped, message: LogMessage) -> None:
    """One record of `buffer`: kept, known already, or dropped with a reason that the audit finds."""
    if isinstance(message.value, Block):
        reason, group = intake.take_block(message, message.value), message.value.group
    else:
        intake.buffer.await_no_more()  # it may have been the last of a join
        reason, group = "bad frame", dict(message.record.headers).get("group", b"").decode(errors="replace")
        await log.dead_letter(message, stage="train", reason=reason)
    await tell_refused(metrics, tell_dropped, message.offset, group, reason)


async def tell_refused(metrics: Metrics, tell_dropped: TellDropped, offset: int, group: str, reason: str) -> None:
    """Count and report the refusal of a record of `buffer`; nothing for the reason ""."""
    if not reason:
        return
    metrics.counter("buffer_refused", reason=reason).inc()
    if reason not in REPEATS and group:
        logger.warning("buffer record refused offset=%d group=%s reason=%s", offset, group, reason)
        await tell_dropped({group: reason})


async def follow_progress(log: Log, intake: Intake) -> None:
    """Read closures until cancelled; they only tell which missing groups to wait for, so retention may have taken some."""
    begins, _ = await log.bounds(topics.PROGRESS)
    async with aclosing(log.tail(topics.PROGRESS, {0: max(begins[0], intake.progress_next)})) as messages:
        async for message in messages:
            intake.progress_next = message.offset + 1
            if isinstance(message.value, Closure):
                intake.take_closure(message.value)
                intake.changed.set()


async def follow_reports(log: Log, intake: Intake) -> None:
    """Read the reports of the last hour, then new reports until cancelled; the master's newest report counts."""
    async with aclosing(log.tail(topics.REPORTS, await lately(log))) as messages:
        async for message in messages:
            if isinstance(message.value, Progress):
                intake.take_report(message.value)


async def hear_directives(log: Log, intake: Intake, past: PoliciesFold) -> None:
    """Read the operators' orders from before this trainer begins. Groups that were forgotten by then are dropped when drawn."""
    await read_on(log, past)
    intake.paused = past.learning == "pause"
