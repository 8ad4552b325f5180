"""State of every policy, folded from the records of `policies`: its versions, and the versions that serve customers. Pure.

    policies   0 ……………… 811 │ 812 … end
    store      a summary of all below 812: a reader begins there, and not at the first record

Rules of the stable channel: `promoted` moves it, unless it is pinned; `pinned` holds it at a version, and `pinned` at -1 lets
it go to the newest promoted one; `rolled_back` moves it to an older version and ends a pin; versions above it that were
promoted before count for nothing from then on. `promoted` in the canary channel begins a trial of that version, or, with the
version before the newest promotion, the watch of the stable one; with the stable version it ends either. Every move of the
stable channel to another version ends them too, and so does `held` with the version that canaries serve. Otherwise a canary
serves the stable version. Events of the candidate channel (all that a trainer publishes) change nothing.

Guarantees: a fold that begins with a summary and reads on equals one that read every record, except for versions below
`known_from`; a summary names the last of its records by a digest, so a log that lost records does not match it. A trainer that
lost its lease publishes nothing, and a master that was overtaken moves nothing: its decision lies behind the lease of the later
one. An operator's orders always count. An engine goes forward only, unless it follows the stable channel; a version
that an evaluation waits for is not skipped while it is known. Bound: twice `window` versions a policy, and its channels'.
"""

from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Literal

import msgspec

from infra.log.bus import Record, digest_of
from infra.log.log import LogMessage
from schemas import Directive, PolicyEvent
from schemas.fields import Channel

MASTERS = frozenset({"gate", "canary", "watch"})  # owners of a master's decisions; any other is a person
WINDOW = 64  # newest versions of a policy: more than a checkpoint, an evaluation or a verdict is usually behind
Learning = Literal["", "drain", "pause", "continue"]


class Stable(msgspec.Struct, frozen=True):
    """Versions of the stable and the canary channel. version: served, -1 before the first promotion. pinned: promotions wait.

    promoted: newest one that counts. trial: the version that canaries serve, -1 for the stable one. before: the version that
    the newest promotion replaced, -1 where there is none or its watch is over. lease: of the newest master, the offset in
    `policies`, -1 before the first.
    """

    version: int = -1
    promoted: int = -1
    pinned: bool = False
    trial: int = -1
    before: int = -1
    lease: int = -1

    @property
    def watched(self) -> bool:
        """True if canaries serve the version before the stable one, to compare the two."""
        return 0 <= self.before == self.trial

    def served(self, channel: Channel) -> int:
        """The version a gateway of that channel serves; -1 for the newest published one."""
        if channel == "candidate":
            return -1
        return self.trial if channel == "canary" and self.trial >= 0 else self.version


def moved(stable: Stable, event: PolicyEvent, policy: str) -> Stable:
    if event.policy != policy or event.channel == "candidate":
        return stable
    if event.owner not in MASTERS:
        return _after(stable, event)
    return stable if is_overtaken(stable, event) else msgspec.structs.replace(_after(stable, event), lease=event.token)


def fenced(stable: Stable, directive: Directive, offset: int) -> Stable:
    """The channel after a directive at `offset`: a new master's lease ends the rights of all earlier masters."""
    if directive.order != "lease":
        return stable
    return msgspec.structs.replace(stable, lease=max(stable.lease, offset))


def is_overtaken(stable: Stable, event: PolicyEvent) -> bool:
    """True if the master that decided this was overtaken before it did."""
    return event.owner in MASTERS and event.token < stable.lease


