"""Draws for lanes without an issue order: least used first, or by priority, under shares of tenants and users. Pure functions.

Joins: the draw takes the turns of a session that closed together as a whole, so that a row holds their common prefix. A join
has the highest priority of its turns, the sum of their experiences, and one weight. At most MAX_AWAITED joins wait for more
turns; above it the draw takes the oldest incomplete.

Shares: while others have groups to draw, no tenant or user gets more of a batch than its share, rounded up to a whole group. If
the shares leave a batch below `least` experiences, the draw fills it up regardless of them, so that a deployment with one large
customer keeps learning.

A draw by priority takes whole groups without replacement. First, each group gets an inclusion probability: proportional to its
priority, at most 1, scaled down where a tenant or user would expect more than its share. Then a systematic sample (Madow,
Annals of Mathematical Statistics 20(3), 1949) takes groups with exactly these probabilities: groups lie on a line, each as long
as its probability, users and tenants side by side and in random order within a user, and a comb of unit spacing with a random
start selects them. So a step has a fixed number of groups, and a party gets its expected number, rounded up or down.

A weight is 1 / probability times the probability of an even draw within the group's stratum (Horvitz and Thompson, JASA
47(260), 1952). A stratum is a user or tenant at its share, or all others. The mean weight is 1, and the weighted mean of a step
is, in expectation, the mean of the pool (`importance_exponent` 1). The journal records the weights.

If every group leaves after its only use, the pool holds the groups that earlier draws passed over, and these weights would
reverse the priorities. Then the trainer uses each group once anyway, and weights of 1 (`importance_exponent` 0) give the mean
of all groups, as long as the draw takes every group eventually.

Variance: a part FAIR of every probability comes from an even draw (defensive mixing: Hesterberg, Technometrics 37(2), 1995), so
a weight hardly exceeds 1 / FAIR. A further cap would bias the mean.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from schemas import Experience
from trainer.buffer.pool import Candidate, Draw, Pool, enough, lowest

MAX_AWAITED = 1024


class Awaited:
    """Names of incomplete joins. A repeated turn of a complete join does not make the join incomplete again."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._whole: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def heard(self, experience: Experience) -> None:
        """Record an arrived experience; the last of a join completes it."""
        if experience.join is None or experience.revision:
            return
        if not experience.join.more:
            self._names.pop(experience.join.name, None)
            _remember(self._whole, experience.join.name)
        elif experience.join.name not in self._whole:
            _remember(self._names, experience.join.name)

    def clear(self) -> None:
        self._names.clear()


def _remember(names: dict[str, None], name: str) -> None:
    names[name] = None
    if len(names) > MAX_AWAITED:
        del names[next(iter(names))]


Joins = dict[tuple[str, int], list[Candidate]]  # members by name and how often they were used


def find_joins(pool: Pool) -> Joins:
    """Group the joined candidates by join and number of uses; the draw takes such a group as a whole."""
    found: Joins = {}
    for candidate in pool.chosen(pool.column("is_joined")):
        found.setdefault((candidate.join, candidate.uses), []).append(candidate)
    return found


def united(pool: Pool, joins: Joins) -> Pool:
    """Return the pool with each join as a single candidate, at the position of its first member."""
    if not joins:
        return pool
    kept_N = np.ones(len(pool), bool)
    wholes: dict[int, Candidate] = {}
    for place in np.flatnonzero(pool.column("is_joined")).tolist():
        candidate = pool[place]
        members = joins[candidate.join, candidate.uses]
        kept_N[place] = members[0] is candidate
        if kept_N[place] and len(members) > 1:
            wholes[place] = _as_one(members)
    return pool.replaced(wholes).chosen(kept_N)


def parted(draw: Draw, joins: Joins) -> Draw:
    """Undo `united`: replace each drawn join by its members, each with the join's weight."""
    if not joins:
        return draw
    taken = [
        msgspec.structs.replace(member, weight=candidate.weight)
        for candidate in draw.taken
        for member in (joins[candidate.join, candidate.uses] if candidate.join else (candidate,))
    ]
    return msgspec.structs.replace(draw, taken=tuple(taken))


def _as_one(members: Sequence[Candidate]) -> Candidate:
    return msgspec.structs.replace(
        members[0],
        num_experiences=sum(candidate.num_experiences for candidate in members),
        num_tokens=sum(candidate.num_tokens for candidate in members),
        min_version=min(candidate.min_version for candidate in members),
        priority=max(candidate.priority for candidate in members),
        has_signal=any(candidate.has_signal for candidate in members),
    )


