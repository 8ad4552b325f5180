"""The task book: tasks, how often each was issued, and which one the next group runs. State without clock or client.

Groups pass over all tasks of a split again and again, each pass in an order of its own. A task comes in proportion to its
priority, which a processor of stage tasks may have set; 0 is never drawn. The draws of a pass fall one into each of as many
equal stretches of the summed priorities (systematic sampling, Madow 1949), so that the tasks of a step differ as far as they
can: fewer repeated tasks give less noise in the gradient. The same seed and sequence choose the same task.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Any, ClassVar

from schemas import Task

MIDDLE_DIFFICULTY = 0.5
TaskPool = tuple[list[Task], list[float]]  # tasks, and the running sum of their priorities


class TaskBook:
    """Tasks by id and by split, with the next round of each."""

    KEPT: ClassVar[dict[str, Any]] = {"_rounds": dict[str, int]}

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self._rounds: dict[str, int] = {}
        self._pools: dict[str, TaskPool] = {}

    def add(self, task: Task) -> None:
        """A task was added to the taskset, or replaced there by a task of the same id."""
        known = self.tasks.get(task.id)
        self.tasks[task.id] = task
        for split in {task.split, task.split if known is None else known.split}:
            self._pools.pop(split, None)

    def pool(self, split: str) -> TaskPool:
        """Tasks of a split from easy to hard (difficulty, then id), so that the order they came in does not matter."""
        if split not in self._pools:
            tasks = sorted((task for task in self.tasks.values() if task.split == split), key=_difficulty)
            self._pools[split] = tasks, list(accumulate(task.priority for task in tasks))
        return self._pools[split]

    def issued(self, task: str, round: int) -> None:
        self._rounds[task] = max(self._rounds.get(task, 0), round + 1)

    def next_round(self, task: str) -> int:
        """The round that was never issued."""
        return self._rounds.get(task, 0)


def chosen(pool: TaskPool, *, seed: int, sequence: int) -> Task | None:
    """The task for the group of this `sequence`, None where every task has priority 0."""
    tasks, priorities = pool
    total = priorities[-1]
    if not total:
        return None
    stretch = in_pass(len(tasks), seed=seed, sequence=sequence)
    point = (stretch + Random(f"{seed}/{sequence}").random()) / len(tasks) * total
    return tasks[min(bisect_right(priorities, point), len(tasks) - 1)]  # a task of priority 0 has no stretch


def in_pass(num: int, *, seed: int, sequence: int) -> int:
    """A number from 0 to num - 1 for this `sequence`: each comes once in the `num` sequences of a pass.

    Steps around the ring by a width that has no factor in common with `num`, so that nothing is shuffled or kept.
    """
    turn, place = divmod(sequence, num)
    random = Random(f"{seed}/pass/{turn}")
    width = random.randint(1, num)
    while math.gcd(width, num) != 1:
        width = random.randint(1, num)
    return (random.randrange(num) + place * width) % num


def _difficulty(task: Task) -> tuple[float, str]:
    return MIDDLE_DIFFICULTY if task.difficulty is None else task.difficulty, task.id


def task_digest(tasks: Sequence[Task]) -> str:
    """Digest of the ids of tasks, in their order."""
    return hashlib.blake2b("\x00".join(task.id for task in tasks).encode(), digest_size=8).hexdigest()
