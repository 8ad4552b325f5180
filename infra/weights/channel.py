"""The stable channel: which version customers are served, decided by the events of `policies` and nothing else. Pure.

Rules: `promoted` moves it, unless somebody pinned it; `pinned` holds it at a version, and `pinned` at -1 lets it go to
the newest promoted one; `rolled_back` moves it to an older version and ends a pin; versions above it that were promoted
before count for nothing from then on. Events of the candidate channel (all that a trainer publishes) change nothing.
"""

import msgspec

from schemas import PolicyEvent


class Stable(msgspec.Struct, frozen=True):
    """version: what is served, -1 before the first promotion. pinned: promotions wait. promoted: newest one that counts.

    Example: Stable(version=40, promoted=44, pinned=True)
    """

    version: int = -1
    promoted: int = -1
    pinned: bool = False


def moved(stable: Stable, event: PolicyEvent, policy: str) -> Stable:
    """The channel after an event of any policy."""
    if event.policy != policy or event.channel != "stable":
        return stable
    match event.event:
        case "promoted":
            return Stable(stable.version if stable.pinned else event.version, event.version, stable.pinned)
        case "pinned" if event.version >= 0:
            return Stable(event.version, stable.promoted, pinned=True)
        case "pinned":
            version = stable.promoted if stable.promoted >= 0 else stable.version
            return Stable(version, stable.promoted)
        case "rolled_back":
            return Stable(event.version, event.version)
    return stable
