"""The draws of lanes without a pace, over lists of candidates, one at a time: what those by columns are compared with."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from trainer.buffer.draw import Candidate, Draw
from trainer.buffer.draw_priority import blended, inverse_chances
from trainer.buffer.draw_share import NO_LIMITS, Filled, ShareLimits
from trainer.buffer.draw_spread import shuffled
from trainer.buffer.pool import Party

Joins = dict[tuple[str, int], list[Candidate]]


def draw_spread(
    candidates: Sequence[Candidate], *, num_experiences: int, max_uses: int, seed: int, limits: ShareLimits = NO_LIMITS
) -> Draw:
    """Whole groups worth at least `num_experiences`. Takes what there is when there is less; waits when there is nothing."""
    usable = [one for one in candidates if one.uses < max_uses]
    if not usable:
        return Draw(wait=True)
    uses_N = np.fromiter((one.uses for one in usable), np.int64, len(usable))
    offset_N = np.fromiter((one.offset for one in usable), np.uint64, len(usable))
    order = np.lexsort((shuffled(seed, offset_N), uses_N)).tolist()
    filled = fill_by(order, usable, num_experiences, limits)
    return Draw(taken=tuple(usable[order[place]] for place in filled.taken), held_back=filled.held_back)


def draw_by_priority(
    candidates: Sequence[Candidate],
    *,
    num_experiences: int,
    max_uses: int,
    seed: int,
    correction: float = 1.0,
    by_tokens: bool = False,
    limits: ShareLimits = NO_LIMITS,
) -> Draw:
    """Whole groups worth at least `num_experiences`. Takes what there is when there is less; waits when there is nothing.

    correction: exponent β of the weights (Schaul et al., arXiv 1511.05952, section 3.4), 0 for weights of 1. by_tokens: the
    lane's mean is over sampled tokens, else over experiences.
    """
    usable = [one for one in candidates if one.uses < max_uses]
    if not usable:
        return Draw(wait=True)
    num = len(usable)
    priority_N = blended(np.fromiter((one.priority for one in usable), np.float64, num))
    key_N = priority_N / (1.0 - np.random.default_rng(seed).random(num))
    order_N = np.argsort(-key_N)
    filled = fill_by(order_N.tolist(), usable, num_experiences, limits)
    place_K = np.array(filled.taken)
    weight_N, taken_N = np.ones(num), np.zeros(num, bool)
    taken_N[place_K] = True
    if correction > 0:
        size_N = np.fromiter((one.num_experiences for one in usable), np.int64, num)
        unit_N = np.fromiter((one.num_tokens for one in usable), np.int64, num) if by_tokens else size_N
        for pool in _pools(usable, order_N, filled):
            at, drawn = order_N[pool], taken_N[pool]
            wanted = num_experiences if len(pool) == num else _reached(size_N[at], drawn)
            inverse = inverse_chances(key_N[at], priority_N[at], size_N[at], wanted)[drawn]
            scale = unit_N[at[drawn]].sum() / max(1, unit_N[at].sum())
            weight_N[pool[drawn]] = (inverse * scale) ** correction
    taken = [
        msgspec.structs.replace(usable[at], weight=weight)
        for at, weight in zip(order_N[place_K].tolist(), weight_N[place_K].tolist(), strict=True)
    ]
    return Draw(taken=tuple(taken), held_back=filled.held_back)


def _pools(usable: Sequence[Candidate], order_N: np.ndarray, filled: Filled) -> list[np.ndarray]:
    """Places in the order, by whom they are drawn among."""
    if not filled.full:
        return [np.arange(len(order_N))]
    pools: dict[Party, list[int]] = {}
    for place, at in enumerate(order_N.tolist()):
        pools.setdefault(stratum(usable[at], filled.full), []).append(place)
    return [np.array(pool) for pool in pools.values()]


def _reached(size_N: np.ndarray, drawn_N: np.ndarray) -> int:
    """A number of experiences that the drawn groups reach, and all but the last of them do not; where all are drawn, all."""
    return int(size_N.sum() if drawn_N.all() else size_N[drawn_N][:-1].sum() + 1)


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


def joins_of(candidates: Sequence[Candidate]) -> Joins:
    """What is drawn together: the members of each join that were used as often."""
    found: Joins = {}
    for one in candidates:
        if one.join:
            found.setdefault((one.join, one.uses), []).append(one)
    return found


def united(candidates: Sequence[Candidate], joins: Joins) -> list[Candidate]:
    """The candidates, those of a join as one, in the place of its first."""
    if not joins:
        return list(candidates)
    return [_whole(one, joins) for one in candidates if not one.join or joins[one.join, one.uses][0] is one]


def parted(draw: Draw, joins: Joins) -> Draw:
    """The draw from `united` with the members of each join, each with its weight."""
    if not joins:
        return draw
    taken = [
        msgspec.structs.replace(member, weight=one.weight)
        for one in draw.taken
        for member in (joins[one.join, one.uses] if one.join else (one,))
    ]
    return msgspec.structs.replace(draw, taken=tuple(taken))


def _whole(one: Candidate, joins: Joins) -> Candidate:
    """A candidate, or all of the join whose first it is."""
    members = joins[one.join, one.uses] if one.join else [one]
    return one if len(members) == 1 else _as_one(members)


def _as_one(members: Sequence[Candidate]) -> Candidate:
    return msgspec.structs.replace(
        members[0],
        num_experiences=sum(one.num_experiences for one in members),
        num_tokens=sum(one.num_tokens for one in members),
        min_version=min(one.min_version for one in members),
        priority=max(one.priority for one in members),
        has_signal=any(one.has_signal for one in members),
    )
