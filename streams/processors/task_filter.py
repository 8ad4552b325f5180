"""Built-in processors of stage tasks."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from infra.chain.chain import Context, Step, run_chain
from infra.chain.processor import Drop, Memory, processor
from schemas import Message, Span, Task, make_experience

MISSING = "task incomplete"
TOO_LONG = "task too long"
UNVERIFIABLE = "not verifiable"
_PASSED = 1.0 - 1e-9


@processor(version=1, of="task", inline=True)
def filter(
    task: Task, *, require: Sequence[str], workflows: Mapping[str, Sequence[str]], max_chars: int
) -> Task | Drop:
    """Drop a task that lacks a field of `require`, or of its workflow's entry in `workflows`, or is longer than
    `max_chars` (0: no limit). Fields: answer, difficulty, parent, meta.<name>.
    """
    needed = [*require, *workflows.get(task.workflow, ())]
    missing = [name for name in needed if not _has(task, name)]
    if missing:
        workflow = f" (workflow {task.workflow})" if task.workflow else ""
        return Drop(MISSING, f"task {task.id} has no {', '.join(missing)}{workflow}")
    length = sum(len(message.content) for message in task.messages)
    if max_chars and length > max_chars:
        return Drop(TOO_LONG, f"task {task.id}: {length} characters, expected at most {max_chars}")
    return task


def _has(task: Task, name: str) -> bool:
    field, dot, key = name.partition(".")
    value = task.meta.get(key) if dot and field == "meta" else getattr(task, name, None)
    return value is not None and value != ""


@processor(version=1, of="task")
class Verifiable:
    """Keeps a task only if each score of `steps` accepts the task's own answer, given as the response."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    async def __call__(self, task: Task) -> Task | Drop:
        if task.answer is None:
            return Drop(UNVERIFIABLE, f"task {task.id} has no answer")
        perfect = make_experience(
            tokens=[0, 0],
            logprobs=[0.0],
            messages=(*task.messages, Message(role="assistant", content=task.answer)),
            id=f"{task.id}.0.0-0-0",
            group=f"{task.id}.0",
            episode=0,
            group_size=1,
            spans=(Span(start=1, stop=2, version=-1, ratio=False),),
            task=task.id,
            answer=task.answer,
            meta=task.meta,
        )
        outcome = await run_chain(self.steps, (perfect,), Context())
        if not outcome.kept:
            return Drop(UNVERIFIABLE, f"task {task.id}: {outcome.dropped[0].reason}: {outcome.dropped[0].detail}")
        values = {step.name: outcome.kept[0].score(step.name) for step in self.steps}
        rejected = [f"{name} {value}" for name, value in values.items() if value is None or value < _PASSED]
        if rejected:
            return Drop(UNVERIFIABLE, f"task {task.id}: its own answer gets {', '.join(rejected)}")
        return task


_SPACES = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)


@processor(version=1, of="task", inline=True)
def clean(task: Task) -> Task:
    """The same task, tidied; a system message and code keep their inner blanks."""
    messages = tuple(
        msgspec.structs.replace(message, content=_SPACES.sub("", message.content).strip()) for message in task.messages
    )
    answer = None if task.answer is None else task.answer.strip()
    return msgspec.structs.replace(task, messages=messages, answer=answer)


DUPLICATE = "duplicate task"


@processor(version=2, of="task", memory=1_000_000)
def dedupe(task: Task, *, memory: Memory, by: Literal["question", "task"]) -> Task | Drop:
    """Drop a task whose question came before under another id; the same id passes again (a redelivery, a repair).

    by: "task" also compares answer and meta, for environments whose prompts are all the same.
    """
    hidden = (task.answer, sorted(task.meta.items())) if by == "task" else ()
    asked = (task.split, task.workflow, task.messages, hidden)
    question = hashlib.sha256(msgspec.msgpack.encode(asked)).hexdigest()[:32]
    first = memory.get(question)
    if first is not None and first != task.id:
        return Drop(DUPLICATE, f"task {task.id}: the same question as {first}")
    memory.set(question, task.id)
    return task


SOLVED = "too easy"
UNSOLVED = "too hard"


@processor(version=1, of="task", inline=True)
def difficulty(task: Task, *, field: str, easiest: float, hardest: float) -> Task | Drop:
    """Set `difficulty` from `meta[field]`, a rate from 0 to 1; drop train tasks outside `easiest` to `hardest`."""
    rate = task.meta.get(field)
    if task.difficulty is None and isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1:
        task = msgspec.structs.replace(task, difficulty=1.0 - rate)
    if task.difficulty is None or task.split != "train":
        return task
    if task.difficulty < easiest:
        return Drop(SOLVED, f"difficulty {task.difficulty:g}, expected {easiest:g} or more")
    if task.difficulty > hardest:
        return Drop(UNSOLVED, f"difficulty {task.difficulty:g}, expected at most {hardest:g}")
    return task
