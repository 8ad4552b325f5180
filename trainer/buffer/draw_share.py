"""How much of a batch one tenant or one user may make up. Pure, like `trainer.buffer.draw`.

Guarantee: where others have something to draw too, no tenant or user makes up more of a batch than the share allows, up to
one whole group; what is above it waits. Where a batch of `least` experiences does not come about at these shares, it is
filled up to `least` with what would have waited, so that a deployment with one large customer goes on learning.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from trainer.buffer.draw import Candidate

Party = tuple[str, ...]  # (tenant,) or (tenant, subject)


class ShareLimits(msgspec.Struct, frozen=True):
    """Shares of a batch in experiences, 1 for no limit. least: see the module.

    Data without a tenant or user ("") is never above its share; it counts as one of the others.

    Example: ShareLimits(tenant=0.5, subject=0.25, least=64)
    """

    tenant: float = 1.0
    subject: float = 1.0
    least: int = 1


NO_LIMITS = ShareLimits()


class Filled(msgspec.Struct, frozen=True):
    """taken: places in the order that was filled from. full: who reached a share and has more. held_back: experiences
    that were passed over for it.
    """

    taken: tuple[int, ...]
    full: frozenset[Party] = frozenset()
    held_back: int = 0


def fill(order: Sequence[Candidate], num_experiences: int, limits: ShareLimits = NO_LIMITS) -> Filled:
    """Whole groups in order, worth at least `num_experiences` or all there are, within the shares."""
    if is_open(order, limits):
        return first(order, num_experiences)
    room, allowed, least = _room(order, num_experiences, limits)
    sums: dict[Party, int] = {}
    taken: list[int] = []
    passed: list[int] = []
    full: set[Party] = set()
    total = 0
    for place, one in enumerate(order):
        if total >= room:
            break
        parties = [party for party in _parties(one) if party in allowed]
        over = [
            party
            for party in parties
            if party in sums and sums[party] + one.num_experiences > allowed[party]  # a first group is always let in
        ]
        if over:
            full.add(over[-1])
            passed.append(place)
            continue
        sums |= {party: sums.get(party, 0) + one.num_experiences for party in parties}
        taken.append(place)
        total += one.num_experiences
    if total < least:
        more = first((order[place] for place in passed), least - total).taken
        taken = sorted([*taken, *(passed[at] for at in more)])
        passed = passed[len(more) :]
    return Filled(tuple(taken), frozenset(full), sum(order[place].num_experiences for place in passed))


def fill_by(
    order: Sequence[int], candidates: Sequence[Candidate], num_experiences: int, limits: ShareLimits = NO_LIMITS
) -> Filled:
    """`fill` from the candidates at these places. Where no share can be reached, it looks only at those that it takes."""
    ordered = (candidates[at] for at in order)
    if is_open(candidates, limits):
        return first(ordered, num_experiences)
    return fill(list(ordered), num_experiences, limits)


def stratum(one: Candidate, full: frozenset[Party]) -> Party:
    """Whom a group is drawn among: those of its user or its tenant where these are full, else all others, ()."""
    return next((party for party in reversed(_parties(one)) if party in full), ())


def is_open(order: Sequence[Candidate], limits: ShareLimits) -> bool:
    """Whether no share can be reached: nothing is limited, or all is of the same."""
    tenants = limits.tenant < 1.0 and len({one.tenant for one in order}) > 1
    return not tenants and (limits.subject >= 1.0 or len({(one.tenant, one.subject) for one in order}) <= 1)


def first(order: Iterable[Candidate], num_experiences: int) -> Filled:
    """Whole groups in order, worth at least `num_experiences` or all there are."""
    taken = []
    for place, one in enumerate(order):
        if num_experiences <= 0:
            break
        taken.append(place)
        num_experiences -= one.num_experiences
    return Filled(tuple(taken))


def _parties(one: Candidate) -> tuple[Party, ...]:
    return ((one.tenant,), (one.tenant, one.subject))


def _room(order: Sequence[Candidate], wanted: int, limits: ShareLimits) -> tuple[int, dict[Party, int], int]:
    """Size of the largest batch within the shares, what each party may have of it, and the least that is drawn at all.

    A share below an even split among those present is that even split.
    """
    have: dict[str, dict[str, int]] = {}
    for one in order:
        of_tenant = have.setdefault(one.tenant, {})
        of_tenant[one.subject] = of_tenant.get(one.subject, 0) + one.num_experiences
    tenant = max(limits.tenant, 1 / max(1, len(have)))
    subject = max(limits.subject, 1 / max(1, sum(map(len, have.values()))))
    size = min(wanted, sum(sum(of_tenant.values()) for of_tenant in have.values()))
    least = min(size, limits.least)
    while size > (possible := _possible(have, _of(size, tenant), _of(size, subject))):
        size = possible
    size = max(size, least)
    allowed: dict[Party, int] = {}
    for name, of_tenant in have.items():
        if name and tenant < 1.0:
            allowed[name,] = _of(size, tenant)
        if subject < 1.0:
            allowed |= {(name, user): _of(size, subject) for user in of_tenant if user}
    return size, allowed, least


def _of(size: int, share: float) -> int:
    return max(1, int(size * share + 1e-9))


def _possible(have: Mapping[str, Mapping[str, int]], of_tenant: int, of_subject: int) -> int:
    """Experiences that can be drawn where a tenant and a user have so many each."""
    sums = {
        name: sum(min(count, of_subject) if user else count for user, count in users.items())
        for name, users in have.items()
    }
    return sum(min(total, of_tenant) if name else total for name, total in sums.items())
