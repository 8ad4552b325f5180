"""State of one partition in memory: open groups, the blocks they wait with, and when time decides next.

Guarantee: a state is a function of the records folded so far; where its blocks and closed groups are kept (here, or in
the file of `pending.py`) changes nothing it decides.

An attempt is complete when every episode 0..group_size-1 has all its parts up to its last one; a drop marker counts like the
experience it replaces. Arrivals are known by (episode, part), so a redelivery changes nothing. A partition may have a million
groups open: their records make no cycle, and the garbage collector does not walk through them (`gc=False`).
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from infra.chain.processor import Memory
from infra.newest import Newest
from schemas import Block, DropMarker, Experience, Feedback, FeedbackWait, Lane, decode, encode
from schemas.bulk import FindSeal
from schemas.ids import session_of
from schemas.wire.frame import is_sealed
from streams.stages.stage import confirmed

Numbered = TypeVar("Numbered")


class BlockPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    offset: int
    index: int


class Episode(msgspec.Struct, array_like=True, gc=False):
    """The parts of one episode that arrived.

    parts: by number a BlockPlace, or the reason of the drop marker that came instead. last: number of its last part, -1 not
    seen yet.
    """

    parts: dict[int, BlockPlace | str] = {}
    last: int = -1

    @property
    def is_done(self) -> bool:
        return self.last >= 0 and all(part in self.parts for part in range(self.last + 1))


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One try of a group.

    number: issue of the task, 0 for the first. group_size: episodes of the group. lane: that trains it. sequence: issue order,
    -1 unpaced. first_ms: log-append time of its first record. episodes: by number. num_done: episodes that are done.
    """

    number: int
    group_size: int
    lane: Lane
    sequence: int
    first_ms: int
    episodes: dict[int, Episode] = {}
    num_done: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_done >= self.group_size

    def has(self, episode: int, part: int) -> bool:
        known = self.episodes.get(episode)
        return known is not None and part in known.parts

    def add(self, record: Experience | DropMarker, arrived: BlockPlace | str) -> bool:
        if record.episode >= self.group_size or self.has(record.episode, record.part):
            return False
        episode = self.episodes.setdefault(record.episode, Episode())
        was_done = episode.is_done
        episode.parts[record.part] = arrived
        if record.last:
            episode.last = record.part
        self.num_done += episode.is_done - was_done
        return True

    def places(self, *, done_only: bool = False) -> list[BlockPlace]:
        """Experiences that arrived, by (episode, part); done_only: skip episodes that lack a part."""
        return [
            arrived
            for episode in _in_order(self.episodes)
            if not done_only or episode.is_done
            for arrived in _in_order(episode.parts)
            if isinstance(arrived, BlockPlace)
        ]

    def drops(self) -> Counter[str]:
        arrived = (part for episode in self.episodes.values() for part in episode.parts.values())
        return Counter(reason for reason in arrived if isinstance(reason, str))


class LoggedFeedback(msgspec.Struct, array_like=True, frozen=True, gc=False):
    feedback: Feedback
    offset: int
    time_ms: int


class AnswerFeedback(msgspec.Struct, array_like=True, gc=False):
    """The feedback on one answer. See `streams.collect.feedback`.

    counted: the feedback that counts, in log order, one for each (source, rater, type). known: digests of the last feedback
    that was taken, to recognize a redelivery. edits: how often a correction was made or taken back.
    """

    counted: list[LoggedFeedback] = []
    known: dict[int, None] = {}
    edits: int = 0


