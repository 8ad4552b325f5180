"""The explorer's scheduler of waiting and running groups, shared by the loops of the explorer in one event loop.

Guarantees: a group starts only under a version it allows, the oldest first; an eval only under exactly its version; the
same attempt never starts twice, and of two attempts of one group that both wait only the newer starts.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from heapq import heapify, heappop, heappush

from actors.engines.reload import ReloadGate
from schemas import Closure, Drawn, Issued, Task

_MAX_REMEMBERED = 20_000


class Waiting:
    """Tasks that were taken and not started: rollouts by (min_version, sequence), evals by version."""

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
        issued = require_issued(task)
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
            issued = require_issued(task)
            if issued.attempt >= self._attempts.get(issued.group, issued.attempt):
                return task
        return None

    def peek_episodes(self, version: int) -> int:
        """Episodes of the next group that `version` may sample, 0 if there is none."""
        if not self._rollouts or self._rollouts[0][0] > version:
            return 0
        return require_issued(self._rollouts[0][3]).num_episodes

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
        gone = [waiting for waiting in self._rollouts if require_issued(waiting[3]).group == group]
        if gone:
            self._rollouts = [waiting for waiting in self._rollouts if waiting not in gone]
            heapify(self._rollouts)
        return [waiting[3] for waiting in gone]

    def held(self) -> Iterator[Issued]:
        for *_, task in self._rollouts:
            yield require_issued(task)
        for tasks in self._evals.values():
            yield from map(require_issued, tasks)

    def versions(self) -> frozenset[int]:
        return frozenset(self._evals)


def require_issued(task: Task) -> Issued:
    """The `issued` of a task; raises ValueError for a task that was not issued."""
    if task.issued is None:
        raise ValueError(f"task {task.id}: got no `issued`, expected one on every record of `tasks`")
    return task.issued


class Stop:
    """The stop of a running group."""

    def __init__(self) -> None:
        self.is_set = False
        self._episodes: list[asyncio.Task[object]] = []

    def watch(self, episode: "asyncio.Task[object]") -> None:
        """Register an episode to cancel; cancel it at once if the group is already stopped."""
        self._episodes.append(episode)
        if self.is_set:
            episode.cancel()

    def now(self) -> None:
        """Cancel all episodes of the group. Idempotent."""
        if self.is_set:
            return
        self.is_set = True
        for episode in self._episodes:
            episode.cancel()


def groups_over(record: object) -> tuple[str, ...]:
    """Groups whose missing episodes can no longer be trained, according to a record of `progress`."""
    if isinstance(record, Closure) and record.revision == 0 and record.sequence >= 0:  # evals have none
        return (record.group,)
    return tuple(record.dropped) if isinstance(record, Drawn) else ()


class Scheduler(ReloadGate):
    """Bounds concurrent episodes, knows which evals run under which version, and counts idle time.

    changed: set on every change; the dispatcher waits on it. settled: the tasks in the log at the start, or as many as an
    explorer holds, have been taken. closed: no task starts any more. As the gate of its explorer's engine: evals need exactly
    one version.
    """

    def __init__(self, *, max_episodes: int) -> None:
        self.waiting = Waiting()
        self.changed = asyncio.Event()
        self.settled = asyncio.Event()
        self._reloading = False
        self.closed = False
        self.num_episodes = 0
        self.num_groups = 0
        self._running: dict[tuple[str, int], Stop] = {}
        self._max_episodes = max_episodes
        self._evals: dict[int, int] = {}
        self._ended = asyncio.Event()
        self._started = asyncio.Event()
        self._began: float | None = None
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def take(self, version: int) -> Task | None:
        """The next task to start under `version`, counted as running; evals first. None if nothing may start now."""
        if self.closed or self.num_episodes >= self._max_episodes:
            return None
        task = None if self._reloading else self.waiting.eval(version)
        if task is None:
            size = self.waiting.peek_episodes(version)
            if self.num_episodes and self.num_episodes + size > self._max_episodes:
                return None
            task = self.waiting.rollout(version)
        if task is not None:
            self._begin(task)
        return task

    def end(self, task: Task) -> None:
        issued = require_issued(task)
        self._running.pop((issued.group, issued.attempt), None)
        self.num_groups -= 1
        self.num_episodes -= issued.num_episodes
        if issued.suite:
            self._evals[issued.version] -= 1
            if not self._evals[issued.version]:
                del self._evals[issued.version]
        if not self.num_groups:
            self._idle_since = time.monotonic()
        self._ended.set()
        self.changed.set()

    def stop_for(self, task: Task) -> Stop:
        """The stop of a task that was taken."""
        issued = require_issued(task)
        return self._running[issued.group, issued.attempt]

    def over(self, group: str) -> list[Task]:
        """End a group of episodes: stop its running tasks, and remove and return its waiting tasks."""
        for (name, _), stop in self._running.items():
            if name == group:
                stop.now()
        waited = self.waiting.remove(group)
        if waited:
            self._started.set()
        return waited

    async def next_start(self) -> None:
        """Wait until a task starts or leaves the queue. For a single waiter."""
        self._started.clear()
        await self._started.wait()

    def pass_over(self, version: int) -> list[Task]:
        """Evals that wait for a version below `version`; they no longer wait."""
        passed = self.waiting.passed(version)
        if passed:
            self._started.set()
        return passed

    async def next_end(self, timeout_s: float) -> None:
        """Wait until a task ends, at most `timeout_s`. For a single waiter."""
        self._ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()

    async def known(self) -> None:
        """Return once the scheduler has the tasks that the log had at the start."""
        await self.settled.wait()

    def wanted(self) -> frozenset[int]:
        return self.waiting.versions()

    async def released(self, version: int, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no evals of exactly `version` wait or run; True if so."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while version in self._evals or version in self.waiting.versions():
            if (left := deadline - clock()) <= 0:
                return False
            await self.next_end(left)
        return True

    @contextmanager
    def reload(self) -> Iterator[None]:
        """Context in which no eval begins."""
        self._reloading = True
        try:
            yield
        finally:
            self._reloading = False
            self.changed.set()

    def holds(self, limit: int) -> dict[str, int]:
        """Groups and eval tasks that run or wait, to their newest attempt; running tasks first, at most `limit`."""
        held: dict[str, int] = {}
        for group, attempt in (
            *sorted(self._running),
            *((issued.group, issued.attempt) for issued in self.waiting.held()),
        ):
            if group in held or len(held) < limit:
                held[group] = max(attempt, held.get(group, 0))
        return held

    def idle_share(self) -> float:
        """Share of the time since the first group during which nothing ran."""
        elapsed_s, busy_s = self._spent()
        return 1.0 - busy_s / elapsed_s if elapsed_s else 0.0

    def busy_s(self) -> float:
        """Seconds since the first group during which something ran."""
        return self._spent()[1]

    def _spent(self) -> tuple[float, float]:
        if self._began is None:
            return 0.0, 0.0
        now = time.monotonic()
        idle_s = self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)
        return now - self._began, now - self._began - idle_s

    def _begin(self, task: Task) -> None:
        issued = require_issued(task)
        self._started.set()
        self._running[issued.group, issued.attempt] = Stop()
        self.num_groups += 1
        self.num_episodes += issued.num_episodes
        if issued.suite:
            self._evals[issued.version] = self._evals.get(issued.version, 0) + 1
        now = time.monotonic()
        if not issued.suite and self._began is None:
            self._began, self._idle_s = now, 0.0
        elif self._idle_since is not None:
            self._idle_s += now - self._idle_since
        self._idle_since = None
