"""Draws without an issue order: joins as one group, shares of tenants and users, least-used first or by priority. Pure.

Joins: turns of a session that were closed together are drawn together, so that one row holds their common prefix. A draw takes
all members of a join that the lane holds and that were trained as often, with the priority of the best turn, the number of
experiences of all, and one weight. At most MAX_AWAITED joins wait for more turns; beyond it the oldest are drawn as they are.

Shares: where others have something to draw, no tenant or user makes up more of a batch than the share allows, up to one whole
group; the rest waits. A batch that does not reach `least` experiences within the shares is filled up past them, so that a
deployment with one large customer keeps learning.

The draw by priority takes whole groups without replacement. Candidates in their order, priorities and seed decide it; a
candidate carries its weight, so that the journal holds it. The weighted mean of a step is, in expectation, the mean of the pool
(`correction` 1), at any share of it.

Two steps. First each group gets a chance: proportional to its priority, at most 1, scaled down where a tenant or user would
expect more than its share. The pool alone decides the chances. Then one systematic sample (Madow, Annals of Mathematical
Statistics 20(3), 1949) takes groups with exactly these chances: groups lie on a line, each as long as its chance, users and
tenants side by side and in random order within a user, and a comb of unit spacing with a random start takes what its teeth
hit. So a step has a fixed number of groups, and a party gets its expected number, rounded up or down.

A weight is 1 / chance times the chance of an even draw within the group's stratum (Horvitz and Thompson, JASA 47(260), 1952).
A stratum is a user or tenant that is at its share, or all others: a share limits what a party weighs, and within the share
every group counts alike. The mean weight is 1.

That is another mean than the mean over all groups that ever came. Where every group leaves after its only use, the pool holds
what earlier draws passed over: its mean leans to low priorities, and these weights would turn priority into its opposite. There
each group is trained once whatever its priority, and weights of 1 (`correction` 0) give the mean of all that came, as long as
all of it is drawn in the end.

Variance: FAIR of every chance is that of an even draw (defensive mixing: Hesterberg, Technometrics 37(2), 1995), so that a
weight is hardly above 1 / FAIR. There is no other cap; it would bring the bias back.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from schemas import Experience
from trainer.buffer.pool import Candidate, Draw, Pool, enough, lowest

MAX_AWAITED = 1024


class Awaited:
    """Names of the joins of which more is on its way. A turn that comes again, after the last of its join, awaits nothing."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._whole: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def heard(self, experience: Experience) -> None:
        """One more has come; the last of a join says that no other follows."""
        if experience.join is None or experience.revision:
            return
        if not experience.join.more:
            self._names.pop(experience.join.name, None)
            _remember(self._whole, experience.join.name)
        elif experience.join.name not in self._whole:
            _remember(self._names, experience.join.name)

    def clear(self) -> None:
        """Nothing is on its way."""
        self._names.clear()


def _remember(names: dict[str, None], name: str) -> None:
    names[name] = None
    if len(names) > MAX_AWAITED:
        del names[next(iter(names))]


Joins = dict[tuple[str, int], list[Candidate]]  # members by name and how often they were used


def find_joins(pool: Pool) -> Joins:
    """The members of each join that were used as often: they are drawn together."""
    found: Joins = {}
    for candidate in pool.chosen(pool.column("is_joined")):
        found.setdefault((candidate.join, candidate.uses), []).append(candidate)
    return found


def united(pool: Pool, joins: Joins) -> Pool:
    """The candidates, those of a join as one, at the position of its first."""
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
    """The draw from `united` with the members of each join, each with its weight."""
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
    """Shares of a batch in experiences, 1 for no limit.

    tenant: of one tenant at most. subject: of one user of a tenant at most. least: experiences to which a batch is filled up
    even past the shares, see the module.

    Data without a tenant or user ("") is never above its share; it counts as one of the others.

    Example: ShareLimits(tenant=0.5, subject=0.25, least=64)
    """

    tenant: float = 1.0
    subject: float = 1.0
    least: int = 1


NO_LIMITS = ShareLimits()
ANY = np.iinfo(np.int64).max


class Room(msgspec.Struct, frozen=True):
    """Experiences that a batch from a pool may hold.

    size: in all. allowed_C: of each party, by code; None where no share can be reached. least: filled up to past the shares.
    """

    size: int
    allowed_C: np.ndarray | None
    least: int = 0


def fill(order: Pool, room: Room) -> tuple[list[int], int]:
    """Whole groups in order until the room is full, or all there are, within the shares: their places, and the number of
    experiences passed over for a share.
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
    """True if no share can be reached: nothing is limited, or all data is of one party."""
    return not (
        (limits.tenant < 1.0 and _differ(pool.column("tenant")))
        or (limits.subject < 1.0 and _differ(pool.column("user")))
    )


def find_room(pool: Pool, wanted: int, limits: ShareLimits = NO_LIMITS) -> Room:
    """The largest batch of at most `wanted` experiences within the shares.

    A share below an even split among those present is that even split. Data without a name may have any number.
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
    """Number of whole groups in order that are worth at least `num_experiences`, or all there are."""
    return min(len(size_N), int(np.searchsorted(np.cumsum(size_N), num_experiences)) + 1)


