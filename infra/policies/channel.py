"""Versions of the stable channel, which customers are served, and of the canary channel, which a share of them tries.
The events of `policies` decide, and nothing else. Pure.

Rules: `promoted` moves it, unless it is pinned; `pinned` holds it at a version, and `pinned` at -1 lets it go to
the newest promoted one; `rolled_back` moves it to an older version and ends a pin; versions above it that were promoted
before count for nothing from then on. `promoted` in the canary channel begins a trial of that version, or, with the version
before the newest promotion, the watch of the stable one; with the stable version it ends either. Every move of the stable
channel to another version ends them too, and so does `held` with the version that canaries serve. Otherwise a canary serves
the stable version. Events of the candidate channel (all that a trainer publishes) change nothing.

Guarantee: what a master decides that was overtaken moves nothing, whether it has noticed or not: its decision lies behind
the lease of the later one, so it may rest on facts that have changed. People's words always hold.
"""

import msgspec

from schemas import Directive, PolicyEvent
from schemas.fields import Channel

MASTERS = frozenset({"gate", "canary", "watch"})  # owners of what a master decides; any other is a person


class Stable(msgspec.Struct, frozen=True):
    """version: what is served, -1 before the first promotion. pinned: promotions wait. promoted: newest one that counts.
    trial: the version that canaries serve, -1 for the stable one. before: the version that the newest promotion replaced, -1
    where there is none or its watch is over. lease: of the newest master, the offset in `policies`, -1 before the first.

    Example: Stable(version=40, promoted=40, trial=44)
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
    """The channel after an event of any policy."""
    if event.policy != policy or event.channel == "candidate":
        return stable
    if event.owner not in MASTERS:
        return _after(stable, event)
    return stable if is_overtaken(stable, event) else msgspec.structs.replace(_after(stable, event), lease=event.token)


def fenced(stable: Stable, directive: Directive, offset: int) -> Stable:
    """The channel after a directive that lies at `offset`: a master that begins takes the word from all before it."""
    if directive.order != "lease":
        return stable
    return msgspec.structs.replace(stable, lease=max(stable.lease, offset))


def is_overtaken(stable: Stable, event: PolicyEvent) -> bool:
    """True if the master that decided this was overtaken before it did."""
    return event.owner in MASTERS and event.token < stable.lease


def _after(stable: Stable, event: PolicyEvent) -> Stable:
    replace = msgspec.structs.replace
    if event.channel == "canary":
        if event.event != "promoted":
            return stable
        if event.version == stable.version:
            return replace(stable, trial=-1, before=-1)
        return replace(stable, trial=event.version)
    match event.event:
        case "promoted" if stable.pinned:
            return replace(stable, promoted=event.version, trial=-1)
        case "promoted" if event.version == stable.version:
            return replace(stable, promoted=event.version)
        case "promoted":
            return replace(
                stable, version=event.version, promoted=event.version, trial=-1, before=stable.version
            )  # fmt: skip
        case "pinned" if event.version >= 0:
            return replace(stable, version=event.version, pinned=True, trial=-1, before=-1)
        case "pinned":
            version = stable.promoted if stable.promoted >= 0 else stable.version
            return replace(stable, version=version, pinned=False, trial=-1, before=-1)
        case "rolled_back":
            return replace(
                stable, version=event.version, promoted=event.version, pinned=False, trial=-1, before=-1
            )  # fmt: skip
        case "held" if event.version == stable.trial:
            return replace(stable, trial=-1)
    return stable
