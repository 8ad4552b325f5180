"""A ledger kept outside headrace: which ids a reader of the log saw acknowledged, and what became of them in the end.

It shares no code with the audit. Ids go to a file as they are read, so that a record the broker gave out once and lost in a
crash is missed later.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import IO

from infra.log.log import Log
from schemas import Batch, Block, Closure, DeadLetter, Drawn, DropMarker, Fence, Rollback, Skip, decode, topics
from schemas.errors import BadFrame, BrokerUnavailable

SOURCES = (topics.EXPERIENCES, topics.EXPERTS)


class LiveLedger:
    """Follows what actors publish while everything around it is killed; every id is in the file before the next read."""

    def __init__(self, log: Log, path: Path) -> None:
        self.acknowledged: set[str] = set()
        self._log = log
        self._path = path
        self._closing = asyncio.Event()

    async def follow(self) -> None:
        """Read until `finish` is called and the end is reached."""
        with self._path.open("w", encoding="utf-8") as file:
            async with asyncio.TaskGroup() as tasks:
                for topic in SOURCES:
                    tasks.create_task(self._follow(topic, file))

    def finish(self) -> None:
        """Nobody publishes any more."""
        self._closing.set()

    async def _follow(self, topic: topics.Topic, file: IO[str]) -> None:
        reader = await self._log.assigned(topic, "beginning")
        try:
            while True:
                last = self._closing.is_set()
                try:
                    messages = await self._log.read(reader, timeout_s=1.0)
                except BrokerUnavailable:  # it was killed, and comes back
                    continue
                for message in messages:
                    assert isinstance(message.value, Block), message.error
                    ids = [experience.id for experience in message.value.experiences if not experience.suite]
                    self.acknowledged.update(ids)
                    file.writelines(f"{item}\n" for item in ids)
                file.flush()
                if last and not messages:
                    ends = await self._log.bus.end_offsets(self._log.name(topic))
                    if all(reader.positions().get(at, 0) >= end for at, end in ends.items()):
                        return
        finally:
            await reader.close()


class Fates:
    """What the log says became of every experience, by rules written anew from the design."""

    def __init__(self) -> None:
        self.published: set[str] = set()
        self.trained: Counter[tuple[str, int, int]] = Counter()
        self.dropped: dict[str, str] = {}
        self.stale_tokens = 0
        self.steps = 0
        self.undone_steps = 0
        self._place: dict[str, tuple[str, int]] = {}
        self._buffered: set[str] = set()
        self._closures: dict[tuple[str, int], Closure] = {}
        self._group_drops: dict[str, str] = {}
        self._token = -1
        self._batches: list[Batch] = []
        self._undone: list[Batch] = []

    @classmethod
    async def read(cls, log: Log, max_staleness: int) -> "Fates":
        """Everything in the log."""
        fates = cls()
        for topic in (
            topics.BATCHES, topics.PROGRESS, topics.BUFFER, topics.DEAD_LETTERS, topics.VERIFIED, *SOURCES,
        ):  # fmt: skip
            async for message in log.read_all(topic):
                fates._take(topic, message.value)
        for batch in fates._batches:
            fates.undone_steps += batch in fates._undone
            fates.steps += batch.phase == "train"
            for item in batch.items:
                fates.trained[item.id, item.revision, item.use] += 1
                stale = item.lane == "usual" and batch.version - item.min_version > max_staleness
                fates.stale_tokens += stale
        fates._close()
        return fates

    def _take(self, topic: topics.Topic, record: object) -> None:
        if isinstance(record, Fence):
            self._token = max(self._token, record.token)
        elif isinstance(record, Batch):
            if record.token >= self._token and (record.token, record.step) not in {
                (batch.token, batch.step) for batch in self._batches[-3:]
            }:
                self._batches.append(record)
        elif isinstance(record, Skip) and record.token >= self._token:
            self._undo(range(record.step, record.step + 1), "step skipped")
        elif isinstance(record, Rollback) and record.token >= self._token:
            self._undo(range(record.from_step, record.to_step + 1), "rolled back")
        elif isinstance(record, Closure):
            self._closures[record.group, record.attempt] = record
        elif isinstance(record, Drawn):
            self._group_drops |= record.dropped
        elif isinstance(record, DropMarker):
            self.dropped.setdefault(record.id, record.reason)
        elif isinstance(record, DeadLetter):
            self._take_letter(record)
        elif isinstance(record, Block) and topic is topics.BUFFER:
            self._buffered |= {item.id for item in record.experiences}
        elif isinstance(record, Block) and topic in SOURCES:
            for experience in record.experiences:
                if not experience.suite:
                    self.published.add(experience.id)
                    self._place[experience.id] = (experience.group, experience.attempt)
                    if experience.held_out:
                        self.dropped[experience.id] = "kept for validation"

    def _undo(self, steps: range, reason: str) -> None:
        """What the journal listed before for these steps changed nothing; nothing of it may be listed again."""
        for batch in self._batches:
            if batch.step in steps and batch not in self._undone:
                self._undone.append(batch)
                self.dropped |= {item.id: reason for item in batch.items}

    def _take_letter(self, letter: DeadLetter) -> None:
        try:
            inner = decode(letter.value)
        except BadFrame:
            return
        if isinstance(inner, Block):
            self.dropped |= {experience.id: letter.reason for experience in inner.experiences}

    def _close(self) -> None:
        """Members of groups that ended without the buffer, and those that collect took out of one that reached it."""
        left_out: Counter[tuple[str, int]] = Counter()
        for name, place in self._place.items():
            closure = self._closures.get(place)
            if closure is not None and closure.outcome != "buffered":
                self.dropped.setdefault(name, closure.reason or closure.outcome)
            elif place[0] in self._group_drops:
                self.dropped.setdefault(name, self._group_drops[place[0]])
            elif closure is not None and name not in self._buffered and name not in self.dropped:
                left_out[place] += 1
                if left_out[place] <= sum(closure.drops.values()):
                    self.dropped[name] = "dropped in collect"

    def lost(self, acknowledged: set[str], pending: set[str]) -> set[str]:
        """Acknowledged ids that the log no longer holds, or that are neither trained, dropped with a reason, nor pending."""
        trained = {name for name, _, _ in self.trained}
        return (acknowledged - self.published) | (acknowledged - trained - self.dropped.keys() - pending)

    def trained_twice(self) -> set[str]:
        """Ids whose (revision, use) counts more than once in the journal."""
        return {name for (name, _, _), count in self.trained.items() if count > 1}
