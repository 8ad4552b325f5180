"""State of `policies` at a place in it, in few bytes: a reader begins there, and not at the first record.

    policies   0 ……………… 811 │ 812 … end
    store      a summary of all below 812

A summary is a function of the records below its place, so each is true, from any writer and at any time. It names the
last of these by a digest of its time and bytes: a log that lost records and went on otherwise does not match it. Pure.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import msgspec

from infra.policies.channel import Stable
from schemas import PolicyEvent
from schemas.fields import PolicyEventKind

Learning = Literal["", "drain", "pause", "continue"]


class VersionEntry(msgspec.Struct, frozen=True, array_like=True):
    """Fields of a version's event that engines and trainers use.

    event: kind of the event. version: its number. parent: version it was trained from, -1 for none. token: of the trainer's
    lease. step: last step it contains. manifest: key in the store. sha256: of the manifest's bytes.

    Example: VersionEntry("published", 12, 11, 17, 12, "policies/main/17/manifests/12.json", "9f…")
    """

    event: PolicyEventKind
    version: int
    parent: int
    token: int
    step: int
    manifest: str
    sha256: str


class PolicySummary(msgspec.Struct, frozen=True):
    """State of one policy.

    policy: name. stable: versions that channels serve. token: of the newest trainer's lease. newest: highest version with
    weights. known_from: first version from which on all are listed; of older versions only those that a channel serves are.
    announced: versions that an engine may load. otherwise: versions that a trainer counts differently, such as orphaned ones.

    Example: PolicySummary(policy="main", token=17, newest=144, known_from=81)
    """

    policy: str
    stable: Stable = Stable()
    token: int = -1
    newest: int = 0
    known_from: int = 0
    announced: tuple[VersionEntry, ...] = ()
    otherwise: tuple[VersionEntry, ...] = ()

    def events(self) -> dict[int, PolicyEvent]:
        """Version → the event that announces it."""
        return {entry.version: _event(self.policy, entry) for entry in self.announced}

    def published(self) -> dict[int, PolicyEvent]:
        """Version → its event as `published` below returns it, from `known_from` on."""
        found = {version: event for version, event in self.events().items() if event.event == "published"}
        return found | {entry.version: _event(self.policy, entry) for entry in self.otherwise}


class Summary(msgspec.Struct, frozen=True):
    """All policies at one place in `policies`.

    below: offset up to which records count. last: digest of the record before that. lease: offset of the newest master's
    lease, -1 before one. learning: an operator's newest order about learning, "" before the first. policies: state of each.

    Example: Summary(below=812, last="3a…", lease=17, learning="", policies=(PolicySummary("main"),))
    """

    below: int
    last: str
    lease: int
    learning: Learning
    policies: tuple[PolicySummary, ...]

    def of(self, policy: str) -> PolicySummary:
        """Summary of one policy, empty for a policy without events."""
        begun = PolicySummary(policy, Stable(lease=self.lease))
        return next((summary for summary in self.policies if summary.policy == policy), begun)


def entries(events: Iterable[PolicyEvent]) -> tuple[VersionEntry, ...]:
    """Entries of a summary for these events."""
    return tuple(
        VersionEntry(
            event.event, event.version, event.parent, event.token, event.step, event.manifest, event.manifest_sha256
        )
        for event in events
    )


def _event(policy: str, entry: VersionEntry) -> PolicyEvent:
    return PolicyEvent(
        event=entry.event,
        policy=policy,
        version=entry.version,
        parent=entry.parent,
        token=entry.token,
        manifest=entry.manifest,
        manifest_sha256=entry.sha256,
        step=entry.step,
    )


class LeaseFence:
    """Admits events of the newest trainer's lease, in log order of one policy. token: of that lease, -1 before one."""

    KEPT: ClassVar[dict[str, Any]] = {"token": int}

    def __init__(self, token: int = -1) -> None:
        self.token = token

    def admits(self, event: PolicyEvent, offset: int) -> bool:
        """True if a trainer's event at `offset` counts. A lease moves the fence and is itself False."""
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
    """Version → its event, "published" or "orphaned", from (offset, event) in log order. since: summary of the records before
    them; the result then begins at its `known_from`.
    """
    fence = LeaseFence(-1 if since is None else since.token)
    found = {} if since is None else since.published()
    for offset, event in events:
        if event.policy == policy and fence.admits(event, offset):
            count(found, event)
    return found
