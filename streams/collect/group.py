"""State of one group: its attempts, what has arrived, the feedback on its answers, and how it ended.

An attempt is complete when every episode 0..group_size-1 has all its parts up to its last one; a drop marker counts like the
experience it replaces. Arrivals are known by (episode, part), so a redelivery changes nothing.

A partition may have a million groups open, which no search for garbage should walk through for seconds: these records hold each
other in one direction alone, so they can make no cycle and the garbage collector does not know them (`gc=False`).
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from schemas import Block, DropMarker, Experience, Feedback, Lane

Numbered = TypeVar("Numbered")


class BlockPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The place of an experience.

    offset: of its block in `verified`. index: within the block.
    """

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
        """Note an arrival; False if it was there already or lies outside the group."""
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
        """Experiences that arrived, by (episode, part); done_only: without those of episodes that miss a part."""
        return [
            arrived
            for episode in _in_order(self.episodes)
            if not done_only or episode.is_done
            for arrived in _in_order(episode.parts)
            if isinstance(arrived, BlockPlace)
        ]

    @property
    def has_answers(self) -> bool:
        return any(
            isinstance(part, BlockPlace) for episode in self.episodes.values() for part in episode.parts.values()
        )

    def drops(self) -> dict[str, int]:
        """Drop markers that arrived: reason to count."""
        counts: dict[str, int] = {}
        for episode in self.episodes.values():
            for arrived in episode.parts.values():
                if isinstance(arrived, str):
                    counts[arrived] = counts.get(arrived, 0) + 1
        return counts


class LoggedFeedback(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One feedback and its place in the log.

    feedback: as published. offset: in `verified`. time_ms: log-append time.
    """

    feedback: Feedback
    offset: int
    time_ms: int


class AnswerFeedback(msgspec.Struct, array_like=True, gc=False):
    """The feedback on one answer. See `streams.collect.feedback`.

    counted: what counts of it, in log order, one for each (source, rater, type). known: digests of the last feedback that was
    taken, to recognize a redelivery. edits: how often a correction was made or taken back.
    """

    counted: list[LoggedFeedback] = []
    known: dict[int, None] = {}
    edits: int = 0


class LaterCredit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The credit of a later answer of the same session.

    turns: how many turns later it was given. values: what counts of it, by source.
    """

    turns: int
    values: dict[str, float]


class Group(msgspec.Struct, array_like=True, gc=False):
    """Everything about one group.

    id: of the group. attempts: by number, those still open and the one that won. winner: its number, -1 before. superseded:
    attempts that are over. revision: of the last closure. closed_ms: 0 while open. due_ms: when time alone decides something,
    0 never. feedback: by experience id. lane: of the copy that the last revision sent on, None without a copy. depth: messages
    before the answer of a session's turn, -1 for anything else. credits: of later turns of the session, by group. retrained:
    how often late feedback had it trained again. join: the name under which it was closed with others, "" for alone.
    num_credited: revisions that credit of later turns made; the other revisions are of feedback on its own answers.

    is_ready: of a turn, see `streams.collect.turns`: nothing more is waited for that is about itself. is_over: of a turn: no
    other of its session follows.
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
        """Blocks that hold an experience of an attempt still here."""
        return {place.offset for attempt in self.attempts.values() for place in attempt.places()}


def members_at(places: Iterable[BlockPlace], block_at: Callable[[int], Block]) -> list[Experience]:
    """The experiences that lie there. block_at: a block by its offset."""
    return [block_at(place.offset).experiences[place.index] for place in places]


def _in_order(numbered: dict[int, Numbered]) -> Iterable[Numbered]:
    return numbered.values() if len(numbered) == 1 else [numbered[number] for number in sorted(numbered)]


def fullest(attempts: dict[int, Attempt]) -> Attempt:
    """The attempt a deadline closes: most episodes done, then most that arrived at all, then the earliest."""
    return max(attempts.values(), key=lambda attempt: (attempt.num_done, len(attempt.episodes), -attempt.number))
