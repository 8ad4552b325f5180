"""The two stages of `reprocess`: how the log records their outcomes, and how they run over a range again.

    recorded_by(stage)   the outcomes that the log records, one after the other
    steps_of(stage)      the outcomes of a range, as the workers' own code makes them now

verify rebuilds its memory from the records before the range, like a worker that starts there. collect folds each
partition from its beginning in a state that is thrown away; outcomes before the range are not compared. If retention removed
the beginning of a partition, groups that may have begun there are not compared either, since their state is not known.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from infra.chain.calls import Failure
from infra.chain.chain import ChainTurn, Step
from infra.chain.processor import Verdict
from infra.chain.verdict import Question, Recorded
from infra.log.bus import Partition, Record
from infra.log.log import Log, LogMessage
from infra.observe.metrics import Metrics
from schemas import Block, Closure, DropMarker
from schemas.topics import BUFFER, EVALS, PROGRESS, VERIFIED, Topic
from streams.collect.collector import Collector, CollectSettings
from streams.collect.decision import Decision
from streams.processors.filter import DUPLICATE
from streams.reprocess.ranges import Range, first_time_ms, messages_in
from streams.reprocess.report import (
    Outcome,
    OutcomeTable,
    ReprocessReport,
    dropped_outcome,
    ending,
    kept_outcome,
    left_out,
)
from streams.stages import verify
from streams.stages.driver import TIMEOUT_S, Stage, decided
from streams.stages.stage import Handled

IN_FLIGHT = 64
BATCH = 64
FAILED_SCORES = ("score failed", "score timed out")
OnProgress = Callable[[int], None]  # called with the number of further records read


class ReprocessRun(NamedTuple):
    """One run. steps: the chain of the stage. rescore: ask scores again that are on record."""

    log: Log
    ranges: Sequence[Range]
    steps: Sequence[Step]
    report: ReprocessReport
    table: OutcomeTable
    collect: CollectSettings
    diff: bool
    rescore: bool
    on_progress: OnProgress


class RunStep(NamedTuple):
    """The results of one record.

    kept: experiences that go on. dropped: counts by reason. outcomes: to be compared, each with the outcome that is
    meant if none is recorded under its key. unrecorded: outcomes of which nothing is recorded.
    """

    kept: int = 0
    dropped: Mapping[str, int] = MappingProxyType({})
    outcomes: Sequence[tuple[Outcome, Outcome | None]] = ()
    unrecorded: int = 0
    records: int = 1


async def decided_in(run: ReprocessRun, part: Range, stage: Stage) -> AsyncGenerator[tuple[LogMessage, Handled], None]:
    """Each record of a range with the decision of `stage`, in order, IN_FLIGHT at a time."""
    await stage.recall(run.log, Partition(run.log.name(part.topic), part.partition), part.start, lambda: None)
    waiting: deque[tuple[LogMessage, asyncio.Task[Handled]]] = deque()
    turn: ChainTurn | None = None
    try:
        async with aclosing(messages_in(run.log, part)) as messages:
            async for message in messages:
                turn = ChainTurn(turn)
                waiting.append((message, asyncio.create_task(decided(stage, message, turn, TIMEOUT_S))))
                if len(waiting) >= IN_FLIGHT:
                    message, deciding = waiting.popleft()
                    yield message, await deciding
        while waiting:
            message, deciding = waiting.popleft()
            yield message, await deciding
    finally:
        for _, deciding in waiting:
            deciding.cancel()


# verify: outcomes are experiences by id, from verified and evals.


async def verify_recorded(run: ReprocessRun) -> None:
    since_ms = await first_time_ms(run.log, run.ranges)
    for topic in (VERIFIED, EVALS):
        starts = await run.log.bus.offsets_at(run.log.name(topic), since_ms)
        ends = await run.log.bus.end_offsets(run.log.name(topic))
        for at, start in sorted(starts.items()):
            async with aclosing(messages_in(run.log, Range(topic, at.index, start, ends[at]))) as messages:
                async for message in messages:
                    run.on_progress(1)
                    record = message.value
                    if isinstance(record, Block) or (isinstance(record, DropMarker) and record.stage == verify.STAGE):
                        for outcome in _outcomes(record):
                            run.table.put(outcome)
                    if isinstance(record, DropMarker) and record.reason in FAILED_SCORES:
                        run.table.put(Outcome(_failed_key(record.id, record.processor), dropped=record.reason))


async def verify_steps(run: ReprocessRun) -> AsyncGenerator[RunStep, None]:
    recorded = None if run.rescore or not asks_scores(run) else _recorded_scores(run.table, run.report)
    for part in run.ranges:
        async with aclosing(decided_in(run, part, verify.Verifier(run.steps, recorded))) as all_handled:
            async for _, handled in all_handled:
                run.on_progress(1)
                yield _verified(handled)


def asks_scores(run: ReprocessRun) -> bool:
    return any(step.question for step in run.steps)


def _verified(handled: Handled) -> RunStep:
    kept, dropped, outcomes = 0, dict[str, int](), list[tuple[Outcome, Outcome | None]]()
    for output in (*handled.first, *handled.then):
        if output.topic not in (VERIFIED, EVALS):
            continue
        record = output.record
        assert isinstance(record, Block | DropMarker)
        for outcome in _outcomes(record):
            outcomes.append((outcome, None))
            kept += not outcome.dropped
            if outcome.dropped:
                dropped[outcome.dropped] = dropped.get(outcome.dropped, 0) + 1
    for reason in (DUPLICATE, "bad frame", "unexpected record"):  # dropped without a marker, but for a few
        markers = sum(
            isinstance(output.record, DropMarker) and output.record.reason == reason for output in handled.then
        )
        if count := handled.dropped.get(reason, 0) - markers:
            dropped[reason] = dropped.get(reason, 0) + count
    return RunStep(kept, dropped, outcomes)


def _outcomes(record: Block | DropMarker) -> list[Outcome]:
    if isinstance(record, DropMarker):
        return [dropped_outcome(record, record.reason)]
    return [kept_outcome(experience) for experience in record.experiences]


def _recorded_scores(table: OutcomeTable, report: ReprocessReport) -> Recorded:

    def recorded(question: Question) -> Verdict | Failure | None:
        known = table.get(question.id)
        for score in () if known is None else known.scores:
            version, _, model = score.version.partition("+")
            if (score.name, version, score.input) == (question.name, question.version, question.input):
                report.reused_scores += 1
                return Verdict(value=score.value, model=model)
        failed = table.get(_failed_key(question.id, f"{question.name}@{question.version}"))
        if failed is None:
            return None
        report.reused_scores += 1
        return Failure(failed.dropped.removeprefix("score "), "as it is on record; --rescore asks again")

    return recorded


def _failed_key(id: str, stamp: str) -> str:
    return f"failed {id} {stamp}"


# collect: outcomes are closures and the experiences of the buffer.


async def collect_recorded(run: ReprocessRun) -> None:
    async for message in _read(run, BUFFER, PROGRESS):
        if isinstance(message.value, Block):
            for member in message.value.experiences:
                run.table.put(kept_outcome(member))
        elif isinstance(message.value, Closure):
            run.table.put(ending(message.value))
            run.table.put(left_out(message.value))


async def collect_steps(run: ReprocessRun) -> AsyncGenerator[RunStep, None]:
    begins = await run.log.bus.beginning_offsets(run.log.name(BUFFER))
    is_trimmed = max(begins.values()) > 0
    for part in run.ranges:
        collector = Collector(run.log, Metrics("reprocess"), part.partition, run.collect)
        try:
            async with aclosing(_folded(run, part, collector)) as steps:
                async for dropped, decisions in steps:
                    compared = [_compared(run.table, decision, is_trimmed) for decision in decisions if run.diff]
                    yield RunStep(
                        kept=sum(len(block.experiences) for decision in decisions for block in decision.blocks),
                        dropped=dropped,
                        outcomes=[pair for pairs, _ in compared for pair in pairs],
                        unrecorded=sum(count for _, count in compared),
                    )
            run.report.open_groups += collector.state.num_open()
        finally:
            collector.close()


async def _folded(
    run: ReprocessRun, part: Range, collector: Collector
) -> AsyncGenerator[tuple[dict[str, int], list[Decision]], None]:
    name = run.log.name(part.topic)
    begin = (await run.log.bus.beginning_offsets(name))[Partition(name, part.partition)]
    collector.begin_at(begin)
    known_from_ms = 0
    batch: list[Record] = []
    async with aclosing(messages_in(run.log, msgspec.structs.replace(part, start=begin))) as messages:
        async for message in messages:
            batch.append(message.record)
            if begin > 0 and not known_from_ms:
                rules = run.collect.rules
                known_from_ms = batch[0].timestamp_ms + rules.deadline_ms + rules.window_ms + rules.session_ms
            if len(batch) < BATCH and message.offset + 1 < part.stop:
                continue
            folded, _ = await collector.fold(batch)
            await collector.save()
            run.on_progress(len(batch))
            for record, result in zip(batch, folded, strict=True):
                if record.offset >= part.start and record.timestamp_ms >= known_from_ms:
                    yield result.dropped, result.decisions
            batch = []


def _compared(
    table: OutcomeTable, decision: Decision, is_trimmed: bool
) -> tuple[list[tuple[Outcome, Outcome | None]], int]:
    closure = decision.closure
    if table.get(ending(closure).key) is None:
        return [], 1 + sum(len(block.experiences) for block in decision.blocks) + len(decision.dropped)
    pairs: list[tuple[Outcome, Outcome | None]] = [(ending(closure), None)]
    missing = table.get(left_out(closure).key)
    for block in decision.blocks:
        for member in block.experiences:
            # Members in the trimmed part of the buffer were not dropped.
            is_own = member.group == closure.group and not is_trimmed
            pairs.append((kept_outcome(member), missing if is_own else None))
    for gone in decision.dropped:  # a member without a record was dropped in the run too; closures give the reasons
        outcome = dropped_outcome(gone.experience, gone.reason)
        pairs.append((outcome, outcome))
    return pairs, 0


async def _read(run: ReprocessRun, *topics: Topic) -> AsyncGenerator[LogMessage, None]:
    for topic in topics:
        async with aclosing(run.log.scan(topic)) as messages:
            async for message in messages:
                run.on_progress(1)
                yield message
