"""The task book: the tasks there are, how often each was issued, how well it goes. State without clock or client."""

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

from actors.config import MasterConfig
from actors.master.curriculum import choose, running_sum, smoothed
from schemas import Task
from schemas.ids import task_of

MIDDLE_DIFFICULTY = 0.5
TaskPool = tuple[list[Task], list[float]]  # tasks, and their priorities as `curriculum.choose` draws from them


class TaskBook:
    """Tasks by id and by split, with the next round and the success rate of each."""

    KEPT: ClassVar[dict[str, Any]] = {"_rounds": dict[str, int], "_success": dict[str, float]}

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self._rounds: dict[str, int] = {}
        self._success: dict[str, float] = {}
        self._pools: dict[str, TaskPool] = {}

    def add(self, task: Task) -> None:
        """A task was added to the taskset, or replaced there by a task of the same id."""
        known = self.tasks.get(task.id)
        self.tasks[task.id] = task
        for split in {task.split, task.split if known is None else known.split}:
            self._pools.pop(split, None)

    def in_split(self, split: str) -> list[Task]:
        """Tasks of a split from easy to hard (difficulty, then id), so that the order they came in does not matter."""
        return self.pool(split)[0]

    def pool(self, split: str) -> TaskPool:
        """Tasks of a split for the curriculum to draw from."""
        if split not in self._pools:
            tasks = sorted((task for task in self.tasks.values() if task.split == split), key=_difficulty)
            self._pools[split] = tasks, running_sum(task.priority for task in tasks)
        return self._pools[split]

    def chosen(self, pool: TaskPool, config: MasterConfig, sequence: int) -> Task | None:
        """The task for the group of this `sequence`, None where every task has priority 0."""
        tasks, priorities = pool
        index = choose(
            config.curriculum, priorities=priorities, success=lambda index: self.success(tasks[index].id),
            seed=config.seed, sequence=sequence, floor=config.floor, cap=config.cap,
        )  # fmt: skip
        return None if index is None else tasks[index]

    def issued(self, task: str, round: int) -> None:
        self._rounds[task] = max(self._rounds.get(task, 0), round + 1)

    def next_round(self, task: str) -> int:
        """The round that was never issued."""
        return self._rounds.get(task, 0)

    def rewarded(self, group: str, mean_reward: float) -> None:
        task = task_of(group)
        if task in self._rounds:
            self._success[task] = smoothed(self._success.get(task), mean_reward)

    def success(self, task: str) -> float | None:
        """Success rate of a task, None before its first group ended."""
        return self._success.get(task)


def _difficulty(task: Task) -> tuple[float, str]:
    return MIDDLE_DIFFICULTY if task.difficulty is None else task.difficulty, task.id


def task_digest(tasks: Sequence[Task]) -> str:
    """Digest of the ids of tasks, in their order."""
    return hashlib.blake2b("\x00".join(task.id for task in tasks).encode(), digest_size=8).hexdigest()
