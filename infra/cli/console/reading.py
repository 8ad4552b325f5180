"""Reads of the pages, from the index and from the log.

    log ─> keeper of the index ─> state/index.sqlite ─> search, curves, lists      see `infra.ledger.index`
    log ─> status, decisions, one answer                                           on request, then cached for HELD_S

It only reads; no role waits for it. While the log is unavailable the pages show the last values with a banner.
"""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from infra.cli.govern.words import PolicyWords, recent_words, words_about
from infra.cli.look.reader import LastHour, expected_roles
from infra.cli.look.status import State, read_status
from infra.cli.look.trace import open_index
from infra.cli.settings import Settings
from infra.ledger.index import FILE, LogIndex, bounds_now, read_offsets, read_only, records_left
from infra.ledger.index_fold import MARK, number
from infra.ledger.trace import AnswerTrace, PolicyTrace, trace_answer, trace_policy
from infra.log.log import Log
from infra.observe.alarms import MAX_LAG
from schemas import DeadLetter, topics
from schemas.errors import BadFrame, BrokerUnavailable, HeadraceError, NotInLog, StoreError

HELD_S = 3.0
PAGE_S = 5.0  # for the log, on most pages: then they say that it is being read
MANY = 5000  # unread records of a topic that every page names

Found = TypeVar("Found")


class NotReadYet(HeadraceError):
    """The request may concern records that the index does not have yet."""


class IndexState(msgspec.Struct, frozen=True):
    """Progress of the index: records still to be read and all records of the log, by topic. is_whole: The log was read to its
    end once.
    """

    fault: str = ""
    left: Mapping[str, int] = {}
    held: Mapping[str, int] = {}
    is_whole: bool = False

    @property
    def building(self) -> str:
        """Progress of the first reading, in words; "" once it is done."""
        if self.is_whole and max(self.left.values(), default=0) < MANY:
            return ""
        held = sum(self.held.values())
        return f"{held - sum(self.left.values()):,} of {held:,} records are read" if held else "nothing is read yet"

    @property
    def unread(self) -> str:
        """Records that the index lacks, in words; "" for none."""
        left = ", ".join(f"{count:,} of {name}" for name, count in self.left.items() if count)
        if left:
            return f"Not read yet: the index is behind the log by {left}."
        return "" if self.is_whole else "Not read yet: the index is being built."


