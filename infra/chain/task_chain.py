"""The chain of tasks: one ordered list of steps, each of which lets a task pass, edits it, varies it or drops it.

Guarantees: a task that goes in comes out exactly once, kept or dropped with a reason and the step that dropped it; what a
step makes from it has an id of its own and names it as its parent; whatever a step raises, returns or waits for stays its
own problem.

    task step   Task -> Task | [Task, ...] | Drop        a list holds the task itself, and variations of it
"""

from collections.abc import Sequence

import msgspec

from infra.chain.calls import MAX_DETAIL_CHARS, Failure
from infra.chain.chain import Context, Step, call_step, step_extras
from infra.chain.faults import drop_fault
from infra.chain.processor import Drop
from schemas import Task

NONSENSE = "processor returned nonsense"


class GoneTask(msgspec.Struct, frozen=True):
    """A task that goes no further. reason: a constant phrase; detail: what exactly; processor: the step's stamp.

    task: that was dropped.

    Example: GoneTask(task, "duplicate task", "the same question as add-3745", "dedupe@1")
    """

    task: Task
    reason: str
    detail: str = ""
    processor: str = ""


class TaskOutcome(msgspec.Struct, frozen=True):
    """The task and what was made from it: kept and dropped.

    kept: what passed. dropped: the rest.
    """

    kept: tuple[Task, ...]
    dropped: tuple[GoneTask, ...]


async def run_task_chain(steps: Sequence[Step], task: Task, context: Context) -> TaskOutcome:
    """Pass one task, and the variations made on the way, through the steps. Never raises for what a step does."""
    members = [task]
    dropped: list[GoneTask] = []
    last_memory = max((index for index, step in enumerate(steps) if step.memory), default=-1)
    for index, step in enumerate(steps):
        if not members:
            break
        if context.turn is not None and step.memory:
            await context.turn.wait()
        elif context.turn is not None and index == last_memory + 1:
            context.turn.end()
        results = await call_step(step, members, step_extras(step, context))
        passed: list[Task] = []
        for member, result in zip(members, results, strict=True):
            following = _settled(step, member, result, {known.id for known in (*members, *passed)})
            if isinstance(following, GoneTask):
                dropped.append(following)
            else:
                passed += following
        members = passed
    return TaskOutcome(kept=tuple(members), dropped=tuple(dropped))


def _settled(step: Step, member: Task, result: object, known: set[str]) -> list[Task] | GoneTask:
    if isinstance(result, Failure):
        return GoneTask(member, f"processor {result.kind}", f"{step.stamp}: {result.detail}", step.stamp)
    if isinstance(result, Drop):
        if fault := drop_fault(result):
            return GoneTask(member, NONSENSE, f"{step.stamp}: {fault}", step.stamp)
        return GoneTask(member, result.reason, str(result.detail)[:MAX_DETAIL_CHARS], step.stamp)
    results = list(result) if isinstance(result, list | tuple) else [result]
    fault = next((fault for result in results if (fault := task_fault(result))), "")
    tasks = [result for result in results if isinstance(result, Task)]
    if not fault:
        fault = _family_fault(member, tasks, known)
    return GoneTask(member, NONSENSE, f"{step.stamp}: {fault}", step.stamp) if fault else tasks


def _family_fault(member: Task, tasks: Sequence[Task], known: set[str]) -> str:
    """Fault of a task and its variations together, "" for none; `known` takes the new ids."""
    own = sum(task.id == member.id for task in tasks)
    if own != 1:
        return f"id: got {member.id} {own} times, expected the task itself once, or Drop(reason)"
    for task in tasks:
        if task.id == member.id:
            continue
        if task.parent != member.id:
            return f"parent: got {task.parent!r} on {task.id}, expected {member.id!r}, which it was made from"
        if task.id in known:
            return f"id: {task.id} is there already"
        known.add(task.id)
    return ""


def task_fault(task: object) -> str:
    """Reason why a task is unusable, "" for none."""
    if not isinstance(task, Task):
        return f"got {type(task).__name__}, expected a Task, a list of them, or Drop"
    try:
        msgspec.convert(msgspec.to_builtins(task), Task)
    except Exception as error:  # an object of a shape that cannot even be looked at
        return f"task: {error}"
    if not task.id or task.id.endswith("."):
        return f"id: got {task.id!r}, expected a name that does not end in a dot"
    if not any(message.content.strip() for message in task.messages):
        return f"messages: task {task.id} asks nothing"
    return ""
