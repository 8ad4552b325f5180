"""A trial: whether a version that a share of sessions tries serves them worse than the stable one serves the others. Pure.

Both sides are of the same time and drawn by lot, so nothing but the version differs. Rated answers are compared in pairs,
the nth of one side with the nth of the other; pairs alike say nothing, and of the others the share whose worse half is
the candidate's is one half where the versions are as good, and odds / (1 + odds) where the odds of being rated down are
`odds` times as high (Wald, Sequential Analysis, 1947, section 6.3: the double dichotomy). The likelihood ratio of the two
is a martingale under either, so at whatever moment one looks, a version that is no worse is turned away with probability
alpha / 3 at most, and one that is `odds` times worse is let through by the pairs with probability beta at most (Ville's
inequality). A rating that is revised or withdrawn changes its pair, or leaves it. Failures and refusals are tested as the
guard does, with the other two thirds of alpha.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from actors.config import CanaryConfig
from actors.guard import NUM_TESTS, failures, harmed
from actors.ratings import Ratings

Ending = Literal["", "passed", "failed"]


class Outcome(msgspec.Struct, frozen=True):
    """How a trial stands. ended: "" while it goes on. numbers: what it was decided on.

    Example: Outcome(ended="passed", reason="rated down 30 of 412 times, version 40 305 of 3720", numbers={...})
    """

    ended: Ending
    reason: str = ""
    numbers: dict[str, float] = {}


def outcome(config: CanaryConfig, ratings: Ratings, trial: int, stable: int) -> Outcome:
    """How the trial of one version against the stable one stands."""
    new, old = ratings.of_arm(trial, trial), ratings.of_arm(stable, trial)
    worse, better = pairs(ratings.in_order(trial, trial), ratings.in_order(stable, trial))
    evidence = log_odds(worse, better, config.odds)
    numbers = {
        "canary/rated": float(new.rated), "canary/bad": float(new.bad), "canary/answers": float(new.answers),
        "canary/failed": float(new.failed), "canary/refused": float(new.refused),
        "stable/rated": float(old.rated), "stable/bad": float(old.bad), "stable/answers": float(old.answers),
        "stable/failed": float(old.failed), "stable/refused": float(old.refused),
        "pairs/worse": float(worse), "pairs/better": float(better), "pairs/log_ratio": evidence,
    }  # fmt: skip
    told = f"rated down {new.bad} of {new.rated} times, version {stable} {old.bad} of {old.rated}"
    if evidence >= math.log(NUM_TESTS / config.alpha):
        return Outcome("failed", told, numbers)
    fault = harmed(failures(config.more_failed), config.alpha, config.least, trial, new, stable, old)
    if fault is not None:
        return Outcome("failed", fault.reason, numbers | fault.numbers)
    if evidence <= math.log(config.beta) or (evidence <= 0 and min(new.rated, old.rated) >= config.enough):
        return Outcome("passed", told, numbers)
    return Outcome("")


def pairs(new: Sequence[bool], old: Sequence[bool]) -> tuple[int, int]:
    """In how many pairs the new version's answer alone was rated down, and in how many the old one's alone.

    >>> pairs([True, False, True, True], [False, True, True])
    (1, 1)
    """
    both = list(zip(new, old, strict=False))
    return sum(a and not b for a, b in both), sum(b and not a for a, b in both)


def log_odds(worse: int, better: int, odds: float) -> float:
    """Log likelihood ratio of odds against even odds that the worse half of a pair is the new version's."""
    share = odds / (1.0 + odds)
    return worse * math.log(2.0 * share) + better * math.log(2.0 * (1.0 - share))
