"""Confidence intervals and bounds on probabilities. Pure."""

import math
from collections.abc import Sequence


def wilson(happened: float, of: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval (1927) of the share `happened / of`; neither needs to be whole."""
    if of <= 0:
        return 0.0, 1.0
    share = happened / of
    centre = share + z * z / (2 * of)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / of + z * z / (4 * of * of))
    return max(0.0, (centre - half) / (1 + z * z / of)), min(1.0, (centre + half) / (1 + z * z / of))


def sign_chance(gaps: Sequence[float]) -> float:
    """Bound on the probability that differences add up to so much where each is as likely to have the other sign: given their
    sizes, the sum of independent signs (Hoeffding, 1963, theorem 2).

    >>> round(sign_chance([1.0] * 12 + [0.0] * 88), 5), sign_chance([3.0, -4.0]), sign_chance([])
    (0.00248, 1.0, 1.0)
    """
    total = math.fsum(gaps)
    return math.exp(-(total**2) / (2.0 * math.fsum(gap * gap for gap in gaps))) if total > 0.0 else 1.0


def mean_chance(values: Sequence[float], most: float) -> float:
    """Bound on the probability that the mean of independent values from 0 to 1 is so high where none is expected above `most`
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
