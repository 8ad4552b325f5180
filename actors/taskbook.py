"""The task book: the tasks there are, how often each was issued, how well it goes. State without clock or client."""

from actors.curriculum import smoothed
from schemas import Task
from schemas.ids import task_of

MIDDLE_DIFFICULTY = 0.5


class TaskBook:
    """Tasks by id and by split, with the next round and the success rate of each."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self._rounds: dict[str, int] = {}
        self._success: dict[str, float] = {}
        self._ordered: dict[str, list[Task]] = {}

    def add(self, task: Task) -> None:
        """A task was added to the taskset, or replaced there by one of the same id."""
        known = self.tasks.get(task.id)
        self.tasks[task.id] = task
        self._ordered.pop(task.split, None)
        if known is not None:
            self._ordered.pop(known.split, None)

    def of_split(self, split: str) -> list[Task]:
        """Tasks of a split from easy to hard (difficulty, then id), so that the order they came in does not matter."""
        if split not in self._ordered:
            tasks = [task for task in self.tasks.values() if task.split == split]
            self._ordered[split] = sorted(tasks, key=_difficulty)
        return self._ordered[split]

    def issued(self, task: str, round: int) -> None:
        """Round `round` of a task was issued."""
        self._rounds[task] = max(self._rounds.get(task, 0), round + 1)

    def next_round(self, task: str) -> int:
        """The round that was never issued."""
        return self._rounds.get(task, 0)

    def rewarded(self, group: str, mean_reward: float) -> None:
        """A group of a task ended with this mean reward."""
        task = task_of(group)
        if task in self._rounds:
            self._success[task] = smoothed(self._success.get(task), mean_reward)

    def success(self, task: str) -> float | None:
        """Success rate of a task, None before its first group ended."""
        return self._success.get(task)


def _difficulty(task: Task) -> tuple[float, str]:
    return (MIDDLE_DIFFICULTY if task.difficulty is None else task.difficulty, task.id)