def _differ(code_N: np.ndarray) -> bool:
    return bool((code_N != code_N[:1]).any())


def draw_least_used(
    pool: Pool, *, num_experiences: int, max_uses: int, seed: int, limits: ShareLimits = NO_LIMITS
) -> Draw:
    """Whole groups worth at least `num_experiences`. Takes what there is when there is less; waits when there is nothing."""
    usable = pool.chosen(pool.column("uses") < max_uses)
    if not len(usable):
        return Draw(wait=True)
    room = find_room(usable, num_experiences, limits)
    num = enough(usable, num_experiences) if room.allowed_C is None else len(usable)
    order = usable.chosen(_least_used(usable, seed, num))
    taken, held_back = fill(order, room)
    return Draw(taken=tuple(order[place] for place in taken), held_back=held_back)


def _least_used(pool: Pool, seed: int, num: int) -> np.ndarray:
    """Places of at least `num` groups, or all: the least used first, of those used as often in the seed's order."""
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
    """A number of 64 bits for each offset, whatever other offsets there are: no two of a seed have the same. [N], uint64.

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
    """Whole groups worth `num_experiences` in expectation, exactly where groups are equally large; at least one.

    Takes what there is when there is less; waits when there is nothing. correction: exponent of the weights (Schaul et al.,
    arXiv 1511.05952, section 3.4), 0 for weights of 1. by_tokens: the lane's mean is over sampled tokens, else over
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
    """The chance of each group to be drawn, [N] float64, and its stratum, [N]: code of a party at its share, or NOBODY.

    The chances sum to a whole number of groups, unless the shares leave room for part of one more.
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
    """The groups that a comb with teeth at `start`, `start` + 1, … hits, [N] bool: each with its chance over starts."""
    is_sure_N = chance_N >= 1.0 - CLOSE
    ends_N = np.round(np.cumsum(np.where(is_sure_N, 0.0, chance_N)), 9)
    hit_N: np.ndarray = is_sure_N | (np.diff(np.floor(ends_N - start), prepend=np.floor(-start)) > 0)
    return hit_N


def blended(priority_N: np.ndarray) -> np.ndarray:
    """Priorities with a share FAIR of their mean, which chances are proportional to, so that the highest cannot take all."""
    positive_N = np.maximum(priority_N, 0.0)
    mean = positive_N.mean()
    return (1 - FAIR) * positive_N + FAIR * mean if mean > 0 else np.ones_like(positive_N)


def _parties_together(pool: Pool, random: np.random.Generator) -> np.ndarray:
    """Places in an order in which the groups of a tenant, and in it those of a user, are neighbours; else random. [N]"""
    mixed_N = random.permutation(len(pool))
    party_N = pool.column("tenant").astype(np.int64) * len(pool.codes) + pool.column("user")
    return mixed_N if (party_N == party_N[0]).all() else mixed_N[np.argsort(party_N[mixed_N], kind="stable")]


def _solved(
    order: Pool, priority_N: np.ndarray, allowed_C: np.ndarray | None, counted_N: np.ndarray, wanted: float
) -> tuple[np.ndarray, np.ndarray]:
    """The chances under which `counted_N` sums to `wanted`, or to as much as the shares allow; and strata.

    The sum grows with the factor that multiplies priorities, ever more slowly, as more and more is at a limit: Newton's method
    from below never overshoots.
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
    """Chances under which no party expects more than it is allowed, users first; and the party at its share, or NOBODY."""
    size_N, stratum_N = order.column("num_experiences"), np.full(len(chance_N), NOBODY)
    for party_N in (order.column("user"), order.column("tenant")):
        expected_C = np.bincount(party_N, weights=size_N * chance_N, minlength=len(allowed_C))
        over_C = expected_C > allowed_C * (1 + CLOSE)
        chance_N = chance_N * np.where(over_C, allowed_C / np.maximum(expected_C, CLOSE), 1.0)[party_N]
        stratum_N = np.where(over_C[party_N], party_N, stratum_N)
    return chance_N, stratum_N


def _weights(chance_N: np.ndarray, stratum_N: np.ndarray, unit_N: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """1 / chance times the even chance within its stratum, of what was taken; on the scale of what was drawn. [T] float64"""
    _, number_N = np.unique(stratum_N, return_inverse=True)
    expected_S = np.bincount(number_N, weights=unit_N * chance_N)
    even_S = expected_S / np.maximum(np.bincount(number_N, weights=unit_N), 1.0)
    drawn = float(unit_N[taken].sum()) / max(float(expected_S.sum()), CLOSE)  # the loss divides by what was drawn
    weight_T: np.ndarray = even_S[number_N[taken]] / chance_N[taken] * drawn
    return weight_T
