"""The production guard: whether people like the newest stable version less than the one before it. Pure.

A test that may be looked at after every answer and still sounds a false alarm with probability `alpha` at most: the
likelihood ratio of "answers are rated down `harm` more often than before" against "no more often than before" is a test
martingale, so it ever reaches 1 / alpha with probability alpha at most (Ville's inequality; Wald, Sequential Tests of
Statistical Hypotheses, 1945; Ramdas and others, arXiv 2210.01948). It is a function of counts alone: a restart that
counts the log anew decides alike.
"""

import math

import msgspec

from actors.config import GuardConfig
from schemas import Closure

BAD_BELOW = 0.5  # a reward below it is a complaint


class Tally(msgspec.Struct):
    """Rated answers of one version, and how many of them were rated down.

    Example: Tally(rated=480, bad=31)
    """

    rated: int = 0
    bad: int = 0


class Breach(msgspec.Struct, frozen=True):
    """Customers go back from `version` to `before`. numbers: what it was decided on.

    Example: Breach(version=44, before=40, reason="rated down 31 of 80 times, version 40 52 of 600", numbers={...})
    """

    version: int
    before: int
    reason: str
    numbers: dict[str, float]


class Guard:
    """Counts what people said of each version. Closures and moves of the channel may come in any order."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self.tallies: dict[int, Tally] = {}

    def closure(self, closure: Closure) -> None:
        """An answer of production was closed with what was said of it; a later revision counts for nothing."""
        if closure.lane != "live" or closure.revision or closure.version < 0 or closure.mean_reward is None:
            return
        tally = self.tallies.setdefault(closure.version, Tally())
        tally.rated += 1
        tally.bad += closure.mean_reward < BAD_BELOW

    def breach(self, version: int, before: int) -> Breach | None:
        """Whether `version` is to give way to `before`."""
        if version < 0 or before < 0 or version == before:
            return None
        new, old = self.tallies.get(version, Tally()), self.tallies.get(before, Tally())
        if old.rated < self._config.least:
            return None
        usual = highest_share(old)
        evidence = log_ratio(new, usual, self._config.harm)
        if evidence < -math.log(self._config.alpha):
            return None
        numbers = {
            "guard/rated": float(new.rated), "guard/bad": float(new.bad), "guard/before/rated": float(old.rated),
            "guard/before/bad": float(old.bad), "guard/log_ratio": evidence, "guard/before/highest": usual,
        }  # fmt: skip
        reason = f"rated down {new.bad} of {new.rated} times, version {before} {old.bad} of {old.rated}"
        return Breach(version=version, before=before, reason=reason, numbers=numbers)


def log_ratio(tally: Tally, share: float, harm: float) -> float:
    """Log likelihood ratio of a chance of `share + harm` of being rated down against one of `share`; below 1 both."""
    worse = min(share + harm, 1.0 - 1e-6)
    share = min(max(share, 1e-6), worse)
    good = tally.rated - tally.bad
    return tally.bad * math.log(worse / share) + good * math.log((1.0 - worse) / (1.0 - share))


def highest_share(tally: Tally, z: float = 1.96) -> float:
    """The upper end of Wilson's score interval (1927): what was measured before is itself a sample."""
    if not tally.rated:
        return 1.0
    share, n = tally.bad / tally.rated, tally.rated
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (centre + half) / (1 + z * z / n)