class LaterCredit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The credit of a later answer of the same session.

    turns: how many turns later it was given. values: its values that count, by source.
    """

    turns: int
    values: dict[str, float]


class Group(msgspec.Struct, array_like=True, gc=False):
    """Everything about one group.

    attempts: open attempts by number; after the decision, the winner alone. winner: its number, -1 before. superseded: numbers
    of attempts that lost. revision: of the last closure. closed_ms: 0 while open. due_ms: end of its next wait, 0 for none.
    feedback: by experience id. lane: of the copy that the last revision sent on, None without a copy. depth: messages before
    the answer of a session's turn, -1 for other groups. credits: from later turns of the session, by group. retrained: how
    often late feedback had it trained again. join: name of the turns that were closed together, "" for a single turn.
    num_credited: revisions that the credit of later turns caused; feedback on its own answers caused the others.

    is_ready: True once a turn waits for no feedback of its own (`streams.collect.turns`). is_over: True once the
    client ended its session or rewrote the history.
    """

    id: str
    attempts: dict[int, Attempt] = {}
    winner: int = -1
    superseded: list[int] = []
    revision: int = 0
    closed_ms: int = 0
    due_ms: int = 0
    feedback: dict[str, AnswerFeedback] = {}
    lane: Lane | None = None
    depth: int = -1
    credits: dict[str, LaterCredit] = {}
    retrained: int = 0
    is_ready: bool = False
    is_over: bool = False
    join: str = ""
    num_credited: int = 0

    @property
    def is_closed(self) -> bool:
        return self.closed_ms > 0

    @property
    def came_ms(self) -> int:
        """Log-append time of its first record, 0 while only feedback on it has come."""
        return min((attempt.first_ms for attempt in self.attempts.values()), default=0)

    def offsets(self) -> set[int]:
        return {place.offset for attempt in self.attempts.values() for place in attempt.places()}


def members_at(places: Iterable[BlockPlace], block_at: Callable[[int], Block]) -> list[Experience]:
    return [block_at(place.offset).experiences[place.index] for place in places]


def _in_order(numbered: dict[int, Numbered]) -> Iterable[Numbered]:
    return numbered.values() if len(numbered) == 1 else [numbered[number] for number in sorted(numbered)]


def fullest(attempts: dict[int, Attempt]) -> Attempt:
    """The attempt a deadline closes: most episodes done, then most that arrived at all, then the earliest."""
    return max(attempts.values(), key=lambda attempt: (attempt.num_done, len(attempt.episodes), -attempt.number))


MAX_CACHED_BYTES = 64 * 1024 * 1024
READ_AHEAD = 64  # offsets; groups close about in the order in which they came
MEMBER_BYTES = 3 * 1024  # of a decoded header, beside its frame

# Frames at these offsets, and those further ones that cost little; raises where one of the first is gone.
Fetch = Callable[[Sequence[int], Sequence[int]], Awaitable[dict[int, bytes]]]


class Frames:
    """Blocks of open groups by offset: bytes, with a bounded cache of decoded ones."""

    def __init__(self, load: Callable[[int], bytes] | None = None, find_seal: FindSeal | None = None) -> None:
        """load: bytes of a block that was saved before; raises KeyError. find_seal: keys of sealed blocks."""
        self._load = load
        self._find_seal = find_seal
        self._decoded = Newest[int, tuple[Block, int]](max_size=MAX_CACHED_BYTES, size=lambda entry: entry[1])
        self.unsaved: dict[int, bytes] = {}
        self.removed: set[int] = set()
        self.absent: set[int] = set()  # in the log alone, as their state came without them
        self.fetch: Fetch | None = None

    async def bring(self, places: Iterable[BlockPlace]) -> None:
        """Fetch the blocks at these places that only the log has, with some absent blocks that follow them. Decode all sealed
        blocks in a thread: that asks the store for their keys, which may be destroyed since.
        """
        offsets = {place.offset for place in places}
        if lacking := offsets & self.absent:
            assert self.fetch is not None, "blocks are absent, and the state has no fetch"
            ahead = {
                at for offset in lacking for at in range(offset + 1, offset + READ_AHEAD) if at in self.absent
            } - lacking
            found = await self.fetch(sorted(lacking), sorted(ahead))
            self.unsaved |= found
            self.absent.difference_update(found)  # in place, as there may be a million
        for offset in offsets:
            known = self._decoded.get(offset)
            if known is not None and not known[0].experiences[0].is_sealed:
                continue
            if is_sealed(frame := self._frame(offset)):
                work = partial(asyncio.to_thread, self._decode, frame)
                self._remember(offset, await confirmed(work, "key of a waiting answer"), len(frame))

    def put(self, offset: int, block: Block, frame: bytes) -> None:
        self.unsaved[offset] = frame or encode(block)
        self._remember(offset, block, len(self.unsaved[offset]))

    def get(self, offset: int) -> Block:
        if known := self._decoded.get(offset):
            return known[0]
        frame = self._frame(offset)
        block = self._decode(frame)
        self._remember(offset, block, len(frame))
        return block

    def remove(self, offset: int) -> None:
        self.absent.discard(offset)
        self._decoded.pop(offset)
        if self.unsaved.pop(offset, None) is None:
            self.removed.add(offset)

    def mark_saved(self) -> None:
        self.unsaved.clear()
        self.removed.clear()

    def _frame(self, offset: int) -> bytes:
        if (frame := self.unsaved.get(offset)) is not None:
            return frame
        if self._load is None or offset in self.removed:
            raise KeyError(offset)
        return self._load(offset)

    def _decode(self, frame: bytes) -> Block:
        block = decode(frame, self._find_seal)
        assert isinstance(block, Block), "a frame is no block"
        return block

    def _remember(self, offset: int, block: Block, frame_bytes: int) -> None:
        self._decoded.put(offset, (block, frame_bytes + MEMBER_BYTES * len(block.experiences)))


class State:
    """One partition. next_offset: of `verified`, everything below is folded; last_ms: log-append time of the record
    before it. now_ms: newest log-append time seen.

    groups: open ones, and closed ones that were looked up. touched: changed since the last save.
    """

    def __init__(self, frames: Frames | None = None, memories: dict[str, Memory] | None = None) -> None:
        self.next_offset = 0
        self.last_ms = 0
        self.now_ms = 0
        self.groups: dict[str, Group] = {}
        self.touched: set[str] = set()
        self.frames = frames or Frames()
        self.memories: dict[str, Memory] = memories or {}
        self._sessions: dict[str, set[str]] = {}
        self._due: list[tuple[int, str]] = []
        self._held: dict[str, int] = {}  # turns that wait for their session, and when they came
        # Groups that wait for feedback, about in the order they came, and their answers.
        self._waiting: dict[str, int] = {}
        self._closed: deque[tuple[int, str]] = deque()

    def schedule(self, group: Group, due_ms: int) -> None:
        if due_ms == group.due_ms:
            return
        group.due_ms = due_ms
        if due_ms:
            heapq.heappush(self._due, (due_ms, group.id))

    def add(self, group: Group) -> None:
        self.groups[group.id] = group
        if session := session_of(group.id):
            self._sessions.setdefault(session, set()).add(group.id)

    def remove(self, group_id: str) -> None:
        del self.groups[group_id]
        self._held.pop(group_id, None)
        self._waiting.pop(group_id, None)
        if session := session_of(group_id):
            turns = self._sessions[session]
            turns.discard(group_id)
            if not turns:
                del self._sessions[session]

    def wait(self, group: Group) -> None:
        self._waiting[group.id] = len(group.attempts[group.winner].places(done_only=True))

    def waits(self) -> FeedbackWait:
        first = next(iter(self._waiting), None)
        return FeedbackWait(sum(self._waiting.values()), 0 if first is None else self.groups[first].due_ms)

    def hold(self, group: Group, came_ms: int) -> None:
        group.is_ready = True
        self._waiting.pop(group.id, None)
        self._held[group.id] = came_ms

    def unhold(self, group: Group) -> None:
        group.is_ready = False
        self._held.pop(group.id, None)

    def num_held(self) -> int:
        return len(self._held)

    def longest_held(self, count: int) -> list[Group]:
        first = heapq.nsmallest(count, ((came_ms, group_id) for group_id, came_ms in self._held.items()))
        return [self.groups[group_id] for _, group_id in first]

    def turns(self, group_id: str) -> list[Group]:
        return [self.groups[name] for name in sorted(self._sessions.get(session_of(group_id), ()))]

    def restore(self, group: Group) -> None:
        self.add(group)
        if group.is_ready and not group.is_closed:
            self.hold(group, group.attempts[group.winner].first_ms)
        elif group.winner >= 0 and not group.is_closed:
            self.wait(group)
        if group.due_ms:
            heapq.heappush(self._due, (group.due_ms, group.id))

    def next_due_ms(self) -> int:
        while self._due:
            due_ms, group_id = self._due[0]
            group = self.groups.get(group_id)
            if group is not None and group.due_ms == due_ms:
                return due_ms
            heapq.heappop(self._due)
        return 0

    def pop_due(self) -> Group | None:
        due_ms = self.next_due_ms()
        if not due_ms or due_ms > self.now_ms:
            return None
        _, group_id = heapq.heappop(self._due)
        group = self.groups[group_id]
        group.due_ms = 0
        return group

    def close(self, group: Group) -> None:
        group.closed_ms = max(self.now_ms, 1)
        self.unhold(group)
        self._waiting.pop(group.id, None)
        self.schedule(group, 0)
        self._closed.append((group.closed_ms, group.id))

    def expire(self, keep_ms: int) -> None:
        while self._closed and self._closed[0][0] < self.now_ms - keep_ms:
            closed_ms, group_id = self._closed.popleft()
            group = self.groups.get(group_id)
            if group is not None and group.closed_ms == closed_ms:
                self.remove(group_id)

    def forget_closed_order(self) -> None:
        self._closed.clear()

    def oldest_ms(self) -> int:
        """Return the time of the first record of the group that has waited longest, 0 if none waits. The
        dict keeps groups in order of arrival.
        """
        waiting = (group for group in self.groups.values() if group.attempts and not group.is_closed)
        return next((group.came_ms for group in waiting), 0)

    def num_open(self) -> int:
        return sum(not group.is_closed for group in self.groups.values())
