"""How much counts of good and bad things speak for "worse" against "no worse", looked at as often as one likes. Pure.

Each function gives the logarithm of a likelihood ratio: a test martingale under "no worse", so it ever reaches
log(1 / alpha) with probability alpha at most (Ville's inequality; Wald, Sequential Tests of Statistical Hypotheses, 1945;
Ramdas and others, arXiv 2210.01948).
"""

import math
from collections.abc import Collection, Sequence
from functools import lru_cache


@lru_cache(maxsize=65_536)
def log_odds_ratio(new: int, new_bad: int, old: int, old_bad: int, odds: float) -> float:
    """Log likelihood ratio of odds of being bad `odds` times as high with the new as with the old, against equal odds,
    of `new_bad` of `new` and `old_bad` of `old`, given how many are bad of both together.

    Given that, what is bad with the new is drawn from an urn (Fisher's exact test; under other odds Fisher's noncentral
    hypergeometric distribution), whatever the chance of being bad itself is: nothing need be known of it.

    >>> round(log_odds_ratio(1, 1, 1, 0, 2.0), 6) == round(math.log(4 / 3), 6)
    True
    """
    bad = new_bad + old_bad
    first, last = max(0, bad - old), min(new, bad)
    if first == last:
        return 0.0
    log_weights = [0.0]
    for count in range(first, last):
        ratio = (new - count) * (bad - count) / ((count + 1) * (old - bad + count + 1))
        log_weights.append(log_weights[-1] + math.log(ratio))
    log_psi = math.log(odds)
    even = _log_sum(log_weights)
    worse = _log_sum([weight + (first + index) * log_psi for index, weight in enumerate(log_weights)])
    return new_bad * log_psi - (worse - even)


def log_share_ratio(happened: int, of: int, usual: float, worse: float) -> float:
    """Log likelihood ratio of a chance of `worse` against one of `usual`; below 1 both, and usual below worse."""
    worse = min(worse, 1.0 - 1e-6)
    usual = min(max(usual, 1e-6), worse)
    return happened * math.log(worse / usual) + (of - happened) * math.log((1.0 - worse) / (1.0 - usual))


def wilson(happened: float, of: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share. happened, of: need not be whole."""
    if of <= 0:
        return 0.0, 1.0
    share = happened / of
    centre = share + z * z / (2 * of)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / of + z * z / (4 * of * of))
    return max(0.0, (centre - half) / (1 + z * z / of)), min(1.0, (centre + half) / (1 + z * z / of))


def sign_chance(gaps: Sequence[float]) -> float:
    """At most how likely differences add up to so much where each is as likely to have the other sign, whatever their number
    and sizes: given the sizes a sum of independent signs (Hoeffding, 1963, theorem 2).

    >>> round(sign_chance([1.0] * 12 + [0.0] * 88), 5), sign_chance([3.0, -4.0]), sign_chance([])
    (0.00248, 1.0, 1.0)
    """
    total = math.fsum(gaps)
    return math.exp(-(total**2) / (2.0 * math.fsum(gap * gap for gap in gaps))) if total > 0.0 else 1.0


def mean_chance(values: Sequence[float], most: float) -> float:
    """At most how likely the mean of independent values from 0 to 1 is so high where none is expected above `most`
    (Hoeffding, 1963, theorem 1).

    >>> round(mean_chance([1.0] * 10, 0.5), 6) == round(0.5**10, 6), mean_chance([0.2, 0.4], 0.5)
    (True, 1.0)
    """
    mean = math.fsum(values) / max(1, len(values))
    if mean <= most:
        return 1.0
    if most <= 0.0:
        return 0.0
    above = mean * math.log(mean / most)
    below = (1.0 - mean) * math.log((1.0 - mean) / (1.0 - most)) if mean < 1.0 else 0.0
    return math.exp(-len(values) * (above + below))


def against(logs: Collection[float], bound: float, share: float) -> float:
    """The evidence of several clients together: none gives more than its share of the bound for it, below 1, nor much more
    against it.

    What is cut of the evidence for makes it only less. What is cut of the evidence against, past that share and the
    logarithm of how many they are, makes the chance to reach the bound by luck exp(exp(-share * bound)) times as high at
    most: without those that are cut the others have to reach that much more (a union bound over the cut, and Ville's
    inequality).

    >>> against([9.0, 1.0, -0.5], 6.0, 0.5), round(against([-90.0, 1.0], 6.0, 0.5), 2)
    (3.5, -2.69)
    """
    if share >= 1.0 or not logs:
        return math.fsum(logs)
    most = bound * share
    least = -most - math.log(len(logs))
    return math.fsum(min(max(one, least), most) for one in logs)


def _log_sum(logs: list[float]) -> float:
    top = max(logs)
    return top + math.log(sum(math.exp(one - top) for one in logs))
