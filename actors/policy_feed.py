"""The policies there are, as read from the log, and which one an engine should load next. Pure.

Guarantees: a trainer that lost its lease publishes nothing (fencing); an engine goes forward only; the version an
evaluation waits for is not skipped while it is known.
"""

from collections.abc import Collection

from schemas import PolicyEvent

_CARRIES_WEIGHTS = ("published", "rolled_back")


class PolicyFeed:
    """Version events of one policy in log order."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._token = -1
        self.events: dict[int, PolicyEvent] = {}
        self.newest = 0

    def apply(self, event: PolicyEvent, offset: int) -> bool:
        """Take the next event; True if it announces weights to load. `offset`: where it lies in `policies`."""
        if event.policy != self._policy:
            return False
        if event.event == "lease":
            self._token = max(self._token, offset)
            return False
        if event.event == "orphaned":
            self.events.pop(event.version, None)
            return False
        if event.event not in _CARRIES_WEIGHTS or not event.manifest or event.token < self._token:
            return False
        self.events[event.version] = event
        self.newest = max(self.newest, event.version)
        return True

    def forget_below(self, version: int) -> None:
        """Drop events an engine that holds `version` can no longer want."""
        for old in [known for known in self.events if known < version]:
            del self.events[old]

    def next(self, held: int, *, pinned: Collection[int], refused: Collection[int]) -> PolicyEvent | None:
        """The event to load after `held`: the oldest an evaluation waits for, else the newest; None for none."""
        ahead = [version for version in self.events if version > held and version not in refused]
        if not ahead:
            return None
        awaited = [version for version in ahead if version in pinned]
        return self.events[min(awaited, default=max(ahead))]
