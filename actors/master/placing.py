"""Placing of tasks: the next task goes to the explorer with the fewest groups that reported its partitions lately.

Each explorer reads partitions of `tasks` of its own, so a task is sent to an explorer by its partition. State without clock,
task or client. Missing knowledge costs balance alone: the explorer that reads a task's partition runs it.
"""

from collections.abc import Iterable

import msgspec

from infra.roles.process import Absence

SILENT_MS = 15_000  # explorers report every few seconds: an explorer that was silent for longer gets nothing new


class _Explorer(msgspec.Struct):
    """groups: that it held at its last report of them, and those sent to it since."""

    partitions: tuple[int, ...] | None
    heard_ms: int
    groups: int


class Placing:
    """Explorers by instance, as they report."""

    def __init__(self) -> None:
        self._explorers: dict[str, _Explorer] = {}
        self.without = Absence()

    def heard(self, instance: str, partitions: Iterable[int] | None, now_ms: int, groups: int | None = None) -> None:
        """Note the report of a working explorer. partitions: of `tasks` that it reads, None where it does not say. groups: that
        it holds, None where the report does not name them.
        """
        if groups is None:
            groups = self._explorers[instance].groups if instance in self._explorers else 0
        self._explorers[instance] = _Explorer(None if partitions is None else tuple(sorted(partitions)), now_ms, groups)

    def left(self, instance: str) -> None:
        self._explorers.pop(instance, None)

    def place(self, now_ms: int) -> int | None:
        """The partition to send a task to; None to leave it to its key, while not every explorer says what it reads."""
        self._forget(now_ms)
        if any(explorer.partitions is None for explorer in self._explorers.values()):
            return None
        reading = [explorer for _, explorer in sorted(self._explorers.items()) if explorer.partitions]
        if not reading:
            return None
        chosen = min(reading, key=lambda explorer: explorer.groups)
        chosen.groups += 1
        assert chosen.partitions
        return chosen.partitions[0]

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

    def _forget(self, now_ms: int) -> None:
        for name, explorer in [*self._explorers.items()]:
            if now_ms - explorer.heard_ms >= SILENT_MS:
                del self._explorers[name]
