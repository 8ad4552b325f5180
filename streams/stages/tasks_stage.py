"""Stage tasks: `taskset.raw` to `taskset`, through the chain of tasks.

Guarantees: every task of a readable record is in `taskset` or dead-lettered with its reason; the same task comes out under
the same id, so a redelivery changes nothing. The stage rebuilds the memory of its steps (known questions) from `taskset`
before the first record after a start or a rebalance. It then knows a question as later steps left it, and none that they
dropped. Two workers that hold different partitions do not see each other's newest tasks.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from infra.chain.chain import ChainTurn, Context, Step, call_step, new_memories, run_task_chain, task_fault
from infra.chain.processor import Memory
from infra.log.bus import Partition
from infra.log.log import Log, LogMessage
from schemas import Task
from schemas.topics import TASKSET
from streams.stages.driver import Moved
from streams.stages.stage import Handled, Output, count_faults, letter

STAGE = "tasks"
BAD_TASK = "bad task"


class TaskStage:
    """The chain of tasks, with one set of memories for all partitions: any of them may have the same question."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._memories: dict[str, Memory] | None = None
        self._remembering = asyncio.Lock()

    def forget(self) -> None:
        self._memories = None

    async def recall(self, log: Log, at: Partition, before: int, moved: Moved) -> None:
        """Rebuild the memories, for all partitions, from `taskset`."""
        async with self._remembering:
            if self._memories is not None:
                return
            memories = new_memories(self._steps)
            if memories:
                async with aclosing(log.scan(TASKSET)) as messages:
                    async for message in messages:
                        moved()
                        if isinstance(message.value, Task):
                            await self._remember(message.value, memories)
            self._memories = memories

    async def handle(self, message: LogMessage, turn: ChainTurn | None = None) -> Handled:
        task = message.value
        if message.error is not None or not isinstance(task, Task):
            reason = "bad frame" if message.error is not None else "unexpected record"
            error = str(message.error or f"got {type(task).__name__}, expected a task")
            return Handled(then=(letter(message, STAGE, reason, error),), dropped={reason: 1})
        if fault := task_fault(task):
            return Handled(then=(letter(message, STAGE, BAD_TASK, fault),), dropped={BAD_TASK: 1}, num_in=1)
        if self._memories is None:
            self._memories = new_memories(self._steps)
        context = Context(record_offset=message.record.offset, memories=self._memories, turn=turn)
        kept, gone = await run_task_chain(self._steps, task, context)
        return Handled(
            first=tuple(Output(TASKSET, passed) for passed in kept),
            then=tuple(letter(message, STAGE, dropped.reason, dropped.detail) for dropped in gone),
            dropped=dict(Counter(dropped.reason for dropped in gone)),
            num_in=1,
            num_out=len(kept),
            failed=count_faults((dropped.reason, dropped.processor) for dropped in gone),
        )

    def failed(self, message: LogMessage, reason: str, error: str) -> Handled:
        return Handled(then=(letter(message, STAGE, reason, error),), dropped={reason: 1}, num_in=1)

    async def _remember(self, task: Task, memories: dict[str, Memory]) -> None:
        context = Context(memories=memories)
        for step in self._steps:
            if step.memory:
                await call_step(step, [msgspec.structs.replace(task, issued=None)], context)