class ShareLimits(msgspec.Struct, frozen=True):
    """Maximum shares of a batch in experiences, 1 for no limit. Data without a tenant or user ("") is not limited.

    tenant: per tenant. subject: per user of a tenant. least: experiences to which a batch is filled up regardless of the
    shares.
    """

    tenant: float = 1.0
    subject: float = 1.0
    least: int = 1


NO_LIMITS = ShareLimits()
ANY = np.iinfo(np.int64).max


class Room(msgspec.Struct, frozen=True):
    """Maximum experiences of a batch from a pool.

    size: in total. allowed_C: per party, by code; None if no share can be reached. least: as in ShareLimits.
    """

    size: int
    allowed_C: np.ndarray | None
    least: int = 0


def fill(order: Pool, room: Room) -> tuple[list[int], int]:
    """Take whole groups in order, within the shares, until the room is full. Return their places and the number of experiences
    left out because of a share.
    """
    size_N = order.column("num_experiences")
    if room.allowed_C is None:
        return list(range(first(size_N, room.size))), 0
    sums: dict[int, int] = {}
    taken: list[int] = []
    passed: list[int] = []
    total = 0
    rows = zip(*(order.column(name).tolist() for name in ("num_experiences", "tenant", "user")), strict=True)
    for place, (size, *parties) in enumerate(rows):
        if total >= room.size:
            break
        # A first group of a party is always let in.
        if any(party in sums and sums[party] + size > room.allowed_C[party] for party in parties):
            passed.append(place)
            continue
        for party in parties:
            sums[party] = sums.get(party, 0) + size
        taken.append(place)
        total += size
    if total < room.least:
        more = first(size_N[passed], room.least - total)
        taken = sorted([*taken, *passed[:more]])
        passed = passed[more:]
    return taken, int(size_N[passed].sum()) if passed else 0


def is_open(pool: Pool, limits: ShareLimits) -> bool:
    """True if no share can be reached: there are no limits, or all data belongs to one party."""
    return not (
        (limits.tenant < 1.0 and _differ(pool.column("tenant")))
        or (limits.subject < 1.0 and _differ(pool.column("user")))
    )


def find_room(pool: Pool, wanted: int, limits: ShareLimits = NO_LIMITS) -> Room:
    """Return the largest batch of at most `wanted` experiences within the shares.

    A share below an even split among the present parties counts as that even split. Data without a name is unlimited.
    """
    if is_open(pool, limits):
        return Room(wanted, None)
    tenant_N, user_N = pool.column("tenant"), pool.column("user")
    count_C = np.bincount(user_N, weights=pool.column("num_experiences"), minlength=len(pool.codes))
    is_named_C, owner_C = np.zeros(len(pool.codes), bool), np.zeros(len(pool.codes), np.int64)
    is_named_C[tenant_N] = pool.column("has_tenant")
    is_named_C[user_N] = pool.column("has_subject")
    owner_C[user_N] = tenant_N
    tenant_T, user_U = np.flatnonzero(np.bincount(tenant_N)), np.flatnonzero(np.bincount(user_N))
    tenant, subject = max(limits.tenant, 1 / len(tenant_T)), max(limits.subject, 1 / len(user_U))

    def possible(size: int) -> int:
        """Experiences that can be drawn where each party has its share of `size`."""
        limited_C = np.where(is_named_C, np.minimum(count_C, _allowed(size, subject)), count_C)
        sum_T = np.bincount(owner_C[user_U], weights=limited_C[user_U], minlength=len(pool.codes))[tenant_T]
        return int(np.where(is_named_C[tenant_T], np.minimum(sum_T, _allowed(size, tenant)), sum_T).sum())

    size = min(wanted, int(count_C.sum()))
    least = min(size, limits.least)
    while size > (less := possible(size)):
        size = less
    size = max(size, least)
    allowed_C = np.full(len(pool.codes), ANY)
    if tenant < 1.0:
        allowed_C[tenant_T[is_named_C[tenant_T]]] = _allowed(size, tenant)
    if subject < 1.0:
        allowed_C[user_U[is_named_C[user_U]]] = _allowed(size, subject)
    return Room(size, allowed_C, least)


def _allowed(size: int, share: float) -> int:
    return max(1, int(size * share + 1e-9))


