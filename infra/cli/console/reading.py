"""What the pages know: the index kept up beside them, and what is read from the log for a page.

    log ─> Keeper ─> console.sqlite ─> search, curves          see `infra.cli.console.keeping`
    log ─> status, decisions, one answer                       when asked, and then held for HELD_S

It only reads: no role waits for it, and its process takes the time that they leave (`infra.local.idle_time`). While the log
is away the pages show what was known, and say so.
"""

import asyncio
import contextlib
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from infra.cli.channel import ChannelDecision, PolicyWords, decisions
from infra.cli.clock import LogClock
from infra.cli.console.fold import MARK
from infra.cli.console.index import ConsoleIndex, inode, lists, reader_of
from infra.cli.console.keeping import FILE, TRACE_FILE, IndexState
from infra.cli.expected import OVER, wanted_of
from infra.cli.heard import LastHour
from infra.cli.newest import HeldNewest
from infra.cli.settings import Settings
from infra.cli.status import GONE_S, READ, read_status
from infra.cli.status_screen import State
from infra.ledger.index import INDEXED, LogIndex
from infra.ledger.trace import AnswerTrace, PolicyTrace, trace_answer, trace_policy
from infra.log.follower import Follower
from infra.log.log import Log
from infra.observe.alarms import MAX_LAG
from infra.policies.channel import Stable
from schemas import DeadLetter, PolicyEvent, topics
from schemas.errors import BadFrame, BrokerUnavailable, NotInLog, StoreError

HELD_S = 3.0
MANY = 5000  # records of a topic that are said on every page
PULSE = 120  # values held of each line of the flow
TRACE_WAIT_S = 0.5  # for a process that reads the log into the index of `trace` meanwhile
TRACE_WAITS = 8  # for an answer that the pages list

Found = TypeVar("Found")


class History(msgspec.Struct, frozen=True):
    """What was said of versions, and of serving and learning. events: with their offsets. stable: what customers get.
    decisions: who moved it, and why.
    """

    events: list[tuple[int, PolicyEvent]]
    stable: Stable
    decisions: list[ChannelDecision]


