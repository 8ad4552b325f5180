"""What the pages know: the index kept up beside them, and what is read from the log when somebody looks.

    log ─> Folder ─> console.sqlite ─> search, curves          kept up every EVERY_S
    log ─> status, decisions, one answer                       when asked, and then held for HELD_S

It only reads: no role waits for it, and this process runs below them (`os.nice`). While the log is away the pages show what was
known, and say so.
"""

import asyncio
import logging
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from infra.cli.channel import ChannelDecision, decisions, policy_history
from infra.cli.console.fold import Folder
from infra.cli.console.index import ConsoleIndex, reader_of
from infra.cli.expected import OVER, wanted_of
from infra.cli.learning import learning_history
from infra.cli.settings import Settings
from infra.cli.status import State, read_status
from infra.ledger.index import LogIndex
from infra.ledger.trace import AnswerTrace, PolicyTrace, trace_answer, trace_policy
from infra.log.log import Log
from infra.observe.alarms import MAX_LAG
from infra.policies.channel import Stable
from infra.settings.config import duration_s
from schemas import PolicyEvent
from schemas.errors import BadFrame, BrokerUnavailable, HeadraceError, StoreError, UnknownMajor

EVERY_S = 1.0
HELD_S = 2.0
PULSE = 120  # values held of each line of the flow

FILE = "console.sqlite"

_log = logging.getLogger(__name__)
Found = TypeVar("Found")


class History(msgspec.Struct, frozen=True):
    """What was said of versions, what is served, and who decided it."""

    events: list[tuple[int, PolicyEvent]]
    stable: Stable
    decisions: list[ChannelDecision]


class Reading:
    """One run, as the pages read it. state: folder of the indexes."""

    def __init__(self, settings: Settings, log: Log, state: Path) -> None:
        self.settings = settings
        self.log = log
        self.fault = ""  # why the log cannot be read now
        self.left: dict[str, int] = {}  # records still to be folded, by topic
        self.is_caught_up = False  # whether all was read that was there at the start
        self.pulse: dict[str, deque[float]] = {}
        self.index = ConsoleIndex(state / FILE)
        run, policy = settings.run or settings.app, settings.policy.name
        self._trace = LogIndex(state / "trace.sqlite", run=run, policy=policy)
        self._folder = Folder(self.index, run=run, policy=policy)
        self._held: dict[str, tuple[float, Any]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._threads = threading.local()

    def close(self) -> None:
        """Close the files."""
        self._trace.close()
        self.index.close()

    async def keep_up(self) -> None:
        """Fold what comes, until cancelled; what fails is told on the pages, and tried again."""
        wait_s = EVERY_S
        while True:
            try:
                if self.index.is_writer or self.index.take_over():
                    await self._folder.refresh(self.log, self.left.__setitem__)
                    await asyncio.to_thread(self._prune)
                async with self._turn("trace"):
                    await self._trace.refresh(self.log)
                self.fault, self.is_caught_up, wait_s = "", True, EVERY_S
            except UnknownMajor as error:
                self.fault, wait_s = f"{error}", 30.0
            except (HeadraceError, sqlite3.Error, OSError) as error:
                self.fault = f"{type(error).__name__}: {error}"
                wait_s = min(2 * wait_s, 15.0)
                _log.warning("console_behind error=%s", error)
            await asyncio.sleep(wait_s)

    async def ask(self, question: Callable[[sqlite3.Connection], Found]) -> Found:
        """The answer of the index to a question, asked in a thread."""
        return await asyncio.to_thread(lambda: question(self._reader()))

    async def status(self) -> State:
        """What `headrace status` shows; at most HELD_S old while somebody looks."""
        serves = self.settings.gateway is not None
        wanted = wanted_of(self.settings.expect, serves=serves)

        async def read() -> State:
            state = await read_status(self.log, now_s=time.time(), max_lag=MAX_LAG, wanted=wanted)
            self._beat(state)
            return state

        return await self.held("status", read)

    async def history(self) -> History:
        """Every event of the policy, and every decision about it."""

        async def read() -> History:
            events, stable = await policy_history(self.log, self.settings.policy.name)
            orders = await learning_history(self.log)
            return History(events, stable, decisions(events, orders))

        return await self.held("history", read)

    async def answer(self, ref: str) -> AnswerTrace:
        """Everything the log says about an answer. Raises NotInLog."""
        async with self._turn("trace"):
            await self._trace.refresh(self.log)
            return await trace_answer(self.log, self._trace, ref)

    async def learned(self, version: int) -> PolicyTrace:
        """What a version learned from. Raises NotInLog."""
        async with self._turn("trace"):
            return await trace_policy(self.log, self._trace, version)

    async def held(self, name: str, read: Callable[[], Awaitable[Found]], held_s: float = HELD_S) -> Found:
        """What `read` says, asked once for all who look within `held_s`; where the log is away, what it said last."""
        async with self._turn(name):
            known = self._held.get(name)
            if known is not None and time.monotonic() - known[0] < held_s:
                found: Found = known[1]
                return found
            try:
                value = await read()
            except (BrokerUnavailable, StoreError, BadFrame) as error:
                self.fault = str(error)
                if known is None:
                    raise
                value = known[1]
            self._held[name] = (time.monotonic(), value)
            return value

    def forget_fresh(self) -> None:
        """Read anew, since something was decided here; what was known stays for when the log is away."""
        self._held = {name: (-math.inf, value) for name, (_, value) in self._held.items()}

    @property
    def folding(self) -> str:
        """How much of the log is still to be read, in words; "" for next to nothing."""
        left = {name: count for name, count in self.left.items() if count > 5000}
        return ", ".join(f"{count:,} of {name}" for name, count in left.items())

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    def _reader(self) -> sqlite3.Connection:
        database: sqlite3.Connection | None = getattr(self._threads, "database", None)
        if database is None:
            database = self._threads.database = reader_of(self.index.path)
        return database

    def _prune(self) -> None:
        newest = self.index.database.execute("SELECT time_ms FROM answers ORDER BY n DESC LIMIT 1").fetchone()
        if newest is not None:
            self.index.prune(newest[0] - int(duration_s(self.settings.keep.replay) * 1000))

    def _beat(self, state: State) -> None:
        for role in state["roles"]:
            for name, rate in role["per_s"].items():
                if "seconds" not in name and not role["silent"] and role["state"] not in OVER:
                    self.pulse.setdefault(f"{role['role']}/{name}", deque(maxlen=PULSE)).append(rate)
