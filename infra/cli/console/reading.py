"""What the pages know: the index kept up beside them, and what is read from the log for a page.

    log ─> Keeper ─> console.sqlite ─> search, curves          see `infra.cli.console.keeping`
    log ─> status, decisions, one answer                       when asked, and then held for HELD_S

It only reads: no role waits for it, and its process takes a small share of a busy machine (`infra.local.idle_time`). While the
log is away the pages show what was known, and say so.
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

from infra.cli.console.alarms import noted
from infra.cli.console.fold import MARK
from infra.cli.console.index import ConsoleIndex, inode, lists
from infra.cli.console.keeping import FILE, TRACE_FILE, IndexState
from infra.cli.console.rates import by_labels, together
from infra.cli.govern.channel import ChannelDecision, decisions
from infra.cli.govern.words import RECENT, PolicyWords, recent_words, words_about
from infra.cli.look.console_bounds import read_only
from infra.cli.look.expected import wanted_of
from infra.cli.look.reader import LastHour, NewestRecords
from infra.cli.look.status import read_status
from infra.cli.look.status_screen import State
from infra.cli.settings import Settings
from infra.ledger.index import LogIndex
from infra.ledger.trace import AnswerTrace, PolicyTrace, trace_answer, trace_policy
from infra.log.follower import Follower
from infra.log.log import Log, LogMessage
from infra.observe.alarms import MAX_LAG
from infra.policies.channel import Stable
from schemas import DeadLetter, PolicyEvent, topics
from schemas.errors import BadFrame, BrokerUnavailable, HeadraceError, NotInLog, StoreError
from schemas.topics import Topic

HELD_S = 3.0
# The topics of `status` that a page shows. Not experiences: they are most of a log, and the index reads them.
SHOWN = (topics.PROGRESS, topics.REPORTS, topics.POLICIES)
MANY = 5000  # records of a topic that are said on every page
PULSE = 120  # values held of each line of the flow
READ_S = 2.0  # of the log, for one look at an answer
TRACE_WAIT_S = 0.5  # for a process that reads the log into the index of `trace` meanwhile
TRACE_WAITS = 8  # for an answer that the pages list

Found = TypeVar("Found")


class NotReadYet(HeadraceError):
    """What was asked for may be in what is not read yet."""


class History(msgspec.Struct, frozen=True):
    """Events of versions, of serving and of learning. events: with their offsets. stable: what customers get.
    decisions: who moved it, and why. is_whole: no older ones are left out.
    """

    events: list[tuple[int, PolicyEvent]]
    stable: Stable
    decisions: list[ChannelDecision]
    is_whole: bool

    @classmethod
    def of(cls, words: PolicyWords) -> "History":
        """What was read."""
        return cls([*words.events], words.stable, decisions(words.events, words.orders), words.is_whole)


class Reading:
    """One run, as the pages read it. state: folder of the indexes. kept: how far they are. looked: set for each page."""

    def __init__(self, settings: Settings, log: Log, state: Path, kept: IndexState, looked: asyncio.Event) -> None:
        self.settings = settings
        self.log = log
        self.kept = kept
        self.pulse: dict[str, deque[float]] = {}
        self._seen: dict[str, float] = {}  # alarms that there are, with when each was first seen
        ConsoleIndex(state / FILE).close()  # so that there is one to read
        self._path = state / FILE
        self._looked = looked
        run, policy = settings.run or settings.app, settings.policy.name
        self._trace = LogIndex(state / TRACE_FILE, run=run, policy=policy)
        self._newest_follower = Follower(log, SHOWN)
        self._newest = NewestRecords(log, self._newest_follower)
        self._reports_follower = Follower(log, (topics.REPORTS,))
        self._hour = LastHour(log, self._reports_follower)
        self._words_follower = Follower(log, (topics.POLICIES,))
        self._words: PolicyWords | None = None
        self._held: dict[str, tuple[float, Any]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._readings: dict[str, asyncio.Task[Any]] = {}  # what is being read, which all who ask for it wait for
        self._running: set[asyncio.Task[Any]] = set()
        self._decided = 0  # how many decisions were made here
        self._threads = threading.local()

    async def close(self) -> None:
        """Close the file, and what reads the log."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        followers = (self._newest_follower, self._words_follower, self._reports_follower)
        for follower in followers:
            await follower.close()
        self._trace.close()

    async def ask(self, question: Callable[[sqlite3.Connection], Found]) -> Found:
        """The answer of the index to a question, asked in a thread."""
        self._looked.set()
        return await asyncio.to_thread(lambda: question(self._reader()))

    async def status(self, wait_s: float | None = None) -> State:
        """What `headrace status` shows, at most HELD_S old, and when each alarm was first seen here. wait_s: see `held`."""
        serves = self.settings.gateway is not None
        wanted = wanted_of(self.settings.expect, serves=serves)

        async def read() -> State:
            now_s = time.time()
            state = await read_status(
                self.log, now_s=now_s, max_lag=MAX_LAG, wanted=wanted, look=self._look, hour=self._hour
            )
            beat(self.pulse, state["roles"])
            self._seen = state["seen"] = noted(self._seen, state["alarms"], now_s)
            return state

        return await self.held("status", read, wait_s=wait_s)

    async def _look(self, topic: Topic, last: int, kind: str) -> list[LogMessage]:
        return await self._newest.newest(topic, last, kind) if topic in SHOWN else []

    async def history(self, wait_s: float | None = None) -> History:
        """Newest events of the policy, and decisions about it. wait_s: see `held`."""
        policy = self.settings.policy.name

        async def read() -> History:
            if self._words is None:
                self._words = await recent_words(self.log, policy, at_least=RECENT, at_most=RECENT)
            await self._words.read_on(self.log, self._words_follower)
            return History.of(self._words)

        return await self.held("history", read, wait_s=wait_s)

    async def history_of(self, version: int, wait_s: float) -> History:
        """Events since a version was published, where that is older than what `history` has."""
        known = await self.history(wait_s)
        if known.is_whole or any(one.event == "published" and one.version == version for _, one in known.events):
            return known
        return History.of(await words_about(self.log, self.settings.policy.name, version))

    async def answer(self, ref: str) -> AnswerTrace:
        """Everything the log says about an answer, as far as the index is kept up. Raises NotInLog, and NotReadYet where it may
        be in what is not read yet.

        What the pages list may not be in the index of `trace` yet: then it is waited for.
        """
        if self.kept.is_traced or self._trace.is_ordered:
            with contextlib.suppress(NotInLog):
                return await self._traced(ref, anew=False)
        if not self.kept.is_traced:
            # Who keeps it up reads the whole log into it, and a page does not.
            raise NotReadYet(f"{ref[:200]}: {self.unread} Look again in a moment.")
        is_listed = await self.ask(lambda database: lists(database, ref))
        for _ in range(TRACE_WAITS - 1 if is_listed else 0):
            with contextlib.suppress(NotInLog):
                return await self._traced(ref, anew=True)
            await asyncio.sleep(TRACE_WAIT_S)  # out of turn: others ask for theirs meanwhile
        return await self._traced(ref, anew=True)

    async def _traced(self, ref: str, *, anew: bool) -> AnswerTrace:
        """One look, in turn. anew: what has come since the last is read first, for READ_S."""
        async with self._turn("trace"):
            is_whole = True
            if anew:
                try:
                    async with asyncio.timeout(READ_S):
                        await self._trace.refresh(self.log, wait_s=TRACE_WAIT_S)
                except TimeoutError:  # what was read stays read
                    is_whole = False
            try:
                return await trace_answer(self.log, self._trace, ref)
            except NotInLog:
                if is_whole:
                    raise
        raise NotReadYet(f"{ref[:200]}: it may be in what is not read yet: look again in a moment.")

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

    async def held(
        self, name: str, read: Callable[[], Awaitable[Found]], held_s: float = HELD_S, wait_s: float | None = None
    ) -> Found:
        """What `read` says, asked once for all who look within `held_s`; where the log is away, what it said last. wait_s: for
        a reading that goes on, None for its end: then what it said last. Raises NotReadYet where that is nothing.
        """
        self._looked.set()
        known: tuple[float, Found] | None = self._held.get(name)
        if known is not None and known[0] == -math.inf:  # a decision was made here, and is to be seen
            wait_s = None
        if known is not None and time.monotonic() - known[0] < held_s:
            return known[1]
        task: asyncio.Task[Found] | None = self._readings.get(name)
        if task is None:
            task = self._readings[name] = asyncio.create_task(self._read(name, read))
            self._running.add(task)
            task.add_done_callback(self._ended)
        await asyncio.wait([task], timeout=wait_s)
        if task.done():
            return task.result()
        if known is None:
            raise NotReadYet("The log is being read: look again in a moment.")
        return known[1]

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # every reader that waits for it gets it

    async def _read(self, name: str, read: Callable[[], Awaitable[Found]]) -> Found:
        decided = self._decided
        try:
            async with self._turn(name):
                value = await read()
        except (BrokerUnavailable, StoreError, BadFrame) as error:
            self.kept.fault = str(error)
            if name not in self._held:
                raise
            value = self._held[name][1]
        finally:
            if self._readings.get(name) is asyncio.current_task():
                del self._readings[name]
        # What was read before a decision made here is old.
        self._held[name] = (time.monotonic() if decided == self._decided else -math.inf, value)
        return value

    def forget_fresh(self) -> None:
        """Read anew, since something was decided here; what was known stays for when the log is away."""
        self._decided += 1
        self._readings.clear()
        self._held = {name: (-math.inf, value) for name, (_, value) in self._held.items()}

    @property
    def folding(self) -> str:
        """How much of the log is read, in words; "" where next to nothing is left of a log that was read once."""
        kept = self.kept
        least = MANY if kept.is_caught_up else 1
        left = {name: count for name, count in kept.left.items() if count >= least}
        if kept.is_caught_up and not left:
            return ""
        held = sum(kept.held.values())
        words = f"{held - sum(kept.left.values()):,} of {held:,} records are read" if held else "nothing is read yet"
        words += f"; to be read: {_in_words(left)}" if left else ""
        first = f"; the index of `trace` comes first, with {_in_words(kept.tracing)} to read" if kept.tracing else ""
        return words + first

    @property
    def unread(self) -> str:
        """What the index does not know yet, in words; "" where it knows all."""
        left = {name: count for name, count in self.kept.left.items() if count}
        if left:
            return f"Not read yet: the index is behind the log by {_in_words(left)}."
        return "" if self.kept.is_traced and self.kept.is_caught_up else "Not read yet: the index is being built."

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    def _reader(self) -> sqlite3.Connection:
        held: tuple[int, sqlite3.Connection] | None = getattr(self._threads, "held", None)
        if held is None or held[0] != inode(self._path):  # or the file was removed, and made anew
            if held is not None:
                held[1].close()
            self._threads.held = held = inode(self._path), read_only(self._path)
        return held[1]


def beat(pulse: dict[str, deque[float]], roles: Sequence[State]) -> None:
    """Add what is counted a second now, of all that run of one kind and over all labels; what no role reports any more goes."""
    sums = {
        f"{role}/{name}": sum(labels.values())
        for role, rates in together(roles).items()
        for name, labels in by_labels(rates).items()
    }
    for key in pulse.keys() - sums.keys():
        del pulse[key]
    for key, rate in sums.items():
        pulse.setdefault(key, deque(maxlen=PULSE)).append(rate)


def _in_words(left: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} of {name}" for name, count in left.items())
