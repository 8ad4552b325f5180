"""Shared by the stages: records handed out by Faust, records to be published, and how a worker ends when it must.

Guarantees: an output is published once the broker has confirmed it, or the process ends before the input is
acknowledged; bytes that cannot be read become a dead letter.
"""

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import msgspec

from infra.chain.faults import STEP_FAULTS
from infra.log.bus import Record
from infra.log.log import Log, LogMessage, asks_store, letter_of
from infra.log.retry import DENIED, doubling, retry, within
from infra.observe.metrics import Metrics
from schemas import Block, Control, FeedbackWait, UnknownMajor
from schemas.errors import BrokerUnavailable, HeadraceError, causes
from schemas.topics import DEAD_LETTERS, Topic

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

EXIT_OPERATOR = 2  # as for a mistake in the settings: an operator has to act
EXIT_UNKNOWN_MAJOR = 65  # EX_DATAERR
EXIT_BROKER = 69  # EX_UNAVAILABLE
EXIT_BUG = 70  # EX_SOFTWARE
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
GIVE_UP_S = 120.0  # an output is published again for so long before the process ends
MAX_NAMED = 3  # causes of an end; the log has them all


class Delivery(Protocol):
    """One record, to acknowledge or abandon exactly once. generation: grows with every rebalance."""

    record: Record
    generation: int

    def acknowledge(self) -> None:
        """Let the group's offset move past the record."""

    def abandon(self) -> None:
        """Neither done nor waited for any more: it will be delivered again."""


class Output(msgspec.Struct, frozen=True):
    topic: Topic
    record: Block | Control


class Handled(msgspec.Struct):
    """The result of one record in a stage without state.

    first, then: published in this order. dropped: reason to count. num_in, num_out: experiences or tasks. absent: (score,
    reason) to verdicts that did not come. failed: of the drops, those by a step's own fault, by its stamp.
    """

    first: tuple[Output, ...] = ()
    then: tuple[Output, ...] = ()
    dropped: dict[str, int] = {}
    num_in: int = 0
    num_out: int = 0
    absent: dict[tuple[str, str], int] = {}
    failed: dict[str, int] = {}


class Waiting(msgspec.Struct, frozen=True):
    """Counts of groups that wait for other records on the partitions of a worker.

    groups: open groups. oldest_ms: log-append time of the group that has waited longest, 0 without groups. turns: turns that
    wait for their session. feedback: answers that wait for feedback.
    """

    groups: int = 0
    oldest_ms: int = 0
    turns: int = 0
    feedback: FeedbackWait = FeedbackWait()


def exit_at_once(message: str, code: int) -> NoReturn:
    """End the operating system's process, without another line of it being run."""
    print(message, file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(code)


# How the process of the running context ends: where one interpreter plays many processes, each has its own end.
process_exit: ContextVar[Callable[[str, int], NoReturn]] = ContextVar("process_exit", default=exit_at_once)


def end_process(message: str, code: int) -> NoReturn:
    """Log the reason and end at once: no further record is acknowledged."""
    logger.critical("%s", message)
    process_exit.get()(message, code)


async def read(log: Log, record: Record) -> LogMessage:
    """Decode the record; retry a failing store for GIVE_UP_S. Raises StoreError.

    A newer major ends the process, since parking a rolling upgrade's traffic would be worse.
    """
    try:
        if not asks_store(record):
            return log.decode(record)
        return await confirmed(lambda: asyncio.to_thread(log.decode, record), "claim check or key")
    except UnknownMajor as error:
        where = f"{record.topic}/{record.partition} offset {record.offset}"
        end_process(f"upgrade readers first: {where}: {error}", EXIT_UNKNOWN_MAJOR)


def letter(message: LogMessage, stage: str, reason: str, error: str) -> Output:
    return Output(DEAD_LETTERS, letter_of(message.record, stage=stage, reason=reason, error=error))


async def confirmed(attempt: Callable[[], Awaitable[Result]], what: str, give_up_s: float = GIVE_UP_S) -> Result:
    """Run `attempt`, again with backoff while its error is retriable; the last error is raised after give_up_s."""

    def again(error: Exception) -> bool:
        may_pass = isinstance(error, HeadraceError) and error.retriable
        if may_pass:
            logger.warning("stage_retry what=%s error=%s", what, error)
        return may_pass

    return await retry(attempt, within(give_up_s, doubling(FIRST_BACKOFF_S, MAX_BACKOFF_S)), again)


async def publish_all(log: Log, outputs: Iterable[Output]) -> None:
    """Publish concurrently, blocks of one group in order; returns once all are confirmed."""
    queues: dict[str | int, list[Output]] = {}
    for number, output in enumerate(outputs):
        key = output.record.group if isinstance(output.record, Block) else number
        queues.setdefault(key, []).append(output)
    if len(queues) == 1:
        await _publish(log, *queues.values())
    elif queues:
        async with asyncio.TaskGroup() as tasks:
            for queue in queues.values():
                tasks.create_task(_publish(log, queue))


async def _publish(log: Log, queue: Sequence[Output]) -> None:
    for output in queue:
        await confirmed(partial(log.publish, output.topic, output.record), output.topic.name)


def end_for(error: BaseException, doing: str) -> NoReturn:
    """End the process for an error that nothing can be done about here, before anything is acknowledged."""
    for cause in causes(error):
        if isinstance(cause, BrokerUnavailable):
            end_process(str(cause), EXIT_BROKER)
    logger.error("stage_failed doing=%s", doing, exc_info=error)
    end_process(f"{doing}: {_named(error)}; stopped before the acknowledgement", EXIT_BUG)


def end_crashed(stage: str, error: BaseException | None) -> NoReturn:
    """End the process after Faust ended. The message names the fix for an error that a restart would meet again."""
    reason = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OffsetOutOfRangeError":
        way_out = f"`headrace skip {stage}` continues at the oldest kept record, and prints the number of lost records"
        end_process(f"{stage}: records were deleted before they were read ({reason}); {way_out}", EXIT_OPERATOR)
    if isinstance(error, DENIED):
        end_process(
            f"{stage}: Kafka does not allow it ({reason}); `headrace check --connect` names every missing right",
            EXIT_BROKER,
        )
    end_process(f"{stage}: Faust stopped: {reason}", EXIT_BUG)


def _named(error: BaseException) -> str:
    named = list(dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause in causes(error)))
    further = [f"and {len(named) - MAX_NAMED} other errors"] if len(named) > MAX_NAMED else []
    return "; ".join([*named[:MAX_NAMED], *further])


def count(metrics: Metrics, stage: str, handled: Handled) -> None:
    metrics.counter("experiences_in", stage=stage).inc(handled.num_in)
    metrics.counter("experiences_out", stage=stage).inc(handled.num_out)
    for reason, number in handled.dropped.items():
        metrics.counter("dropped", reason=reason).inc(number)
    count_failed(metrics, stage, handled.failed)
    for (score, reason), number in handled.absent.items():
        metrics.counter("scores_absent", score=score, reason=reason).inc(number)


def count_faults(gone: Iterable[tuple[str, str]]) -> dict[str, int]:
    return dict(Counter(stamp for reason, stamp in gone if reason in STEP_FAULTS))


def count_failed(metrics: Metrics, stage: str, failed: Mapping[str, int]) -> None:
    for stamp, number in failed.items():
        metrics.counter("step_failed", stage=stage, step=stamp).inc(number)