def _after(stable: Stable, event: PolicyEvent) -> Stable:
    replace, version = msgspec.structs.replace, event.version
    if event.channel == "canary":
        if event.event != "promoted":
            return stable
        return replace(stable, trial=-1, before=-1) if version == stable.version else replace(stable, trial=version)
    match event.event:
        case "promoted" if stable.pinned:
            return replace(stable, promoted=version, trial=-1)
        case "promoted" if version == stable.version:
            return replace(stable, promoted=version)
        case "promoted":
            return replace(stable, version=version, promoted=version, trial=-1, before=stable.version)
        case "pinned" if version >= 0:
            return replace(stable, version=version, pinned=True, trial=-1, before=-1)
        case "pinned":
            free = stable.promoted if stable.promoted >= 0 else stable.version
            return replace(stable, version=free, pinned=False, trial=-1, before=-1)
        case "rolled_back":
            return replace(stable, version=version, promoted=version, pinned=False, trial=-1, before=-1)
        case "held" if version == stable.trial:
            return replace(stable, trial=-1)
    return stable


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


class PolicySummary(msgspec.Struct, frozen=True):
    """State of one policy.

    token: of the newest trainer's lease. newest: highest version with weights. known_from: first version from which on all are
    here; an older version is here only if a channel serves it. events: versions that an engine may load. published: versions
    as a trainer counts them, "published" or "orphaned".
    """

    policy: str
    stable: Stable = Stable()
    token: int = -1
    newest: int = 0
    known_from: int = 0
    events: dict[int, PolicyEvent] = {}
    published: dict[int, PolicyEvent] = {}


class Summary(msgspec.Struct, frozen=True):
    """All policies at one place in `policies`.

    below: offset up to which records count. last: digest of the record before that. lease: offset of the newest master's
    lease, -1 before one. learning: an operator's newest order about learning, "" before the first.
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


def published(
    events: Iterable[tuple[int, PolicyEvent]], policy: str, since: PolicySummary | None = None
) -> dict[int, PolicyEvent]:
    """Version → its event, "published" or "orphaned", from (offset, event) in log order. since: summary of the records before
    them; the result then begins at its `known_from`.
    """
    fence = LeaseFence(-1 if since is None else since.token)
    found = {} if since is None else dict(since.published)
    for offset, event in events:
        if event.policy == policy and fence.admits(event, offset):
            _count(found, event)
    return found


def _count(found: dict[int, PolicyEvent], event: PolicyEvent) -> None:
    if event.event == "published":
        found.setdefault(event.version, event)
    elif event.event == "orphaned" and event.version in found:
        found[event.version] = msgspec.structs.replace(found[event.version], event="orphaned")


class PolicyFeed:
    """Versions of one policy, and which version an engine should load next, from its events in log order.

    channel: once the stable channel has a version, the version that a channel serves is wanted and nothing else; of the
    candidate channel everything. since: summary of the records before the events, None where the feed is given all. KEPT,
    PARTS: see `actors.master.snapshot`.
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
        self.events = dict(since.events)
        self.newest = since.newest

    def fence(self, directive: Directive, offset: int) -> None:
        """Take the next directive. offset: in `policies`."""
        self.stable = fenced(self.stable, directive, offset)

    def apply(self, event: PolicyEvent, offset: int) -> bool:
        """Take the next event; True if it announces weights to load. offset: in `policies`."""
        if event.policy != self._policy:
            return False
        self.stable = moved(self.stable, event, self._policy)
        if not self.admits(event, offset):
            return False
        if event.event == "orphaned":
            self.events.pop(event.version, None)
        if event.event not in ("published", "rolled_back") or not event.manifest:
            return False
        self.events[event.version] = event
        self.newest = max(self.newest, event.version)
        return True

    def admits(self, event: PolicyEvent, offset: int) -> bool:
        return self._fence.admits(event, offset)

    def forget_below(self, version: int) -> None:
        """Drop events an engine that holds `version` can no longer want; the stable channel may want any again."""
        if self._channel == "candidate":
            self.events = {known: event for known, event in self.events.items() if known >= version}

    def lacks(self, held: int, *, pinned: Collection[int], refused: Collection[int]) -> bool:
        """True if `next` may need a version that only events before the summary name: then all are to be read."""
        wanted = self.stable.served(self._channel)
        if wanted >= 0:
            return wanted < self._known_from and wanted not in (held, *refused, *self.events)
        unknown = set(range(held + 1, self._known_from)).difference(self.events, refused)
        return not unknown.isdisjoint(pinned) or max(self._ahead(held, refused), default=held) < self._known_from - 1

    def next(self, held: int, *, pinned: Collection[int], refused: Collection[int]) -> PolicyEvent | None:
        """The event to load after `held`: the oldest an evaluation waits for, else the newest; None for none."""
        wanted = self.stable.served(self._channel)
        if wanted >= 0:
            return None if wanted == held or wanted in refused else self.events.get(wanted)
        ahead = self._ahead(held, refused)
        awaited = [version for version in ahead if version in pinned]
        return self.events[min(awaited, default=max(ahead))] if ahead else None

    def _ahead(self, held: int, refused: Collection[int]) -> list[int]:
        return [version for version in self.events if version > held and version not in refused]


