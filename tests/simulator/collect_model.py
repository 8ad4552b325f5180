"""A second model of the decisions of collect: a plain reading of one partition of `verified`, record by record.

Written from the rules and not from the fold: one part per episode, the lanes and the feedback sources of the simulation.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from schemas import Block, DropMarker, Experience, Feedback
from schemas.ids import group_of, session_of
from streams.collect.feedback import named_answer

Key = tuple[str, int, int]


class Expected(msgspec.Struct):
    """One closure: superseded, or with members. members: id → source → mean of its feedback."""

    superseded: bool = False
    members: dict[str, dict[str, float]] = {}
    missing: int = 0


class Try(msgspec.Struct):
    """One attempt so far. there: episode → experience id, "" for a stub."""

    size: int
    lane: str
    first_ms: int
    there: dict[int, str] = {}


class Fate(msgspec.Struct):
    """One group so far. heard: answer → feedback in order. session: whose turn it is. is_ready: it waits for that alone."""

    tries: dict[int, Try] = {}
    winner: int = -1
    over: set[int] = set()
    is_closed: bool = False
    revision: int = 0
    due_ms: int = 0
    heard: dict[str, list[Feedback]] = {}
    first_heard_ms: int = 0
    session: str = ""
    is_ready: bool = False


class CollectModel:
    """expected: closures that `progress` must have. late: effect of feedback after the window. sources: of feedback."""

    def __init__(
        self, *, deadline_ms: int, window_ms: int, late: str, sources: tuple[str, ...], session_ms: int = 0
    ) -> None:
        self.session_ms = session_ms
        self.sources = sources
        self.deadline_ms = deadline_ms
        self.window_ms = window_ms
        self.late = late
        self.expected: dict[Key, Expected] = {}
        self.groups: dict[str, Fate] = {}

    def read(self, records: Iterable[tuple[int, Any]]) -> None:
        """(log-append ms, record) of one partition, in order."""
        now_ms = 0
        for time_ms, value in records:
            now_ms = max(now_ms, time_ms)
            self._fire(now_ms)
            if isinstance(value, Block):
                done = [self._arrive(member, member.id, now_ms) for member in value.experiences]
                self._complete(value.group, [number for number in done if number is not None], now_ms)
            elif isinstance(value, DropMarker):
                number = self._arrive(value, "", now_ms)
                self._complete(value.group, [] if number is None else [number], now_ms)
            elif isinstance(value, Feedback):
                self._hear(value, now_ms)

    def _fire(self, now_ms: int) -> None:
        while True:
            due = [(item.due_ms, name) for name, item in self.groups.items() if 0 < item.due_ms <= now_ms]
            if not due:
                return
            name = min(due)[1]
            group = self.groups[name]
            group.due_ms = 0
            if group.winner >= 0:
                self._end(name, now_ms)
            elif group.tries:
                best = max(group.tries, key=lambda number: (len(group.tries[number].there), -number))
                self._win(name, best, now_ms)
            else:
                del self.groups[name]

    def _arrive(self, item: Any, id: str, now_ms: int) -> int | None:
        """The attempt that has news, if any."""
        group = self.groups.setdefault(item.group, Fate())
        if item.attempt in group.over:
            return None
        if group.winner >= 0:
            if item.attempt != group.winner:
                self._supersede(item.group, item.attempt)
            return None
        attempt = group.tries.setdefault(item.attempt, Try(item.group_size, item.lane, now_ms))
        if item.episode in attempt.there:
            return None
        attempt.there[item.episode] = id
        if isinstance(item, Experience) and item.turn >= 0 and item.group_size == 1:
            group.session = session_of(item.group)
        group.due_ms = min(known.first_ms for known in group.tries.values()) + self.deadline_ms
        return int(item.attempt)

    def _complete(self, name: str, numbers: list[int], now_ms: int) -> None:
        group = self.groups[name]
        for number in sorted(numbers):
            if len(group.tries[number].there) == group.tries[number].size:
                self._win(name, number, now_ms)
                return

    def _win(self, name: str, number: int, now_ms: int) -> None:
        group = self.groups[name]
        group.winner = number
        for other in [other for other in group.tries if other != number]:
            del group.tries[other]
            self._supersede(name, other)
        self._close_unless_waiting(name, now_ms)

    def _close_unless_waiting(self, name: str, now_ms: int) -> None:
        group = self.groups[name]
        attempt = group.tries[group.winner]
        members = [id for id in attempt.there.values() if id]
        due_ms = attempt.first_ms + self.window_ms
        if attempt.lane == "live" and members and due_ms > now_ms and not self._all_heard(group, members):
            group.due_ms, group.is_ready = due_ms, False
            return
        self._end(name, now_ms)

    def _end(self, name: str, now_ms: int) -> None:
        group = self.groups[name]
        if not group.session:
            self._close(name)
            return
        group.is_ready = True
        turns = {
            other: item
            for other, item in self.groups.items()
            if item.session == group.session and item.winner >= 0 and not item.is_closed
        }
        silent_ms = max(record.tries[record.winner].first_ms for record in turns.values()) + self.session_ms
        is_over = silent_ms <= now_ms and all(record.is_ready for record in turns.values())
        for other, turn in turns.items():
            if is_over:
                self._close(other)
            elif turn.is_ready:
                turn.due_ms = silent_ms if silent_ms > now_ms else 0

    def _all_heard(self, group: Fate, members: list[str]) -> bool:
        return all({member.source for member in group.heard.get(id, ())} >= set(self.sources) for id in members)

    def _close(self, name: str) -> None:
        group = self.groups[name]
        group.is_closed, group.due_ms = True, 0
        self.expected[name, group.winner, 0] = self._state(group)

    def _state(self, group: Fate) -> Expected:
        attempt = group.tries[group.winner]
        members = {id: means(group.heard.get(id, [])) for id in attempt.there.values() if id}
        return Expected(members=members, missing=attempt.size - len(attempt.there))

    def _supersede(self, name: str, number: int) -> None:
        self.groups[name].over.add(number)
        self.expected[name, number, 0] = Expected(superseded=True)

    def _hear(self, feedback: Feedback, now_ms: int) -> None:
        try:
            name = group_of(feedback.ref)
        except ValueError:
            return
        answer = named_answer(feedback.ref)
        group = self.groups.setdefault(name, Fate())
        if (feedback.source, feedback.id) in [(member.source, member.id) for member in group.heard.get(answer, [])]:
            return
        if group.is_closed:
            attempt = group.tries[group.winner]
            is_dropped = self.late == "drop" and now_ms >= attempt.first_ms + self.window_ms
            if is_dropped or answer not in attempt.there.values():
                return
            heard = group.heard.setdefault(answer, [])
            before = last_words(heard)
            heard.append(feedback)
            if last_words(heard) == before:
                return
            group.revision += 1
            self.expected[name, group.winner, group.revision] = self._state(group)
            return
        group.heard.setdefault(answer, []).append(feedback)
        group.first_heard_ms = group.first_heard_ms or now_ms
        if group.winner >= 0:
            self._close_unless_waiting(name, now_ms)
        elif not group.tries:
            group.due_ms = group.first_heard_ms + max(self.window_ms, self.deadline_ms)


def last_words(heard: list[Feedback]) -> dict[tuple[str, str], float]:
    """The last value of each rater of a source."""
    return {(word.source, word.rater): word.value for word in heard if word.value is not None}


def means(heard: list[Feedback]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for (source, _), value in last_words(heard).items():
        found.setdefault(source, []).append(value)
    return {source: sum(values) / len(values) for source, values in found.items()}
