"""What `policies` says up to a place in it, in few bytes: a reader begins there, and not at the first record.

    policies   0 ……………… 811 │ 812 … 905 │ 906: a version, with the summary of all below 812 in a header │ 907 … end
                             └─────────────────────────── what a start reads ──────────────────────────────────┘

A summary is a function of the records below its place, so each is true, from any writer and at any time. It names the
last of these by a digest of its time and bytes: in a log that lost records and went on otherwise it counts for nothing. It lies
in a header, so that older releases pass over it and no damage to it costs a version. Pure.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import msgspec

from infra.policies.channel import Stable
from schemas import PolicyEvent
from schemas.fields import PolicyEventKind

FORMAT = 1  # of the layout, and of the rules by which records count
HEADER = "policies"
MAX_BYTES = 1024 * 1024
SUM_BYTES = 16

Learning = Literal["", "drain", "pause", "continue"]


class SummaryRefused(Exception):
    """A summary that is not used, and why."""


class VersionEntry(msgspec.Struct, frozen=True, array_like=True):
    """What an engine and a trainer need of the event of a version.

    event: its kind. version: that it is of. parent: trained from, -1 for none. token: of the trainer's lease. step: the
    last one it contains. manifest: its key. sha256: of the manifest's bytes.

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
    """What was said of one policy.

    policy: its name. stable: what customers get. token: of the newest trainer's lease. newest: the highest version with
    weights. known_from: from this version on all are there; of older ones those that a channel serves. announced:
    versions that an engine may load. otherwise: those that a trainer takes for something else, as an orphaned one (see
    `infra.policies.summary`).

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
        return {one.version: _event(self.policy, one) for one in self.announced}

    def published(self) -> dict[int, PolicyEvent]:
        """Version → its event, as `infra.policies.summary.published` has it, from `known_from` on."""
        found = {version: event for version, event in self.events().items() if event.event == "published"}
        return found | {one.version: _event(self.policy, one) for one in self.otherwise}


class Summary(msgspec.Struct, frozen=True):
    """Of all policies.

    format: of the file. below: the offset in `policies` up to which it tells. last: digest of the record before that.
    lease: of the newest master, -1 before one. learning: an operator's newest word, "" before the first. policies: one
    for each.

    Example: Summary(format=1, below=812, last="3a…", lease=17, learning="", policies=(PolicySummary("main"),))
    """

    format: int
    below: int
    last: str
    lease: int
    learning: Learning
    policies: tuple[PolicySummary, ...]

    def of(self, policy: str) -> PolicySummary:
        """What was said of a policy; of one of which nothing was, too."""
        begun = PolicySummary(policy, Stable(lease=self.lease))
        return next((one for one in self.policies if one.policy == policy), begun)


class _Numbered(msgspec.Struct):
    format: int


def packed(summary: Summary) -> bytes:
    """Its bytes, behind their sum."""
    data = msgspec.msgpack.encode(summary)
    return _sum(data) + data


def unpacked(stored: bytes) -> Summary:
    """Raises SummaryRefused for what is damaged or of another format."""
    data = stored[SUM_BYTES:]
    if stored[:SUM_BYTES] != _sum(data):
        raise SummaryRefused(f"damaged: {len(stored)} bytes whose sum is not the one they begin with")
    try:
        if (number := msgspec.msgpack.decode(data, type=_Numbered).format) != FORMAT:
            raise SummaryRefused(f"of format {number}, this release reads {FORMAT}")
        return msgspec.msgpack.decode(data, type=Summary)
    except msgspec.MsgspecError as error:
        raise SummaryRefused(f"not read: {error}") from error


def entries(events: Iterable[PolicyEvent]) -> tuple[VersionEntry, ...]:
    """What a summary keeps of these events."""
    return tuple(
        VersionEntry(one.event, one.version, one.parent, one.token, one.step, one.manifest, one.manifest_sha256)
        for one in events
    )


def _event(policy: str, one: VersionEntry) -> PolicyEvent:
    return PolicyEvent(
        event=one.event,
        policy=policy,
        version=one.version,
        parent=one.parent,
        token=one.token,
        manifest=one.manifest,
        manifest_sha256=one.sha256,
        step=one.step,
    )


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SUM_BYTES).digest()


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