class Reading:
    """Reads of a run. state: folder of the index. held_s: for how long a result is reused."""

    held_s = HELD_S

    def __init__(self, settings: Settings, log: Log, state: Path) -> None:
        self.settings = settings
        self.log = log
        self.index_state = IndexState()
        self._fault = ""  # of this process
        self._path = state / FILE
        self._hour = LastHour(log)
        self._held: dict[str, tuple[float, Any]] = {}
        self._tracing = asyncio.Lock()
        self._readings: dict[str, asyncio.Task[Any]] = {}  # reads in progress, by name; requests share them

    async def close(self) -> None:
        running = [*self._readings.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def rows(self, question: Callable[..., Found], *values: Any) -> Found:
        """Result of a query of the index, in a thread."""

        def ask() -> Found:
            with closing(read_only(self._path)) as database:
                return question(database, *values)

        return await asyncio.to_thread(ask)

    async def look(self, wait_s: float) -> IndexState:
        """Progress of the index, at most HELD_S old; the last known value if the log does not answer within `wait_s`."""

        async def read() -> IndexState:
            bounds = await bounds_now(self.log)
            reads, fault, is_whole = await self.rows(_progress)
            self._fault = ""
            held = records_left(bounds, {})
            return IndexState(fault, records_left(bounds, reads), held, is_whole)

        try:
            self.index_state = await self.held("index", read, wait_s=wait_s)
        except (NotReadYet, HeadraceError, sqlite3.Error):
            self.index_state = IndexState(self._fault)
        if self._fault:
            self.index_state = msgspec.structs.replace(self.index_state, fault=self._fault)
        return self.index_state

    async def status(self, wait_s: float | None = None) -> State:
        """State of `headrace status`, at most HELD_S old. wait_s: see `held`."""
        wanted = expected_roles(self.settings.expect, serves=self.settings.gateway is not None)

        async def read() -> State:
            words = await self.history()
            policies = sorted([*words.events, *words.orders], key=lambda pair: pair[0])
            return await read_status(
                self.log, now_s=time.time(), max_lag=MAX_LAG, wanted=wanted, policies=policies, hour=self._hour
            )

        return await self.held("status", read, wait_s=wait_s)

    async def history(self, wait_s: float | None = None) -> PolicyWords:
        """Newest events of the policy, and decisions about it. wait_s: see `held`."""
        return await self.held("history", lambda: recent_words(self.log, self.settings.policy.name), wait_s=wait_s)

    async def history_since(self, version: int, wait_s: float) -> PolicyWords:
        """Events since a version was published, if that is older than the events of `history`."""
        known = await self.history(wait_s)
        if known.is_whole or any(event.event == "published" and event.version == version for _, event in known.events):
            return known
        return await words_about(self.log, self.settings.policy.name, version)

    async def answer(self, ref: str) -> AnswerTrace:
        """Everything the log says about an answer, as far as the index reaches. Raises NotInLog, and NotReadYet where the
        answer may be in records that the index lacks.
        """
        known = await self.look(PAGE_S)
        if known.is_whole:  # before, to look for a group would be to look at every row
            try:
                async with self._tracing:
                    with closing(self._opened()) as index:
                        return await trace_answer(self.log, index, ref)
            except NotInLog:
                if not known.unread:
                    raise
        raise NotReadYet(f"{ref[:200]}: {known.unread} Look again in a moment.")

    async def letter(self, partition: int, offset: int) -> tuple[int, DeadLetter]:
        """A dead letter and its time in ms, by its partition and offset. Raises NotInLog."""
        message = (await self.log.messages_at(topics.DEAD_LETTERS, partition, [offset])).get(offset)
        if message is None or not isinstance(message.value, DeadLetter) or message.value.stage == MARK:
            raise NotInLog(f"no dead letter at {partition}@{offset}; retention may have deleted it")
        return message.timestamp_ms, message.value

    async def learned(self, version: int) -> PolicyTrace:
        """Answers that a version was trained on. Raises NotInLog."""
        async with self._tracing:
            with closing(self._opened()) as index:
                return await trace_policy(self.log, index, version)

    def _opened(self) -> LogIndex:
        return open_index(self.settings, self._path.parent)  # for one trace: the file may be made anew at any time

    async def held(
        self, name: str, read: Callable[[], Awaitable[Found]], held_s: float | None = None, wait_s: float | None = None
    ) -> Found:
        """Result of `read`, called once for all requests within `held_s`; its last result while the log is away.

        wait_s: longest wait for a read in progress, None for no limit; then the last result, or NotReadYet if there is none.
        """
        known: tuple[float, Found] | None = self._held.get(name)
        if known is not None and time.monotonic() - known[0] < (self.held_s if held_s is None else held_s):
            return known[1]
        task: asyncio.Task[Found] | None = self._readings.get(name)
        if task is None:
            task = self._readings[name] = asyncio.create_task(self._read(name, read))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # every reader that waits gets it
        await asyncio.wait([task], timeout=wait_s)
        if task.done():
            return task.result()
        if known is None:
            raise NotReadYet("The log is being read: look again in a moment.")
        return known[1]

    async def _read(self, name: str, read: Callable[[], Awaitable[Found]]) -> Found:
        try:
            value = await read()
        except (BrokerUnavailable, StoreError, BadFrame) as error:
            self._fault = str(error)
            if name not in self._held:
                raise
            value = self._held[name][1]
        finally:
            del self._readings[name]
        self._held[name] = time.monotonic(), value
        return value


def has_answer(database: sqlite3.Connection, experience: str) -> bool:
    return bool(database.execute("SELECT 1 FROM answers WHERE key = ?", (number(experience),)).fetchone())


def _progress(database: sqlite3.Connection) -> tuple[dict[tuple[str, int], int], str, bool]:
    notes = dict(database.execute("SELECT name, value FROM meta").fetchall())
    return (read_offsets(database), notes.get("fault") or "", bool(notes.get("whole")))
