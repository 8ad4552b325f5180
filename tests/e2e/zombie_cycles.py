"""Roles that are stopped, overtaken by another of their kind, and continued: what they did afterwards, by the log alone.

A cycle: SIGSTOP · a replacement starts and reports that it works · SIGCONT · the one that was stopped ends by itself, or is
asked to after a while. What counts as stale is told here from the offsets of `policies` and `batches`, without the readers
that headrace uses.
"""

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import msgspec

from infra.local.supervisor import Child, Supervisor
from infra.log.log import Log
from schemas import Batch, Fence, PolicyEvent, topics
from schemas.journal import JournalRecord, effective

OVERTAKEN = ("train", "master", "process")
AS_ZOMBIE_S = 8.0  # to do what it was about to do; a stream worker notices nothing, and goes on beside the other
SESSION_S = 12.0  # past the session of a consumer group: what a stopped stream worker had is dealt out
REPLACED_S = 180.0
LOADED = re.compile(r"\bserving version=(\d+) token=(\d+)")


class Shifts:
    """The processes of the roles that are overtaken: of each the newest works, those before it are on their way out."""

    def __init__(self, children: Sequence[Child]) -> None:
        # Who is fenced out ends, and must not come back to fence out its successor.
        self._children = {item.name: msgspec.structs.replace(item, max_failures=0) for item in children}
        self._current: dict[str, Supervisor] = {}
        self._stack = AsyncExitStack()
        self.ended_by_themselves: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        for role in self._children:
            await self._start(role)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    async def stop(self, *roles: str) -> None:
        """End the newest of these, by default of all."""
        for role in roles or tuple(self._current):
            await self._current[role].stop()

    async def cycle(self, role: str, working: Callable[[str], str], say: Callable[[str], None]) -> None:
        """Stop, overtake, continue. working: the instance of a role that was the last to report that it works."""
        old, before = self._current[role], working(role)
        group = old.states[role].pid
        assert group is not None and before, f"{role} is not working: {old.states[role]}"
        os.killpg(group, signal.SIGSTOP)  # of the role and of what watches over its parent
        since_s = time.monotonic()
        say(f"{before} stopped")
        await self._start(role)
        while (after := working(role)) in ("", before):
            assert time.monotonic() < since_s + REPLACED_S, f"{role}: no replacement works"
            await asyncio.sleep(0.05)
        if role == "process":
            await asyncio.sleep(max(0.0, since_s + SESSION_S - time.monotonic()))
        say(f"{before} overtaken by {after} after {time.monotonic() - since_s:.1f} s, continued")
        os.killpg(group, signal.SIGCONT)
        ended = asyncio.create_task(old.wait())
        await asyncio.wait([ended], timeout=AS_ZOMBIE_S)
        self.ended_by_themselves[role] += ended.done()
        await old.stop()
        await ended
        while working(role) != after:  # the last word of the one that ended is not that of the one that works
            assert time.monotonic() < since_s + REPLACED_S, f"{role}: {after} is not heard any more"
            await asyncio.sleep(0.05)

    async def _start(self, role: str) -> None:
        self._current[role] = await self._stack.enter_async_context(Supervisor([self._children[role]]))


def plan_cycles(count: int, seed: int, pause_s: tuple[float, float]) -> list[tuple[str, float]]:
    """(role, seconds since the cycle before): every role once in each three, in random order."""
    chosen = random.Random(seed)
    planned: list[tuple[str, float]] = []
    while len(planned) < count:
        planned += [(role, chosen.uniform(*pause_s)) for role in chosen.sample(OVERTAKEN, len(OVERTAKEN))]
    return planned[:count]


async def stale(log: Log, run: str, explorer_logs: Sequence[Path]) -> dict[str, int]:
    """What was published and journaled under a lease that was over, and how much of it was loaded or counts."""
    newest, published = -1, set()
    async for message in log.read_all(topics.POLICIES):
        event = message.value
        if isinstance(event, PolicyEvent) and event.event == "lease":
            newest = max(newest, message.offset)
        elif isinstance(event, PolicyEvent) and event.event == "published" and event.token < newest:
            published.add((event.version, event.token))
    fence = -1
    fenced: list[Batch] = []
    entries: list[JournalRecord] = []
    async for message in log.read_all(topics.BATCHES):
        entry = cast("JournalRecord", message.value)
        entries.append(entry)
        if isinstance(entry, Fence):
            fence = max(fence, entry.token)
        elif isinstance(entry, Batch) and entry.token < fence:
            fenced.append(entry)
    counted = [item for item in effective(entries, run)[0] if any(item is late for late in fenced)]
    loads = [load for path in explorer_logs for load in loaded(path.read_text(errors="replace"))]
    return {
        "loads": len(loads),
        "stale_loads": sum(load in published for load in loads),
        "stale_published": len(published),
        "stale_records": len(fenced),
        "stale_records_counted": len(counted),
    }


def loaded(text: str) -> list[tuple[int, int]]:
    """(version, token) of every load that an explorer tells of."""
    return [(int(version), int(token)) for version, token in LOADED.findall(text)]
