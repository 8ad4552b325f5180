"""Which events of a policy count. Pure.

Rule: the newest lease of a trainer fences all before it: what was published or orphaned under an older one, behind it in
the log, counts for nothing. A version counts as its first event says; an orphaned number stays taken.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from infra.policies.summary import PolicySummary
from schemas import PolicyEvent


class LeaseFence:
    """Which trainer's word holds, from the events of one policy in log order. token: of the newest lease, -1 before one."""

    KEPT: ClassVar[dict[str, Any]] = {"token": int}

    def __init__(self, token: int = -1) -> None:
        self.token = token

    def admits(self, event: PolicyEvent, offset: int) -> bool:
        """Whether a trainer's event that lies at `offset` counts; a lease itself says nothing of a version."""
        if event.event == "lease":
            self.token = max(self.token, offset)
            return False
        return event.token >= self.token


def count(found: dict[int, PolicyEvent], event: PolicyEvent) -> None:
    """Add an event that is admitted to what was published before it."""
    if event.event == "published":
        found.setdefault(event.version, event)
    elif event.event == "orphaned" and event.version in found:
        found[event.version] = msgspec.structs.replace(found[event.version], event="orphaned")


def published(
    events: Iterable[tuple[int, PolicyEvent]], policy: str, since: PolicySummary | None = None
) -> dict[int, PolicyEvent]:
    """Version → its event, "published" or "orphaned", of (offset, event) in log order. since: of what lies before them; then
    versions from its `known_from` on.
    """
    fence = LeaseFence(-1 if since is None else since.token)
    found = {} if since is None else since.published()
    for offset, event in events:
        if event.policy == policy and fence.admits(event, offset):
            count(found, event)
    return found