class Reading:
    """One run, as the pages read it. state: folder of the indexes. kept: how far they are. looked: set for each page."""

    def __init__(self, settings: Settings, log: Log, state: Path, kept: IndexState, looked: asyncio.Event) -> None:
        self.settings = settings
        self.log = log
        self.kept = kept
        self.pulse: dict[str, deque[float]] = {}
        ConsoleIndex(state / FILE).close()  # so that there is one to read
        self._path = state / FILE
        self._looked = looked
        run, policy = settings.run or settings.app, settings.policy.name
        self._trace_follower = Follower(log, INDEXED)
        self._trace = LogIndex(state / TRACE_FILE, run=run, policy=policy)
        self._newest_follower = Follower(log, READ)
        self._newest = HeldNewest(log, self._newest_follower)
        self._reports_follower = Follower(log, (topics.REPORTS,))
        self._clock = LogClock(log, self._reports_follower, silent_s=GONE_S)
        self._hour = LastHour(log, self._reports_follower)
        self._words_follower = Follower(log, (topics.POLICIES,))
        self._words = PolicyWords(policy)
        self._held: dict[str, tuple[float, Any]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._threads = threading.local()

    async def close(self) -> None:
        """Close the file, and what reads the log."""
        followers = (self._trace_follower, self._newest_follower, self._words_follower, self._reports_follower)
        for follower in followers:
            await follower.close()
        self._trace.close()

    async def ask(self, question: Callable[[sqlite3.Connection], Found]) -> Found:
        """The answer of the index to a question, asked in a thread."""
        self._looked.set()
        return await asyncio.to_thread(lambda: question(self._reader()))

    async def status(self) -> State:
        """What `headrace status` shows; at most HELD_S old."""
        serves = self.settings.gateway is not None
        wanted = wanted_of(self.settings.expect, serves=serves)

        async def read() -> State:
            now_s = await self._clock.glance_s(3 * HELD_S)
            state = await read_status(
                self.log, now_s=now_s, max_lag=MAX_LAG, wanted=wanted, look=self._newest.newest, hour=self._hour
            )
            state["clock_off_s"] = self._clock.off_s
            beat(self.pulse, state["roles"])
            return state

        return await self.held("status", read)

    async def history(self) -> History:
        """Every event of the policy, and every decision about it."""
        words = self._words

        async def read() -> History:
            await words.read_on(self.log, self._words_follower)
            return History([*words.events], words.stable, decisions(words.events, words.orders))

        return await self.held("history", read)

    async def answer(self, ref: str) -> AnswerTrace:
        """Everything the log says about an answer, as far as the index is kept up. Raises NotInLog.

        What the pages list may not be in the index of `trace` yet: then it is waited for.
        """
        if self.kept.is_traced:
            with contextlib.suppress(NotInLog):
                return await self._traced(ref, anew=False)
        is_listed = await self.ask(lambda database: lists(database, ref))
        for _ in range(TRACE_WAITS - 1 if is_listed else 0):
            with contextlib.suppress(NotInLog):
                return await self._traced(ref, anew=True)
            await asyncio.sleep(TRACE_WAIT_S)  # out of turn: others ask for theirs meanwhile
        return await self._traced(ref, anew=True)

    async def _traced(self, ref: str, *, anew: bool) -> AnswerTrace:
        """One look, in turn. anew: what has come since the last is read first."""
        async with self._turn("trace"):
            if anew:
                await self._trace.refresh(self.log, follower=self._trace_follower, wait_s=TRACE_WAIT_S)
            return await trace_answer(self.log, self._trace, ref)

    async def letter(self, partition: int, offset: int) -> tuple[int, DeadLetter]:
        """A dead letter and its time in ms, by where it lies. Raises NotInLog."""
        message = (await self.log.messages_at(topics.DEAD_LETTERS, partition, [offset])).get(offset)
        if message is None or not isinstance(message.value, DeadLetter) or message.value.stage == MARK:
            raise NotInLog(f"there is no letter at {partition}@{offset}: the log removes old ones")
        return message.timestamp_ms, message.value

    async def learned(self, version: int) -> PolicyTrace:
        """What a version learned from. Raises NotInLog."""
        async with self._turn("trace"):
            return await trace_policy(self.log, self._trace, version)

    async def held(self, name: str, read: Callable[[], Awaitable[Found]], held_s: float = HELD_S) -> Found:
        """What `read` says, asked once for all who look within `held_s`; where the log is away, what it said last."""
        self._looked.set()
        async with self._turn(name):
            known = self._held.get(name)
            if known is not None and time.monotonic() - known[0] < held_s:
                found: Found = known[1]
                return found
            try:
                value = await read()
            except (BrokerUnavailable, StoreError, BadFrame) as error:
                self.kept.fault = str(error)
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
        """How much of the log is still to be read, in words; "" for next to nothing of a log that was read once."""
        least = MANY if self.kept.is_caught_up else 1
        left = {name: count for name, count in self.kept.left.items() if count >= least}
        return _in_words(left) if left or self.kept.is_caught_up else "all records"

    @property
    def unread(self) -> str:
        """What the index does not know yet, in words; "" where it knows all."""
        left = {name: count for name, count in self.kept.left.items() if count}
        return f"Not read yet: the index is behind the log by {_in_words(left)}." if left else ""

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    def _reader(self) -> sqlite3.Connection:
        held: tuple[int, sqlite3.Connection] | None = getattr(self._threads, "held", None)
        if held is None or held[0] != inode(self._path):  # or somebody removed the file, and another was made
            if held is not None:
                held[1].close()
            self._threads.held = held = inode(self._path), reader_of(self._path)
        return held[1]


def beat(pulse: dict[str, deque[float]], roles: Sequence[State]) -> None:
    """Add what is counted a second now, of all that run of one kind together."""
    sums: dict[str, float] = {}
    for role in roles:
        for name, rate in role["per_s"].items():
            if "seconds" not in name and not role["silent"] and role["state"] not in OVER:
                key = f"{role['role']}/{name}"
                sums[key] = sums.get(key, 0.0) + rate
    for key, rate in sums.items():
        pulse.setdefault(key, deque(maxlen=PULSE)).append(rate)


def _in_words(left: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} of {name}" for name, count in left.items())
