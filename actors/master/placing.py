"""Placing of tasks: the next task goes to the least loaded explorer that reported its partitions lately.

Each explorer reads partitions of `tasks` of its own, so a task is sent to an explorer by its partition. State without clock,
task or client. Missing knowledge costs balance alone: the explorer that reads a task's partition runs it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from infra.roles.process import Absence

SILENT_MS = 15_000  # explorers report every few seconds: an explorer that was silent for longer gets nothing new


class _Explorer(msgspec.Struct):
    partitions: tuple[int, ...] | None
    heard_ms: int


class Placing:
    """Explorers by instance, and the groups that run, by the explorer that has them."""

    KEPT: ClassVar[dict[str, Any]] = {
        "_explorers": dict[str, _Explorer], "_groups": dict[str, tuple[str, int]], "_load": dict[str, int], "_turn": int
    }  # fmt: skip

    def __init__(self) -> None:
        self._explorers: dict[str, _Explorer] = {}
        self._groups: dict[str, tuple[str, int]] = {}
        self._load: dict[str, int] = {}
        self._turn = 0
        self.without = Absence()

    def heard(self, instance: str, partitions: Iterable[int] | None, now_ms: int) -> None:
        """Note the report of a working explorer. partitions: of `tasks` that it reads, None where it does not say."""
        self._explorers[instance] = _Explorer(None if partitions is None else tuple(sorted(partitions)), now_ms)

    def left(self, instance: str) -> None:
        self._explorers.pop(instance, None)

    def has(self, instance: str, group: str, num_episodes: int) -> None:
        """Note that an explorer runs a group."""
        if self._groups.get(group, ("", 0))[0] != instance:
            self._move(group, instance, num_episodes)

    def ended(self, group: str) -> None:
        if (known := self._groups.pop(group, None)) is not None:
            self._load[known[0]] -= known[1]
            if not self._load[known[0]]:
                del self._load[known[0]]

    def place(self, group: str, num_episodes: int, now_ms: int, *, counts: bool) -> int | None:
        """The partition to send a task to; None to leave it to its key, while not every explorer says what it reads.

        counts: its end is reported with `ended`. Others (evals, which come many at a time) go to one explorer after the other.
        """
        self._forget(now_ms)
        if any(explorer.partitions is None for explorer in self._explorers.values()):
            return None
        reading = sorted(name for name, explorer in self._explorers.items() if explorer.partitions)
        if not reading:
            return None
        if counts:
            chosen = min(reading, key=lambda name: self._load.get(name, 0))
            self._move(group, chosen, num_episodes)
        else:
            self._turn += 1
            chosen = reading[self._turn % len(reading)]
        partitions = self._explorers[chosen].partitions
        assert partitions
        return partitions[0]

    def loads(self) -> Mapping[str, int]:
        """Episodes that each explorer has, as far as known; those that have none are left out."""
        return dict(self._load)

    def look(self, now_ms: int) -> bool:
        """True once it becomes an alarm that explorers have no partition to read."""
        return self.without.look(now_ms / 1000, wanted=True, there=not self.idle(now_ms))

    def idle(self, now_ms: int) -> list[str]:
        """Explorers that read no partition, and so will never have anything to do."""
        self._forget(now_ms)
        return sorted(name for name, explorer in self._explorers.items() if explorer.partitions == ())

    def alarms(self, now_ms: int) -> list[str]:
        """A sentence for an operator where explorers have had no partition for a while."""
        idle = self.idle(now_ms)
        if not self.without.missing_s or not idle:
            return []
        return [
            f"{len(idle)} of {len(self._explorers)} explorers read no partition of tasks and do nothing, such as"
            f" {idle[0]}: an app has work for as many explorers as it has partitions (kafka.partitions)"
        ]

    def _move(self, group: str, instance: str, num_episodes: int) -> None:
        self.ended(group)
        self._groups[group] = instance, num_episodes
        self._load[instance] = self._load.get(instance, 0) + num_episodes

    def _forget(self, now_ms: int) -> None:
        for name, explorer in [*self._explorers.items()]:
            if now_ms - explorer.heard_ms >= SILENT_MS:
                del self._explorers[name]
