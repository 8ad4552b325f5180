"""Stage verify (and tasks) once more over a part of the log: the workers' own chain, publishing nothing into their app.

    input ─> Verifier (memory read back before the range) ─> compare with verified, evals ─> another app's verified

Scores on record are reused where score, version and input are the same, and so is the failure that a drop marker names; unless
they are to be asked for again. Where the code of a score changed and its version did not, the report says so. With
--publish, what others than verify put into `verified` (feedback, ticks, drop markers of explorers) goes along in its place.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from infra.chain.calls import Failure
from infra.chain.chain import Step
from infra.chain.processor import Verdict
from infra.chain.turn import ChainTurn
from infra.chain.verdict import Question, Recorded
from infra.log.log import Log, LogMessage
from schemas import Block, Control, DropMarker, Feedback, Tick
from schemas.topics import EVALS, VERIFIED, Topic
from streams.processors.dedupe import DUPLICATE
from streams.reprocess.outcome import Reprocessed, dropped, kept
from streams.reprocess.publisher import ReprocessPublisher
from streams.reprocess.ranges import Range, TimedEvent, first_time_ms, in_time_order, messages_of
from streams.reprocess.report import ReprocessReport
from streams.reprocess.shelf import OutcomeShelf
from streams.stages.driver import TIMEOUT_S, Stage, decided
from streams.stages.recall import recall
from streams.stages.stage import Handled
from streams.stages.verify import STAGE, Verifier

IN_FLIGHT = 64
FAILED_SCORES = ("score failed", "score timed out")
OnProgress = Callable[[int], None]  # so many more records are read


class Made(TimedEvent, frozen=True):
    """What a stage makes of one record.

    message: the record. handled: what comes of it.
    """

    message: LogMessage
    handled: Handled


class Passed(TimedEvent, frozen=True):
    """A record of `verified` that verify did not make.

    record: decoded.
    """

    record: Control


async def made_of(log: Log, one: Range, stage: Stage) -> AsyncGenerator[Made, None]:
    """What `stage` makes of each record of a range, in its order, several at once; what it remembers is read back first."""
    await recall(log, stage, log.name(one.topic), one.partition, one.start)
    waiting: deque[tuple[LogMessage, asyncio.Task[Handled]]] = deque()
    turn: ChainTurn | None = None

    async def next_made() -> Made:
        message, deciding = waiting.popleft()
        return Made(message.timestamp_ms, message, await deciding)

    try:
        async with aclosing(messages_of(log, one)) as messages:
            async for message in messages:
                turn = ChainTurn(turn)
                waiting.append((message, asyncio.create_task(decided(stage, message, turn, TIMEOUT_S))))
                if len(waiting) >= IN_FLIGHT:
                    yield await next_made()
        while waiting:
            yield await next_made()
    finally:
        for _, deciding in waiting:
            deciding.cancel()


async def passed_along(log: Log, one: Range) -> AsyncGenerator[Passed, None]:
    """What others than verify put into a part of `verified`."""
    async with aclosing(messages_of(log, one)) as messages:
        async for message in messages:
            value = message.value
            if isinstance(value, Feedback | Tick) or (isinstance(value, DropMarker) and value.stage != STAGE):
                yield Passed(message.timestamp_ms, value)


async def run_verify(
    log: Log,
    ranges: Sequence[Range],
    steps: Sequence[Step],
    shelf: OutcomeShelf,
    *,
    diff: bool,
    rescore: bool,
    publisher: ReprocessPublisher | None,
    on_progress: OnProgress,
) -> ReprocessReport:
    """Run the chain over the ranges of `experiences` and `experts`."""
    report = ReprocessReport("verify")
    since_ms = await first_time_ms(log, ranges)
    reuses = not rescore and any(step.question for step in steps)
    if diff or reuses:
        await shelve(log, shelf, since_ms, on_progress)
    recorded = _recorded(shelf, report) if reuses else None
    streams: list[AsyncGenerator[TimedEvent, None]] = [made_of(log, one, Verifier(steps, recorded)) for one in ranges]
    if publisher is not None:
        streams += [passed_along(log, one) for one in await since(log, VERIFIED, since_ms)]
    async with aclosing(in_time_order(streams)) as all_of_it:
        async for one in all_of_it:
            if isinstance(one, Made):
                on_progress(1)
                await _take(report, shelf, one, diff, publisher)
            elif isinstance(one, Passed) and publisher is not None:
                await publisher.send(VERIFIED, one.record, one.time_ms)
    if diff:
        report.finish(shelf)
    return report


async def _take(
    report: ReprocessReport, shelf: OutcomeShelf, made: Made, diff: bool, publisher: ReprocessPublisher | None
) -> None:
    """Count, compare and publish what came of one record."""
    report.records += 1
    outputs = [output for output in (*made.handled.first, *made.handled.then) if output.topic in (VERIFIED, EVALS)]
    for output in outputs:
        record = output.record
        assert isinstance(record, Block | DropMarker)
        if isinstance(record, Block) and not diff:
            report.kept += len(record.experiences)
        else:
            for outcome in _outcomes(record):
                report.count(outcome)
                if diff:
                    report.compare(shelf, outcome)
        if publisher is not None and output.topic is VERIFIED:
            await publisher.send(VERIFIED, record, made.time_ms)
    for reason in (DUPLICATE, "bad frame", "unexpected record"):
        if count := _untraced(made.handled, reason):
            report.drop(reason, count)


def _outcomes(record: Block | DropMarker) -> list[Reprocessed]:
    return (
        [dropped(record, record.reason)]
        if isinstance(record, DropMarker)
        else [kept(one) for one in record.experiences]
    )


def _untraced(handled: Handled, reason: str) -> int:
    """How many experiences were dropped for `reason` without a drop marker."""
    markers = sum(isinstance(one.record, DropMarker) and one.record.reason == reason for one in handled.then)
    return handled.dropped.get(reason, 0) - markers


def _recorded(shelf: OutcomeShelf, report: ReprocessReport) -> Recorded:
    """Verdicts on the shelf, and failures of scores."""

    def recorded(question: Question) -> Verdict | Failure | None:
        known = shelf.get(question.id)
        input, _, code = question.input.partition(":")
        asked = (question.name, question.version, input)
        for score in () if known is None else known.scores:
            version, _, model = score.version.partition("+")
            known_input, _, known_code = score.input.partition(":")
            if (score.name, version, known_input) == asked:
                report.reused_scores += 1
                if known_code and code and known_code != code:
                    report.other_code[score.name] = report.other_code.get(score.name, 0) + 1
                return Verdict(value=score.value, model=model, cost_usd=score.cost_usd)
        failed = shelf.get(_failed_key(question.id, f"{question.name}@{question.version}"))
        if failed is None:
            return None
        report.reused_scores += 1
        return Failure(failed.dropped.removeprefix("score "), "so it is on record; --rescore asks again")

    return recorded


def _failed_key(id: str, stamp: str) -> str:
    return f"failed {id} {stamp}"


async def shelve(log: Log, shelf: OutcomeShelf, since_ms: int, on_progress: OnProgress) -> None:
    """Put aside what `verified` and `evals` record from `since_ms` on."""
    for topic in (VERIFIED, EVALS):
        for one in await since(log, topic, since_ms):
            async with aclosing(messages_of(log, one)) as messages:
                async for message in messages:
                    on_progress(1)
                    if isinstance(message.value, Block):
                        for member in message.value.experiences:
                            shelf.put(kept(member))
                    elif isinstance(message.value, DropMarker) and message.value.stage == STAGE:
                        shelf.put(dropped(message.value, message.value.reason))
                        if message.value.reason in FAILED_SCORES:
                            failed = _failed_key(message.value.id, message.value.processor)
                            shelf.put(Reprocessed(failed, dropped=message.value.reason))


async def since(log: Log, topic: Topic, time_ms: int) -> list[Range]:
    """All of a topic from a moment on."""
    starts = await log.bus.offsets_at(log.name(topic), time_ms)
    ends = await log.bus.end_offsets(log.name(topic))
    return [Range(topic, at.index, start, ends[at]) for at, start in sorted(starts.items())]
