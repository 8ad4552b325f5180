"""Ours beside its peers: what each took, round by round in turn, and the ratios of it.

Peers alternate with ours, so that what else the machine does falls on all. Of each its best round and its median round are
kept, of processor time and of wall time; ratios are of processor time, which a busy machine disturbs least.
"""

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

OURS = "headrace"


class Spent(msgspec.Struct, frozen=True):
    """What one round took, in seconds. cpu_s: of the process that is measured. wall_s: of the round."""

    cpu_s: float
    wall_s: float


class Beside(msgspec.Struct, frozen=True):
    """One contestant in one case.

    case: what is carried. name: of the contestant. cpu_us, wall_us: of one experience, (best round, median round).
    times: by how much ours is cheaper in processor time, likewise; below 1 the peer is. target: of it, None for none.
    sooner: the same of wall time. sooner_target: likewise. All None for ours.
    """

    case: str
    name: str
    cpu_us: tuple[float, float]
    wall_us: tuple[float, float]
    times: tuple[float, float] | None = None
    target: float | None = None
    sooner: tuple[float, float] | None = None
    sooner_target: float | None = None


def compared(
    case: str,
    spent: Mapping[str, Sequence[Spent]],
    experiences: int,
    targets: Mapping[str, float],
    sooner_targets: Mapping[str, float] = MappingProxyType({}),
) -> list[Beside]:
    """Ours first, then its peers. experiences: of each round. targets: of processor time, by peer; sooner_targets: of wall."""
    found = [
        Beside(
            case=case,
            name=name,
            cpu_us=_each([one.cpu_s for one in rounds], experiences),
            wall_us=_each([one.wall_s for one in rounds], experiences),
            target=targets.get(name),
            sooner_target=sooner_targets.get(name),
        )
        for name, rounds in sorted(spent.items(), key=lambda pair: pair[0] != OURS)
    ]
    ours = found[0]
    return [
        one
        if one.name == OURS
        else msgspec.structs.replace(one, times=_over(one.cpu_us, ours.cpu_us), sooner=_over(one.wall_us, ours.wall_us))
        for one in found
    ]


def _over(peer: tuple[float, float], ours: tuple[float, float]) -> tuple[float, float]:
    return (peer[0] / ours[0], peer[1] / ours[1])


def _each(seconds: Sequence[float], experiences: int) -> tuple[float, float]:
    return (1e6 * min(seconds) / experiences, 1e6 * statistics.median(seconds) / experiences)
