"""Versions of a policy as read from the log, and the one that an engine should load next. Pure.

Guarantees: a trainer that lost its lease publishes nothing (fencing); an engine goes forward only, unless it follows the
stable channel, which may be pinned or rolled back; the version an evaluation waits for is not skipped while it is known.
"""

from collections.abc import Collection
from typing import Any, ClassVar

from infra.policies.channel import Stable, fenced, moved
from infra.policies.summary import LeaseFence, PolicySummary
from schemas import Directive, PolicyEvent
from schemas.fields import Channel

_CARRIES_WEIGHTS = ("published", "rolled_back")


class PolicyFeed:
    """Version events of one policy in log order. channel: once the stable channel has a version, what a channel serves is
    wanted and nothing else; of the candidate channel everything. since: of what lies before the events that it is given, None
    where it is given all. KEPT, PARTS: see `actors.master.snapshot`.
    """

    KEPT: ClassVar[dict[str, Any]] = {"stable": Stable, "events": dict[int, PolicyEvent], "newest": int}
    PARTS: ClassVar[tuple[str, ...]] = ("_fence",)

    def __init__(self, policy: str, *, channel: Channel = "candidate", since: PolicySummary | None = None) -> None:
        since = since or PolicySummary(policy)
        self._policy = policy
        self._channel: Channel = channel
        self._known_from = since.known_from
        self.stable = since.stable
        self._fence = LeaseFence(since.token)
        self.events = since.events()
        self.newest = since.newest

    def fence(self, directive: Directive, offset: int) -> None:
        """Take the next directive. `offset`: where it lies in `policies`."""
        self.stable = fenced(self.stable, directive, offset)

    def apply(self, event: PolicyEvent, offset: int) -> bool:
        """Take the next event; True if it announces weights to load. `offset`: where it lies in `policies`."""
        if event.policy != self._policy:
            return False
        self.stable = moved(self.stable, event, self._policy)
        if not self._fence.admits(event, offset):
            return False
        if event.event == "orphaned":
            self.events.pop(event.version, None)
        if event.event not in _CARRIES_WEIGHTS or not event.manifest:
            return False
        self.events[event.version] = event
        self.newest = max(self.newest, event.version)
        return True

    def forget_below(self, version: int) -> None:
        """Drop events an engine that holds `version` can no longer want; the stable channel may want any again."""
        if self._channel != "candidate":
            return
        for old in [known for known in self.events if known < version]:
            del self.events[old]

    def lacks(self, held: int, *, pinned: Collection[int], refused: Collection[int]) -> bool:
        """True if `next` may need a version that only events before the summary name: then all are to be read."""
        wanted = self.stable.served(self._channel)
        if wanted >= 0:
            return wanted < self._known_from and wanted not in (held, *refused, *self.events)
        ahead = [version for version in self.events if version > held and version not in refused]
        unknown = range(held + 1, self._known_from)
        awaited = any(
            version in unknown and version not in self.events and version not in refused for version in pinned
        )
        return awaited or max(ahead, default=held) < self._known_from - 1

    def next(self, held: int, *, pinned: Collection[int], refused: Collection[int]) -> PolicyEvent | None:
        """The event to load after `held`: the oldest an evaluation waits for, else the newest; None for none."""
        wanted = self.stable.served(self._channel)
        if wanted >= 0:
            return None if wanted == held or wanted in refused else self.events.get(wanted)
        ahead = [version for version in self.events if version > held and version not in refused]
        if not ahead:
            return None
        awaited = [version for version in ahead if version in pinned]
        return self.events[min(awaited, default=max(ahead))]