class _PolicyFold(PolicyFeed):
    def __init__(self, since: PolicySummary, window: int) -> None:
        super().__init__(since.policy, since=since)
        self._window = window
        self._published = dict(since.published)

    def apply(self, event: PolicyEvent, offset: int) -> bool:
        announces = super().apply(event, offset)
        if self.admits(event, offset):
            _count(self._published, event)
        if len(self._published.keys() | self.events.keys()) > 2 * self._window:
            self._trim()
        return announces

    def summary(self) -> PolicySummary:
        self._trim()
        token, events, published = self._fence.token, dict(self.events), dict(self._published)
        return PolicySummary(self._policy, self.stable, token, self.newest, self._known_from, events, published)

    def _trim(self) -> None:
        kept = {self.stable.version, self.stable.promoted, self.stable.trial, self.stable.before}
        for known in (self._published, self.events):  # the highest number given out is among the published
            kept |= set(sorted(known)[-self._window :])
        gone = (self._published.keys() | self.events.keys()) - kept
        for version in gone:
            self._published.pop(version, None)
            self.events.pop(version, None)
        self._known_from = max(self._known_from, max(gone, default=-1) + 1)


class PoliciesFold:
    """All policies. since: summary of the records below `begun_at`. next_offset: of the first record that is not folded.

    learning: an operator's newest order about it. window: number of a policy's newest versions in a summary.
    """

    def __init__(self, since: Summary | None = None, *, window: int = WINDOW) -> None:
        since = since or Summary(0, "", -1, "", ())
        self._window = window
        self._lease = since.lease
        self._last: Record | str = since.last
        self._policies = {policy.policy: _PolicyFold(policy, window) for policy in since.policies}
        self.begun_at = self.next_offset = since.below
        self.learning: Learning = since.learning

    def take(self, message: LogMessage) -> None:
        """Take the next record; one that was taken changes nothing."""
        if message.offset < self.next_offset:
            return
        self.next_offset, self._last = message.offset + 1, message.record
        value = message.value
        if isinstance(value, Directive):
            if value.order == "drain" or value.order == "pause" or value.order == "continue":
                self.learning = value.order
            if value.order == "lease":
                self._lease = max(self._lease, message.offset)
            for policy in self._policies.values():
                policy.fence(value, message.offset)
        elif isinstance(value, PolicyEvent):
            if value.policy not in self._policies:
                begun = PolicySummary(value.policy, Stable(lease=self._lease))
                self._policies[value.policy] = _PolicyFold(begun, self._window)
            self._policies[value.policy].apply(value, message.offset)

    def of(self, policy: str) -> PolicySummary:
        return self.summary().of(policy)

    def summary(self) -> Summary:
        """Summary of the records below `next_offset`."""
        return Summary(
            below=self.next_offset,
            last=self._last if isinstance(self._last, str) else digest_of(self._last),
            lease=self._lease,
            learning=self.learning,
            policies=tuple(policy.summary() for policy in self._policies.values()),
        )
