"""Stage collect once more over a part of `verified`: the workers' own fold, from the beginning of each partition, in a
state of its own that is thrown away.

    verified, from its beginning ─> Collector.fold ─> decisions in the range ─> compare with buffer, progress
                                                                            └─> another app's buffer, progress

What lies before the range is folded and not compared. Where retention took the beginning, groups that may have begun there
are not compared either: their state cannot be known.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from infra.log.bus import Partition, Record
from infra.log.log import Log
from infra.observe.metrics import Metrics
from schemas import Block, Closure
from schemas.topics import BUFFER, PROGRESS
from streams.collect.collector import Collector, CollectSettings
from streams.collect.decision import Decision, Folded
from streams.reprocess.outcome import dropped, ending, ending_key, kept, left_out
from streams.reprocess.publisher import TIME_HEADER, ReprocessPublisher
from streams.reprocess.ranges import Range, TimedEvent, in_time_order, messages_of
from streams.reprocess.report import ReprocessReport
from streams.reprocess.shelf import OutcomeShelf

BATCH = 64
OnProgress = Callable[[int], None]


class Led(TimedEvent, frozen=True):
    """What one record of `verified` led to.

    folded: its decisions and letters. counts: the record lies in the range, and all of its groups are known.
    """

    folded: Folded
    counts: bool


async def run_collect(
    log: Log,
    ranges: Sequence[Range],
    settings: CollectSettings,
    shelf: OutcomeShelf,
    *,
    diff: bool,
    publisher: ReprocessPublisher | None,
    on_progress: OnProgress,
) -> ReprocessReport:
    """Fold the ranges of `verified`; settings.folder is for their states."""
    report = ReprocessReport("collect")
    trimmed = False
    if diff:
        trimmed = await shelve(log, shelf, on_progress)
    collectors = [Collector(log, Metrics("reprocess"), one.partition, settings) for one in ranges]
    try:
        streams = [
            steps_of(log, one, collector, settings, on_progress)
            for one, collector in zip(ranges, collectors, strict=True)
        ]
        async with aclosing(in_time_order(streams)) as steps:
            async for step in steps:
                assert isinstance(step, Led)
                if step.counts:
                    report.records += 1
                    await _take(report, shelf, step, diff, trimmed, publisher)
        report.open_groups = sum(collector.num_open() for collector in collectors)
    finally:
        for collector in collectors:
            collector.close()
    if diff:
        report.finish(shelf)
    return report


async def steps_of(
    log: Log, one: Range, collector: Collector, settings: CollectSettings, on_progress: OnProgress
) -> AsyncGenerator[Led, None]:
    """Fold a partition from its beginning to the end of the range."""
    begin = (await log.bus.beginning_offsets(log.name(one.topic)))[Partition(log.name(one.topic), one.partition)]
    collector.begin_at(begin)
    whole = msgspec.structs.replace(one, start=begin)
    known_from_ms = 0
    batch: list[Record] = []
    async with aclosing(messages_of(log, whole)) as messages:
        async for message in messages:
            batch.append(at_its_time(message.record))
            if begin > 0 and not known_from_ms:
                rules = settings.rules
                known_from_ms = batch[0].timestamp_ms + rules.deadline_ms + rules.window_ms + rules.session_ms
            if len(batch) < BATCH and message.offset + 1 < one.stop:
                continue
            folded, _ = await collector.fold(batch)
            await collector.save()
            on_progress(len(batch))
            for record, what in zip(batch, folded, strict=True):
                counts = record.offset >= one.start and record.timestamp_ms >= known_from_ms
                yield Led(record.timestamp_ms, what, counts)
            batch = []


def at_its_time(record: Record) -> Record:
    """The record at its log time: the broker's stamp, or in a counterfactual app the time that the record carries."""
    for name, value in record.headers:
        if name == TIME_HEADER and value.isdigit():
            return msgspec.structs.replace(record, timestamp_ms=int(value))
    return record


async def shelve(log: Log, shelf: OutcomeShelf, on_progress: OnProgress) -> bool:
    """Put aside what `buffer` and `progress` record; True if the beginning of `buffer` is gone."""
    begins = await log.bus.beginning_offsets(log.name(BUFFER))
    for topic in (BUFFER, PROGRESS):
        async with aclosing(log.read_all(topic)) as messages:
            async for message in messages:
                on_progress(1)
                if isinstance(message.value, Block):
                    for member in message.value.experiences:
                        shelf.put(kept(member))
                elif isinstance(message.value, Closure):
                    shelf.put(ending(message.value))
                    shelf.put(left_out(message.value))
    return max(begins.values()) > 0


async def _take(
    report: ReprocessReport,
    shelf: OutcomeShelf,
    step: Led,
    diff: bool,
    trimmed: bool,
    publisher: ReprocessPublisher | None,
) -> None:
    """Count, compare and publish what one record decided."""
    for reason, count in step.folded.dropped.items():
        report.drop(reason, count)
    for decision in step.folded.decisions:
        report.kept += sum(len(block.experiences) for block in decision.blocks)
        if diff:
            compare(report, shelf, decision, trimmed)
        if publisher is not None:
            for block in decision.blocks:
                await publisher.send(BUFFER, block, step.time_ms)
            await publisher.send(PROGRESS, decision.closure, step.time_ms)


def compare(report: ReprocessReport, shelf: OutcomeShelf, decision: Decision, trimmed: bool) -> None:
    """One decision with what is recorded of its closure and of its members."""
    closure = decision.closure
    if shelf.get(ending_key(closure)) is None:
        report.unrecorded += 1 + sum(len(block.experiences) for block in decision.blocks) + len(decision.dropped)
        return
    report.compare(shelf, ending(closure))
    missing = shelf.get(left_out(closure).key)
    for block in decision.blocks:
        for member in block.experiences:
            # What the trimmed part of the buffer held was not dropped.
            own = member.group == closure.group and not trimmed
            report.compare(shelf, kept(member), missing if own else None)
    for gone in decision.dropped:
        outcome = dropped(gone.experience, gone.reason)
        if shelf.get(outcome.key) is not None:
            report.compare(shelf, outcome)
        elif shelf.meet(outcome.key):  # dropped then too; the closures say whether for the same reasons
            report.compared += 1
