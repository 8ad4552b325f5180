"""The draw by priority: whole groups without replacement, the higher their priority the sooner. Pure.

Guarantees: what is drawn follows from the candidates' order, their priorities and the seed; a weight is in the candidate,
so that the journal holds it.

Priority sampling (Duffield, Lund and Thorup, J. ACM 54(6), 2007): with u even in (0, 1] a group's key is p / u, the groups
with the largest keys are drawn, and given the keys of all others a group is drawn with chance min(1, p / τ), τ being the
largest key at which they leave it no room. Summed with the weights 1 / chance, whatever is drawn gives the pool's sum
without bias, at any share of the pool. Divided by the pool's size, in what the lane's mean counts, and multiplied by what
was drawn, as the loss divides by that again, these are the weights of `correction` 1: a step's weighted mean is, in
expectation, the mean of what waits; a single step's weights need not sum to what was drawn, so its scale varies too.

That is another mean than the one over all that ever came. Where every group leaves after its only use, what waits is
what was passed over before: its mean leans to low priorities, and those weights would turn priority into its opposite. There
each group is trained once whatever its priority, which only says when, so that weights of 1 (`correction` 0) give the mean
of all that came, as long as all of it is drawn in the end. No weight gives both: a group drawn surely at once would need
weight 1 for the one and its share of the pool for the other.

Variance: a share FAIR of every chance is an even draw's (defensive mixing: Hesterberg, Technometrics 37(2), 1995), so that
whatever the priorities, groups of low priority still differ and weights stay around 1 / FAIR at most: in a draw of 40 groups
of equal length hardly one is above twice that. There is no other cap; it would bring the bias back.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from trainer.buffer.draw import Draw
from trainer.buffer.draw_share import NO_LIMITS, Filled, ShareLimits, filled_from, room_of, strata
from trainer.buffer.pool import Pool, lowest

FAIR = 0.1


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
    """Whole groups worth at least `num_experiences`. Takes what there is when there is less; waits when there is nothing.

    correction: exponent β of the weights (Schaul et al., arXiv 1511.05952, section 3.4), 0 for weights of 1. by_tokens: the
    lane's mean is over sampled tokens, else over experiences.
    """
    usable = pool.chosen(pool.column("uses") < max_uses)
    num = len(usable)
    if not num:
        return Draw(wait=True)
    priority_N = blended(usable.column("priority"))
    key_N = priority_N / (1.0 - np.random.default_rng(seed).random(num))
    room = room_of(usable, num_experiences, limits)
    is_weighted = correction > 0
    # where a share is full, a weight is by all that a group is drawn among
    first, filled = filled_from(usable, lambda num: lowest(-key_N, num), room, whole_where_full=is_weighted)
    order = usable.chosen(first)
    weight_F = np.ones(len(order))
    if is_weighted:
        unit = "num_tokens" if by_tokens else "num_experiences"
        share = _Share(order.column(unit), int(usable.column(unit).sum()))
        weight_F = _weights(order, filled, key_N[first], priority_N[first], num_experiences, share) ** correction
    taken = (
        msgspec.structs.replace(order[place], weight=weight)
        for place, weight in zip(filled.taken, weight_F[list(filled.taken)].tolist(), strict=True)
    )
    return Draw(taken=tuple(taken), held_back=filled.held_back)


class _Share(NamedTuple):
    """What the lane's mean counts: unit_F of each in order, total of all that wait."""

    unit_F: np.ndarray
    total: int


def _weights(
    order: Pool, filled: Filled, key_F: np.ndarray, priority_F: np.ndarray, num_experiences: int, share: _Share
) -> np.ndarray:
    """1 / chance of each that is taken, on the scale of `correction` 1; what is not taken has no meaning. [F] float64"""
    size_F = order.column("num_experiences")
    taken_F = np.zeros(len(order), bool)
    taken_F[list(filled.taken)] = True
    if not filled.full:
        scale = share.unit_F[taken_F].sum() / max(1, share.total)
        weight_F: np.ndarray = inverse_chances(key_F, priority_F, size_F, num_experiences) * scale
        return weight_F
    weight_F = np.ones(len(order))
    stratum_F = strata(order, filled.full)
    for number in np.unique(stratum_F).tolist():
        among = np.flatnonzero(stratum_F == number)
        taken_A, unit_A = taken_F[among], share.unit_F[among]
        wanted = num_experiences if len(among) == len(order) else _reached(size_F[among], taken_A)
        scale = unit_A[taken_A].sum() / max(1, unit_A.sum())
        weight_F[among] = inverse_chances(key_F[among], priority_F[among], size_F[among], wanted) * scale
    return weight_F


def blended(priority_N: np.ndarray) -> np.ndarray:
    """What chances go by: priorities with a share FAIR of their mean, so that the highest of them cannot take all."""
    positive_N = np.maximum(priority_N, 0.0)
    mean = positive_N.mean()
    return (1 - FAIR) * positive_N + FAIR * mean if mean > 0 else np.ones_like(positive_N)


def inverse_chances(
    key_RN: np.ndarray, priority_RN: np.ndarray, size_RN: np.ndarray, num_experiences: int
) -> np.ndarray:
    """1 / chance that a drawn group had to be drawn, given the keys of all others. All [..., N], by falling key.

    A group is drawn while the sizes of those before it sum to less than `num_experiences`; so it would have been down to
    the key at which the others alone reach that sum.
    """
    until_RN = np.cumsum(np.broadcast_to(size_RN, key_RN.shape), axis=-1)
    inverse_RN = np.ones(key_RN.shape)
    num_N = key_RN.shape[-1]
    for size in np.unique(size_RN):
        place_R1 = (until_RN < num_experiences + size).sum(axis=-1, keepdims=True)
        threshold_R1 = np.take_along_axis(key_RN, np.minimum(place_R1, num_N - 1), axis=-1)
        threshold_R1 = np.where(place_R1 < num_N, threshold_R1, 0.0)
        inverse_RN = np.where(size_RN == size, np.maximum(1.0, threshold_R1 / priority_RN), inverse_RN)
    return inverse_RN


def _reached(size_N: np.ndarray, drawn_N: np.ndarray) -> int:
    """A number of experiences that the drawn groups reach, and all but the last of them do not; where all are drawn, all."""
    return int(size_N.sum() if drawn_N.all() else size_N[drawn_N][:-1].sum() + 1)
