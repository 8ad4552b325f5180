"""The explorer's scheduler: what waits, what runs, and who must be woken. Shared by its loops in one event loop."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from actors.rollout.stop import Stop
from actors.rollout.waiting import Waiting, issued_of
from schemas import Task


class Scheduler:
    """Bounds what runs, knows which evals run under which version, and counts idle time.

    changed: set on every change; the dispatcher waits on it. settled: what was in the log at the start has been taken.
    closed: nothing begins any more. Also the ReloadGate of its explorer's engine: evals need exactly one version.
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
        """A task that was taken has ended."""
        issued = issued_of(task)
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

    def stop_of(self, task: Task) -> Stop:
        """What stops a task that was taken."""
        issued = issued_of(task)
        return self._running[issued.group, issued.attempt]

    def over(self, group: str, reason: str) -> list[Task]:
        """A group of episodes is over: what runs of it is stopped, and what waited of it is returned and waits no longer."""
        for (name, _), stop in self._running.items():
            if name == group:
                stop.now(reason)
        waited = self.waiting.remove(group)
        if waited:
            self._started.set()
        return waited

    async def next_start(self) -> None:
        """Until a task is taken or passed over. For one waiter."""
        self._started.clear()
        await self._started.wait()

    def pass_over(self, version: int) -> list[Task]:
        """Evals that wait for a version below `version`; they no longer wait."""
        passed = self.waiting.passed(version)
        if passed:
            self._started.set()
        return passed

    async def next_end(self, timeout_s: float) -> None:
        """Until a task ends, at most `timeout_s`. For one waiter."""
        self._ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()

    async def known(self) -> None:
        """Return once what was in the log at the start has been taken."""
        await self.settled.wait()

    def wanted(self) -> frozenset[int]:
        """Versions that evals wait for."""
        return self.waiting.versions()

    async def released(self, version: int, timeout_s: float) -> bool:
        """Whether no evals of exactly `version` wait or run, waited for at most `timeout_s`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while (needed := self._needs(version)) and (left := deadline - clock()) > 0:
            await self.next_end(left)
        return not needed

    @contextmanager
    def reload(self) -> Iterator[None]:
        """While it is entered, no eval begins."""
        self._reloading = True
        try:
            yield
        finally:
            self._reloading = False
            self.changed.set()

    def holds(self, limit: int) -> dict[str, int]:
        """Groups and eval tasks that run or wait, to their newest attempt; those that run first, at most `limit`."""
        held: dict[str, int] = {}
        for group, attempt in (*sorted(self._running), *((one.group, one.attempt) for one in self.waiting.held())):
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

    def _needs(self, version: int) -> bool:
        return version in self._evals or version in self.waiting.versions()

    def _spent(self) -> tuple[float, float]:
        if self._began is None:
            return 0.0, 0.0
        now = time.monotonic()
        idle_s = self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)
        return now - self._began, now - self._began - idle_s

    def _begin(self, task: Task) -> None:
        issued = issued_of(task)
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
