"""Runs the processes of one machine: starts them, restarts them when they die, stops them in order.

    keeper (one per child)  waits for  its process to end, then restarts it after a backoff
    sampler                 waits for  the clock, then measures each session
    stop()                  wakes all: SIGTERM by tier, a deadline, SIGKILL of the process group

Guarantee: no process outlives the supervisor, however it ends; a death is an event and a count, never silence.
"""

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from infra.local.process import Watched, start_watched

SAMPLE_S = 1.0
FIRST_BACKOFF_S = 0.3
MAX_BACKOFF_S = 10.0
SLOW = 8  # failures after which the backoff is the longest
ALARM_AFTER = 3  # failed starts in a row
HEALTHY_S = 300.0  # a death within so long of a start is a start that failed: an engine takes minutes to load

logger = logging.getLogger(__name__)

EventKind = Literal["started", "exited", "restarting", "failing", "gave_up", "stopped"]


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """One process to keep running. env: added to this process's. final_codes: exit codes after which it stays down.

    mistakes: exit codes of a cause that a restart may not fix: at the first start the supervisor gives the child up, later
    it restarts the child without a limit. tier: the highest is stopped first, members of a tier together. stop_s: seconds from
    SIGTERM to SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    env: dict[str, str] = {}
    final_codes: tuple[int, ...] = (0,)
    mistakes: tuple[int, ...] = ()
    max_backoff_s: float = MAX_BACKOFF_S
    tier: int = 1
    stop_s: float = 15.0


class ChildEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a child's state. kind: failing comes once, after ALARM_AFTER failed starts in a row.

    exit_code: -n for signal n. stopping: the supervisor asked the child to stop.
    """

    name: str
    kind: EventKind
    pid: int
    exit_code: int | None = None
    restarts: int = 0
    stopping: bool = False


class ChildState(msgspec.Struct, kw_only=True):
    """State of a child now. pid: leader of its session, None while it does not run. failures: failed starts in a row.

    peak_rss_bytes: most resident bytes of its session so far.
    """

    name: str
    pid: int | None = None
    restarts: int = 0
    exit_code: int | None = None
    failures: int = 0
    given_up: bool = False
    peak_rss_bytes: int = 0


class Supervisor:
    """Keeps `children` running inside `async with`; leaving stops them. `on_event` is called in the event loop."""

    def __init__(self, children: Sequence[Child], on_event: Callable[[ChildEvent], None] | None = None) -> None:
        names = [child.name for child in children]
        if len(set(names)) < len(names):
            raise ValueError(f"children need names of their own: got {names}")
        self._children = {child.name: child for child in children}
        self.states = {child.name: ChildState(name=child.name) for child in children}
        self._running: dict[str, Watched] = {}
        self._on_event = on_event
        self._stopping = {name: asyncio.Event() for name in names}
        self._tasks = asyncio.TaskGroup()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._waiters = ThreadPoolExecutor(max(1, len(children)), "wait-child")

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for child in self._children.values():
            self._keepers[child.name] = self._tasks.create_task(self._keep(child), name=f"keep-{child.name}")
        self._sampler = self._tasks.create_task(self._sample(), name="sample-rss")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            for watched in self._running.values():
                watched.kill_group()
            self._sampler.cancel()
        await self._tasks.__aexit__(kind, error, at)
        self._waiters.shutdown()

    async def wait(self, *names: str) -> None:
        """Until the named children (all, if none is named) have ended for good."""
        await asyncio.wait([self._keepers[name] for name in names or self._keepers])

    async def stop(self, *names: str) -> None:
        """Stop the named children, by default all, tier by tier from the highest."""
        wanted = [self._children[name] for name in names or self._children]
        for child in wanted:
            self._stopping[child.name].set()
        for tier in sorted({child.tier for child in wanted}, reverse=True):
            async with asyncio.TaskGroup() as group:
                for child in wanted:
                    if child.tier == tier:
                        group.create_task(self._stop(child))

    def kill(self, name: str) -> bool:
        """SIGKILL a child and all it started, as a crash would; False if it is not running. It is restarted."""
        watched = self._running.get(name)
        if watched is None:
            return False
        watched.kill_group()
        return True

    async def _keep(self, child: Child) -> None:
        state, stopping = self.states[child.name], self._stopping[child.name]
        while not stopping.is_set():
            started_s = time.monotonic()
            await self._run_once(child, state)
            if stopping.is_set():
                self._tell(child, "stopped")
                return
            if state.exit_code in child.final_codes:
                return
            lived_s = time.monotonic() - started_s
            state.failures = 1 if lived_s > HEALTHY_S else state.failures + 1
            is_mistake = state.exit_code in child.mistakes
            if is_mistake and not state.restarts and lived_s <= HEALTHY_S:
                state.given_up = True
                self._tell(child, "gave_up")
                return
            if state.failures == ALARM_AFTER:
                self._tell(child, "failing")
            doublings = SLOW if is_mistake else min(state.failures - 1, SLOW)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(FIRST_BACKOFF_S * 2**doublings, child.max_backoff_s)):
                    await stopping.wait()
            if not stopping.is_set():
                state.restarts += 1
                self._tell(child, "restarting")

    async def _run_once(self, child: Child, state: ChildState) -> None:
        watched = start_watched(child.argv, log=child.log, env=child.env)
        self._running[child.name] = watched
        state.pid, state.exit_code = watched.pid, None
        try:
            self._tell(child, "started")
            state.exit_code = await asyncio.get_running_loop().run_in_executor(self._waiters, watched.process.wait)
        finally:
            watched.kill_group()
            watched.process.wait()
            watched.release()
            del self._running[child.name]
            self._tell(child, "exited")
            state.pid = None

    async def _stop(self, child: Child) -> None:
        keeper, watched = self._keepers[child.name], self._running.get(child.name)
        if watched is not None and watched.process.poll() is None:
            watched.process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([keeper], timeout=child.stop_s)
        if not done:
            logger.warning("child.stop.forced name=%s after_s=%.0f", child.name, child.stop_s)
            if (watched := self._running.get(child.name)) is not None:
                watched.kill_group()
            await asyncio.wait([keeper])

    async def _sample(self) -> None:
        while True:
            resident = await asyncio.to_thread(session_rss_bytes)
            for state in self.states.values():
                state.peak_rss_bytes = max(state.peak_rss_bytes, resident[state.pid or 0])
            await asyncio.sleep(SAMPLE_S)

    def _tell(self, child: Child, kind: EventKind) -> None:
        state = self.states[child.name]
        level = logging.WARNING if kind in ("restarting", "failing", "gave_up") else logging.INFO
        logger.log(level, "child.%s name=%s pid=%s code=%s", kind, child.name, state.pid, state.exit_code)
        if self._on_event is not None:
            self._on_event(
                ChildEvent(
                    name=child.name,
                    kind=kind,
                    pid=state.pid or 0,
                    exit_code=state.exit_code,
                    restarts=state.restarts,
                    stopping=self._stopping[child.name].is_set(),
                )
            )


def session_rss_bytes(proc: Path = Path("/proc")) -> Counter[int]:
    """Resident bytes of the processes of each session (proc(5))."""
    resident: Counter[int] = Counter()
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or another user's process is hidden (hidepid=1)
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            resident[int(fields[3])] += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return resident
