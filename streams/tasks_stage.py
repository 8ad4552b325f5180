"""Stage tasks: `taskset.raw` to `taskset`, cleaned, each question once.

Guarantee: the same tasks give the same ids, so a redelivery changes nothing; a task that cannot be used is
dead-lettered with the field that is wrong.
"""

import hashlib
import re

import msgspec

from infra.bus.log import Message as LogMessage
from infra.processor import Memory
from schemas import Task
from schemas.topics import TASKSET
from streams.stage import Handled, Output, letter

STAGE = "tasks"
MEMORY = 1_000_000
_SPACES = re.compile(r"[ \t]+$", re.MULTILINE)


class TaskCleaner:
    """Clean and exact dedupe, remembering the questions of each partition."""

    def __init__(self) -> None:
        self._seen: dict[int, Memory] = {}

    def forget(self) -> None:
        """Another worker may have had the partitions in between: remember nothing of them."""
        self._seen.clear()

    async def handle(self, message: LogMessage) -> Handled:
        """One record of `taskset.raw`."""
        task = message.value
        if message.error is not None or not isinstance(task, Task):
            reason = "bad frame" if message.error is not None else "unexpected record"
            error = str(message.error or f"got {type(task).__name__}, expected a task")
            return Handled(then=(letter(message, STAGE, reason, error),), dropped={reason: 1})
        if fault := task_fault(task):
            return Handled(then=(letter(message, STAGE, "bad task", fault),), dropped={"bad task": 1}, num_in=1)
        cleaned = clean(task)
        seen = self._seen.setdefault(message.record.partition, Memory(MEMORY))
        question = fingerprint(cleaned)
        first = seen.get(question)
        if first is not None and first != task.id:
            gone = letter(message, STAGE, "duplicate task", f"task {task.id}: the same question as {first}")
            return Handled(then=(gone,), dropped={"duplicate task": 1}, num_in=1)
        seen.set(question, task.id)
        return Handled(first=(Output(TASKSET, cleaned),), num_in=1, num_out=1)

    def failed(self, message: LogMessage, reason: str, error: str) -> Handled:
        """What is left of a record that could not be handled or published."""
        return Handled(then=(letter(message, STAGE, reason, error),), dropped={reason: 1}, num_in=1)


def task_fault(task: Task) -> str:
    """What makes a task unusable, "" for nothing."""
    if not task.id or task.id.endswith("."):
        return f"id: got {task.id!r}, expected a name that does not end in a dot"
    if not any(message.content.strip() for message in task.messages):
        return f"messages: task {task.id} asks nothing"
    return ""


def clean(task: Task) -> Task:
    """The task without blanks at line ends, and without the blanks around question and answer."""
    messages = tuple(
        msgspec.structs.replace(message, content=_SPACES.sub("", message.content).strip()) for message in task.messages
    )
    answer = None if task.answer is None else task.answer.strip()
    return msgspec.structs.replace(task, messages=messages, answer=answer)


def fingerprint(task: Task) -> str:
    """Hash of what is asked: roles and texts, split and workflow, not the id."""
    asked = (task.split, task.workflow, task.messages)
    return hashlib.sha256(msgspec.msgpack.encode(asked)).hexdigest()[:32]
