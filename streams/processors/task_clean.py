"""clean: a task without blanks at line ends, and without the blanks around question and answer."""

import re

import msgspec

from infra.chain.processor import processor
from schemas import Task

_SPACES = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)


@processor(version=1, of="task", inline=True)
def clean(task: Task) -> Task:
    """The same task, tidied; a system message and code keep their inner blanks."""
    messages = tuple(
        msgspec.structs.replace(message, content=_SPACES.sub("", message.content).strip()) for message in task.messages
    )
    answer = None if task.answer is None else task.answer.strip()
    return msgspec.structs.replace(task, messages=messages, answer=answer)
