"""The draw by priority: whole groups without replacement, those of high priority more often. Pure.

Guarantees: candidates in their order, priorities and seed decide what is drawn; a candidate carries its weight, so that the
journal holds it. The weighted mean of a step is, in expectation, the mean of the pool (`correction` 1), at any share of it.

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

import msgspec
import numpy as np

from trainer.buffer.draw import Draw
from trainer.buffer.draw_share import NO_LIMITS, Room, ShareLimits, room_of
from trainer.buffer.pool import Pool

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
    room = room_of(order, num_experiences, limits)
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
    """Which groups a comb with teeth at `start`, `start` + 1, … hits, [N] bool: each with its chance, over starts in [0, 1)."""
    is_sure_N = chance_N >= 1.0 - CLOSE
    ends_N = np.round(np.cumsum(np.where(is_sure_N, 0.0, chance_N)), 9)
    hit_N: np.ndarray = is_sure_N | (np.diff(np.floor(ends_N - start), prepend=np.floor(-start)) > 0)
    return hit_N


def blended(priority_N: np.ndarray) -> np.ndarray:
    """What chances are proportional to: priorities with a share FAIR of their mean, so that the highest cannot take all."""
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
