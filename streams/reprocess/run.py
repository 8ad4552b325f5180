"""`reprocess`: run a stage again over any part of the log, as the workers run it, and compare with the record.

Guarantees: the app is only read; with the configuration and the processor versions that made the record, nothing comes out
different. Memory does not grow with the range: outcomes to compare with are on disk.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from infra.log.log import Log
from infra.settings.config import Floor
from schemas.errors import ConfigError
from schemas.topics import DEAD_LETTERS, EXPERIENCES, EXPERTS, VERIFIED, Topic
from streams.collect.collector import CollectSettings
from streams.collect.rules import collect_rules
from streams.config import StreamsConfig
from streams.reprocess import stages
from streams.reprocess.ranges import Range, find_ranges, is_offset, until_committed
from streams.reprocess.report import OutcomeTable, ReprocessReport
from streams.reprocess.stages import ReprocessRun
from streams.stages.chain_builder import build_collect, build_verify

StageName = Literal["verify", "collect", "dead-letters"]
INPUTS: dict[str, tuple[Topic, ...]] = {
    "verify": (EXPERIENCES, EXPERTS),
    "collect": (VERIFIED,),
    "dead-letters": (DEAD_LETTERS,),
}
STAGES = {
    "verify": (stages.verify_recorded, stages.verify_steps),
    "collect": (stages.collect_recorded, stages.collect_steps),
}


class ReprocessOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to reprocess.

    stage: to run again. start, stop: places as people write them, see `ranges`. topic: one of verify's two inputs; "" for both,
    or for `experiences` if places are offsets. diff: compare with the record. rescore: ask scores again whose verdicts are
    recorded.
    """

    stage: StageName
    start: str = "beginning"
    stop: str = "end"
    topic: str = ""
    diff: bool = False
    rescore: bool = False


async def plan(log: Log, order: ReprocessOrder) -> list[Range]:
    found = [await find_ranges(log, topic, order.start, order.stop) for topic in _topics(order)]
    return [part for ranges in found for part in ranges]


async def reprocess(
    log: Log,
    order: ReprocessOrder,
    ranges: Sequence[Range],
    floor: Floor,
    config: StreamsConfig,
    on_progress: Callable[[int], None],
) -> ReprocessReport:
    """Run the order over its ranges with the chain of `config`; floor: keep, partitions. Raises ConfigError."""
    report = ReprocessReport(order.stage)
    if order.diff:
        ranges, report.behind = await until_committed(log, order.stage, ranges)
    build = build_collect if order.stage == "collect" else build_verify
    steps = build(config, floor.model_path)
    record, run_again = STAGES[order.stage]
    with tempfile.TemporaryDirectory(prefix="headrace-reprocess-") as folder:
        table = OutcomeTable()
        settings = CollectSettings(Path(folder), collect_rules(floor, config), steps)
        run = ReprocessRun(log, ranges, steps, report, table, settings, order.diff, order.rescore, on_progress)
        try:
            if order.diff or (order.stage == "verify" and stages.asks_scores(run) and not order.rescore):
                await record(run)
            async for step in run_again(run):
                report.take(step.kept, step.dropped, step.records)
                if order.diff:
                    report.unrecorded += step.unrecorded
                    for outcome, absent in step.outcomes:
                        report.compare(table, outcome, absent)
            if order.diff:
                report.finish(table)
        finally:
            table.close()
    return report


def _topics(order: ReprocessOrder) -> tuple[Topic, ...]:
    if order.stage not in INPUTS:
        raise ConfigError(f"reprocess: got {order.stage!r}, expected one of {', '.join(INPUTS)}")
    topics = INPUTS[order.stage]
    if order.topic:
        if order.topic not in [topic.name for topic in topics]:
            names = ", ".join(topic.name for topic in topics)
            raise ConfigError(f"--topic: got {order.topic!r}, expected one of {names}")
        return tuple(topic for topic in topics if topic.name == order.topic)
    return topics[:1] if is_offset(order.start) or is_offset(order.stop) else topics
