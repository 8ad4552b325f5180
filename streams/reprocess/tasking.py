"""Stage tasks once more over a part of `taskset.raw`, compared with `taskset` and with the dead letters of the stage."""

from collections.abc import Callable, Sequence
from contextlib import aclosing

from infra.chain.chain import Step
from infra.log.log import Log
from schemas import DeadLetter, Task
from schemas.topics import DEAD_LETTERS, TASKSET
from streams.reprocess.outcome import Difference, Reprocessed, task_content
from streams.reprocess.ranges import Range
from streams.reprocess.report import ReprocessReport
from streams.reprocess.verifying import made_of
from streams.stages.tasks_stage import STAGE, TaskStage

OnProgress = Callable[[int], None]


class Recorded:
    """What the log says of tasks: contents by id (the topic may keep several), and drops by where the raw task lay."""

    def __init__(self) -> None:
        self.contents: dict[str, set[str]] = {}
        self.reasons: dict[tuple[int, int], str] = {}


async def run_tasks(
    log: Log, ranges: Sequence[Range], steps: Sequence[Step], *, diff: bool, on_progress: OnProgress
) -> ReprocessReport:
    """Pass the ranges of `taskset.raw` through `steps` again."""
    report = ReprocessReport("tasks")
    recorded = await _recorded(log, on_progress) if diff else Recorded()
    newest: dict[str, str] = {}  # of a task that is there several times the last one counts, as in the topic
    for one in ranges:
        async with aclosing(made_of(log, one, TaskStage(steps, log))) as all_made:
            async for made in all_made:
                on_progress(1)
                report.records += 1
                task = made.message.value
                name = task.id if isinstance(task, Task) else f"{one.topic.name}/{one.partition}@{made.message.offset}"
                reason = next(iter(made.handled.dropped), "")
                report.count(Reprocessed(name, dropped=reason))
                for output in made.handled.first:
                    assert isinstance(output.record, Task)
                    newest[output.record.id] = task_content(output.record)
                if diff:
                    _compare(
                        report, recorded, name, reason, recorded.reasons.get((one.partition, made.message.offset), "")
                    )
    if diff:
        for name, content in newest.items():
            if name in recorded.contents and content not in recorded.contents[name]:
                report.note(Difference("other content", "", "", ""), name)
        report.changes.sort(key=lambda change: (-change.count, change.kind, change.reason))
    return report


def _compare(report: ReprocessReport, recorded: Recorded, name: str, new: str, old: str) -> None:
    if not old and name not in recorded.contents:
        report.unrecorded += 1
        return
    report.compared += 1
    if new and not old:
        report.note(Difference("newly dropped", new, "kept", new), name)
    elif old and not new:
        report.note(Difference("no longer dropped", old, old, "kept"), name)
    elif old != new:
        report.note(Difference("dropped for another reason", old, old, new), name)


async def _recorded(log: Log, on_progress: OnProgress) -> Recorded:
    recorded = Recorded()
    async with aclosing(log.read_all(TASKSET)) as messages:
        async for message in messages:
            on_progress(1)
            if isinstance(message.value, Task):
                recorded.contents.setdefault(message.value.id, set()).add(task_content(message.value))
    async with aclosing(log.read_all(DEAD_LETTERS)) as messages:
        async for message in messages:
            on_progress(1)
            if isinstance(message.value, DeadLetter) and message.value.stage == STAGE:
                recorded.reasons[message.value.partition, message.value.offset] = message.value.reason
    return recorded
