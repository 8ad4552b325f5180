"""`reprocess`: a stage once more over any part of the log, as the workers run it, and what that would have changed.

Guarantees: the app that is read is only read; with the configuration and the processor versions that made the record,
nothing comes out different. Memory does not grow with the range: what is compared lies on disk.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from infra.log.log import Log
from infra.settings.config import Floor, duration_s
from schemas.errors import ConfigError
from schemas.topics import BUFFER, DEAD_LETTERS, EXPERIENCES, EXPERTS, PROGRESS, TASKSET_RAW, VERIFIED, Topic
from streams.collect.collector import CollectSettings
from streams.config import StreamsConfig
from streams.reprocess.collecting import run_collect
from streams.reprocess.publisher import ReprocessPublisher, check_target
from streams.reprocess.ranges import LogPlace, Range, parse_place, ranges_of, until_committed
from streams.reprocess.report import ReprocessReport
from streams.reprocess.shelf import OutcomeShelf
from streams.reprocess.tasking import run_tasks
from streams.reprocess.verifying import run_verify
from streams.stages.chain_builder import build_collect, build_tasks, build_verify
from streams.worker import rules_of

StageName = Literal["tasks", "verify", "collect", "dead-letters"]
INPUTS: dict[str, tuple[Topic, ...]] = {
    "tasks": (TASKSET_RAW,),
    "verify": (EXPERIENCES, EXPERTS),
    "collect": (VERIFIED,),
    "dead-letters": (DEAD_LETTERS,),
}
OUTPUTS: dict[str, tuple[Topic, ...]] = {"verify": (VERIFIED,), "collect": (BUFFER, PROGRESS)}


class ReprocessOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to reprocess.

    stage: that is run again. start, stop: places as people write them, see `ranges`. topic: of verify's two inputs, "" for
    both, or for `experiences` where places are offsets. diff: compare with what is recorded. rescore: ask scores again whose
    verdicts are recorded. publish: the app to write to, "" writes nothing.

    Example: ReprocessOrder(stage="verify", start="beginning", stop="end", diff=True)
    """

    stage: StageName
    start: str = "beginning"
    stop: str = "end"
    topic: str = ""
    diff: bool = False
    rescore: bool = False
    publish: str = ""


async def plan(log: Log, order: ReprocessOrder) -> list[Range]:
    """The ranges an order means. Raises ConfigError."""
    start, stop = parse_place(order.start, "--from"), parse_place(order.stop, "--to")
    ranges: list[Range] = []
    for topic in _topics(order, start, stop):
        ranges += await ranges_of(log, topic, start, stop)
    return ranges


async def reprocess(
    log: Log,
    order: ReprocessOrder,
    ranges: Sequence[Range],
    floor: Floor,
    config: StreamsConfig,
    on_progress: Callable[[int], None],
) -> ReprocessReport:
    """Run the order over its ranges with the chain of `config`; floor: keep, partitions. Raises ConfigError."""
    publisher = await _publisher(log, order, floor)
    behind = 0
    if order.diff:
        ranges, behind = await until_committed(log, order.stage, ranges)
    with tempfile.TemporaryDirectory(prefix="headrace-reprocess-") as folder:
        shelf = OutcomeShelf(Path(folder) / "recorded.sqlite")
        try:
            if order.stage == "tasks":
                report = await run_tasks(log, ranges, build_tasks(config), diff=order.diff, on_progress=on_progress)
            elif order.stage == "verify":
                report = await run_verify(
                    log, ranges, build_verify(config), shelf,
                    diff=order.diff, rescore=order.rescore, publisher=publisher, on_progress=on_progress,
                )  # fmt: skip
            else:
                settings = CollectSettings(
                    Path(folder), rules_of(floor, config), build_collect(config, floor.model_path)
                )
                report = await run_collect(
                    log, ranges, settings, shelf, diff=order.diff, publisher=publisher, on_progress=on_progress
                )
        finally:
            shelf.close()
    report.behind = behind
    if publisher is not None:
        await publisher.finish()
        report.published = publisher.count
    return report


async def _publisher(log: Log, order: ReprocessOrder, floor: Floor) -> ReprocessPublisher | None:
    if not order.publish:
        return None
    if order.stage not in OUTPUTS:
        raise ConfigError(f"--publish: got stage {order.stage}, expected one of {', '.join(OUTPUTS)}")
    target = Log(log.bus, order.publish, store=log.store)
    keep_ms = int(duration_s(floor.keep.replay) * 1000)
    partitions = len(await log.bus.partitions(log.name(VERIFIED)))
    await check_target(log, target, OUTPUTS[order.stage], partitions=partitions, keep_ms=keep_ms)
    return ReprocessPublisher(target)


def _topics(order: ReprocessOrder, start: LogPlace, stop: LogPlace) -> tuple[Topic, ...]:
    """The inputs of the stage that are read."""
    if order.stage not in INPUTS:
        raise ConfigError(f"reprocess: got {order.stage!r}, expected one of {', '.join(INPUTS)}")
    topics = INPUTS[order.stage]
    if order.topic:
        if order.topic not in [topic.name for topic in topics]:
            names = ", ".join(topic.name for topic in topics)
            raise ConfigError(f"--topic: got {order.topic!r}, expected one of {names}")
        return tuple(topic for topic in topics if topic.name == order.topic)
    return topics[:1] if start.is_offset or stop.is_offset else topics