def first(size_N: np.ndarray, num_experiences: int) -> int:
    """Return the number of whole groups, in order, with at least `num_experiences` in total, or the number of all groups."""
    return min(len(size_N), int(np.searchsorted(np.cumsum(size_N), num_experiences)) + 1)


def _differ(code_N: np.ndarray) -> bool:
    return bool((code_N != code_N[:1]).any())


def draw_least_used(
    pool: Pool, *, num_experiences: int, max_uses: int, seed: int, limits: ShareLimits = NO_LIMITS
) -> Draw:
    """Draw whole groups with at least `num_experiences` in total, fewer if the pool has fewer. An empty pool waits."""
    usable = pool.chosen(pool.column("uses") < max_uses)
    if not len(usable):
        return Draw(wait=True)
    room = find_room(usable, num_experiences, limits)
    num = enough(usable, num_experiences) if room.allowed_C is None else len(usable)
    order = usable.chosen(_least_used(usable, seed, num))
    taken, held_back = fill(order, room)
    return Draw(taken=tuple(order[place] for place in taken), held_back=held_back)


def _least_used(pool: Pool, seed: int, num: int) -> np.ndarray:
    """Places of at least `num` groups, or all: least used first, ties in the seed's order."""
    uses_N, mixed_N = pool.column("uses"), shuffled(seed, pool.column("offset"))
    found: list[np.ndarray] = []
    for uses in np.unique(uses_N).tolist():
        members = np.flatnonzero(uses_N == uses)
        found.append(members[lowest(mixed_N[members], num)])
        num -= len(found[-1])
        if num <= 0:
            break
    return np.concatenate(found)


def shuffled(seed: int, offset_N: np.ndarray) -> np.ndarray:
    """Return a 64-bit number per offset, independent of the other offsets and unique for a seed. [N], uint64.

    The output of SplitMix64 at this place of the seed's sequence (Steele, Lea and Flood, OOPSLA 2014, figure 15).
    """
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest())
    mixed_N = np.uint64(start) + offset_N * np.uint64(0x9E3779B97F4A7C15)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_N ^ (mixed_N >> np.uint64(31))


FAIR = 0.1
MAX_ROUNDS = 50  # each caps at least one group, user or tenant more, or is the last
CLOSE = 1e-9
NOBODY = -1


def draw_by_priority(
    pool: Pool,
    *,
    num_experiences: int,
    max_uses: int,
    seed: int,
    correction: float = 1.0,
    by_tokens: bool = False,
    limits: ShareLimits = NO_LIMITS,
) -> Draw:
    """Draw whole groups with `num_experiences` in expectation (exactly, if all groups have the same size), at least one group.

    Draws fewer if the pool has fewer; an empty pool waits. correction: exponent of the weights (Schaul et al., arXiv
    1511.05952, section 3.4), 0 for weights of 1. by_tokens: True if the lane's mean is over sampled tokens, False if over
    experiences.
    """
    usable = pool.chosen(pool.column("uses") < max_uses)
    if not len(usable):
        return Draw(wait=True)
    random = np.random.default_rng(seed)
    order = usable.chosen(_parties_together(usable, random))
    room = find_room(order, num_experiences, limits)
    chance_N, stratum_N = chances(order, room)
    taken = np.flatnonzero(systematic(chance_N, random.random()))
    weight_T = np.ones(len(taken))
    if correction > 0:
        unit_N = order.column("num_tokens" if by_tokens else "num_experiences")
        weight_T = _weights(chance_N, stratum_N, unit_N, taken) ** correction
    drawn = tuple(
        msgspec.structs.replace(order[place], weight=weight)
        for place, weight in zip(taken.tolist(), weight_T.tolist(), strict=True)
    )
    waits_N = (stratum_N != NOBODY) & ~np.isin(np.arange(len(order)), taken)
    return Draw(taken=drawn, held_back=int(order.column("num_experiences")[waits_N].sum()))


