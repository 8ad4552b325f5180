"""Tasks an explorer has taken and not started: what may start under which version. State without clock, task or client.

Guarantees: a group starts only under a version it allows, the oldest first; an eval only under exactly its version; the
same attempt never starts twice, and of two attempts of one group that both wait only the newer starts.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from schemas import Issued, Task

_MAX_REMEMBERED = 20_000


class Waiting:
    """Rollouts by (min_version, sequence), evals by version."""

    def __init__(self) -> None:
        self._rollouts: list[tuple[int, int, int, Task]] = []
        self._evals: dict[int, deque[Task]] = {}
        self._attempts: dict[str, int] = {}
        self._count = 0
        self._num_evals = 0

    def __len__(self) -> int:
        return len(self._rollouts) + self._num_evals

    def add(self, task: Task) -> bool:
        """Take a task; False if this attempt, or a newer one, was taken before."""
        issued = issued_of(task)
        if issued.attempt <= self._attempts.get(issued.group, -1):
            return False
        self._attempts[issued.group] = issued.attempt
        if len(self._attempts) > _MAX_REMEMBERED:
            del self._attempts[next(iter(self._attempts))]
        if issued.suite:
            self._evals.setdefault(issued.version, deque()).append(task)
            self._num_evals += 1
        else:
            self._count += 1
            heappush(self._rollouts, (issued.min_version, issued.sequence, self._count, task))
        return True

    def rollout(self, version: int) -> Task | None:
        """The next group that `version` may sample; it no longer waits."""
        while self._rollouts and self._rollouts[0][0] <= version:
            task = heappop(self._rollouts)[3]
            issued = issued_of(task)
            if issued.attempt >= self._attempts.get(issued.group, issued.attempt):
                return task
        return None

    def peek_episodes(self, version: int) -> int:
        """Episodes of the next group that `version` may sample, 0 if there is none."""
        if not self._rollouts or self._rollouts[0][0] > version:
            return 0
        return issued_of(self._rollouts[0][3]).num_episodes

    def eval(self, version: int) -> Task | None:
        """The next eval of exactly `version`; it no longer waits."""
        tasks = self._evals.get(version)
        if not tasks:
            return None
        task = tasks.popleft()
        self._num_evals -= 1
        if not tasks:
            del self._evals[version]
        return task

    def passed(self, version: int) -> list[Task]:
        """Evals of versions below `version`: this engine cannot answer them any more, so they no longer wait."""
        old = [known for known in self._evals if known < version]
        tasks = [task for known in old for task in self._evals.pop(known)]
        self._num_evals -= len(tasks)
        return tasks

    def remove(self, group: str) -> list[Task]:
        """Rollouts of a group, which no longer wait."""
        gone = [one for one in self._rollouts if issued_of(one[3]).group == group]
        if gone:
            self._rollouts = [one for one in self._rollouts if one not in gone]
            heapify(self._rollouts)
        return [one[3] for one in gone]

    def held(self) -> Iterator[Issued]:
        """Of each task that waits, how it is to be run."""
        for *_, task in self._rollouts:
            yield issued_of(task)
        for tasks in self._evals.values():
            yield from map(issued_of, tasks)

    def versions(self) -> frozenset[int]:
        """Versions that evals wait for."""
        return frozenset(self._evals)


def issued_of(task: Task) -> Issued:
    """How the master wants the task run; raises ValueError for a task that was not issued."""
    if task.issued is None:
        raise ValueError(f"task {task.id}: got no `issued`, expected one on every record of `tasks`")
    return task.issued