def chances(order: Pool, room: Room) -> tuple[np.ndarray, np.ndarray]:
    """Return each group's inclusion probability, [N] float64, and its stratum, [N]: code of a party at its share, or NOBODY.

    The probabilities sum to a whole number of groups, unless the shares leave room for a part of a group.
    """
    size_N, priority_N = order.column("num_experiences"), blended(order.column("priority"))
    allowed_C = None if room.allowed_C is None else room.allowed_C.astype(np.float64)
    for _ in range(MAX_ROUNDS):
        if allowed_C is None:
            break
        most = float((size_N * _scaled(np.ones(len(order)), order, allowed_C)[0]).sum())
        if most >= room.least - CLOSE:
            break
        allowed_C *= room.least / max(most, 1.0)  # filled up past the shares
    expected_N, stratum_N = _solved(order, priority_N, allowed_C, size_N.astype(np.float64), room.size)
    num_groups = max(1, int(np.ceil(expected_N.sum() - CLOSE)))
    if num_groups - expected_N.sum() > CLOSE:
        expected_N, stratum_N = _solved(order, priority_N, allowed_C, np.ones(len(order)), num_groups)
    return expected_N, stratum_N


def systematic(chance_N: np.ndarray, start: float) -> np.ndarray:
    """Return the groups hit by a comb with teeth at `start`, `start` + 1, …, [N] bool. Over random starts each is hit with its
    probability.
    """
    is_sure_N = chance_N >= 1.0 - CLOSE
    ends_N = np.round(np.cumsum(np.where(is_sure_N, 0.0, chance_N)), 9)
    hit_N: np.ndarray = is_sure_N | (np.diff(np.floor(ends_N - start), prepend=np.floor(-start)) > 0)
    return hit_N


def blended(priority_N: np.ndarray) -> np.ndarray:
    """Priorities with a share FAIR of their mean, so that the highest cannot take all."""
    positive_N = np.maximum(priority_N, 0.0)
    mean = positive_N.mean()
    return (1 - FAIR) * positive_N + FAIR * mean if mean > 0 else np.ones_like(positive_N)


def _parties_together(pool: Pool, random: np.random.Generator) -> np.ndarray:
    """Places in random order, with the groups of a tenant, and within it of a user, next to each other. [N]"""
    mixed_N = random.permutation(len(pool))
    party_N = pool.column("tenant").astype(np.int64) * len(pool.codes) + pool.column("user")
    return mixed_N if (party_N == party_N[0]).all() else mixed_N[np.argsort(party_N[mixed_N], kind="stable")]


def _solved(
    order: Pool, priority_N: np.ndarray, allowed_C: np.ndarray | None, counted_N: np.ndarray, wanted: float
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities under which `counted_N` sums to `wanted`, or to as much as the shares allow; and strata.

    The sum is a concave function of the factor on the priorities, so Newton's method from below never overshoots.
    """
    factor = wanted / max(float((priority_N * counted_N).sum()), CLOSE)
    for _ in range(MAX_ROUNDS):
        chance_N = np.minimum(1.0, factor * priority_N)
        stratum_N = np.full(len(order), NOBODY)
        if allowed_C is not None:
            chance_N, stratum_N = _scaled(chance_N, order, allowed_C)
        missing = wanted - float((chance_N * counted_N).sum())
        slope = float((priority_N * counted_N)[(chance_N < 1.0) & (stratum_N == NOBODY)].sum())
        if missing <= CLOSE * wanted or slope <= 0:
            break
        factor += missing / slope
    return chance_N, stratum_N


def _scaled(chance_N: np.ndarray, order: Pool, allowed_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale probabilities so that no party expects more than allowed, users first. Also return the party at its share, or
    NOBODY.
    """
    size_N, stratum_N = order.column("num_experiences"), np.full(len(chance_N), NOBODY)
    for party_N in (order.column("user"), order.column("tenant")):
        expected_C = np.bincount(party_N, weights=size_N * chance_N, minlength=len(allowed_C))
        over_C = expected_C > allowed_C * (1 + CLOSE)
        chance_N = chance_N * np.where(over_C, allowed_C / np.maximum(expected_C, CLOSE), 1.0)[party_N]
        stratum_N = np.where(over_C[party_N], party_N, stratum_N)
    return chance_N, stratum_N


def _weights(chance_N: np.ndarray, stratum_N: np.ndarray, unit_N: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Horvitz-Thompson weights within the strata of the drawn groups, scaled to the drawn total. [T] float64"""
    _, number_N = np.unique(stratum_N, return_inverse=True)
    expected_S = np.bincount(number_N, weights=unit_N * chance_N)
    even_S = expected_S / np.maximum(np.bincount(number_N, weights=unit_N), 1.0)
    drawn = float(unit_N[taken].sum()) / max(float(expected_S.sum()), CLOSE)  # the loss divides by the drawn total
    weight_T: np.ndarray = even_S[number_N[taken]] / chance_N[taken] * drawn
    return weight_T
