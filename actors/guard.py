"""The production guard: whether the newest stable version serves people worse than the one before it. Pure.

Three things are counted: answers rated down, answers that failed, and answers refused. Each is tested by a test that may
be looked at after every answer and still sounds a false alarm with probability `alpha` / 3 at most: the likelihood ratio
of "this happens `harm` more often than before" against "no more often than before" is a test martingale, so it ever
reaches 3 / alpha with probability alpha / 3 at most (Ville's inequality; Wald, Sequential Tests of Statistical
Hypotheses, 1945; Ramdas and others, arXiv 2210.01948). It is a function of counts alone: a restart that counts the log
anew decides alike. A rating that is revised or withdrawn is counted as it stands now.
"""

import math
from collections.abc import Sequence

import msgspec

from actors.config import GuardConfig
from actors.ratings import Tally

NUM_TESTS = 3  # which share alpha


class Breach(msgspec.Struct, frozen=True):
    """Customers go back from `version` to `before`. numbers: what it was decided on.

    Example: Breach(version=44, before=40, reason="rated down 31 of 80 times, version 40 52 of 600", numbers={...})
    """

    version: int
    before: int
    reason: str
    numbers: dict[str, float]


class Measure(msgspec.Struct, frozen=True):
    """One thing that may happen to an answer: of how many, how often, and by how much more often is too much.

    Example: Measure(name="bad", words="rated down", of="rated", harm=0.1)
    """

    name: str
    words: str
    of: str
    harm: float


def breach(config: GuardConfig, version: int, new: Tally, before: int, old: Tally) -> Breach | None:
    """Whether `version`, which served `new`, is to give way to `before`, which served `old`."""
    if version < 0 or before < 0 or version == before:
        return None
    rated = Measure("bad", "rated down", "rated", config.harm)
    return harmed((rated, *failures(config.more_failed)), config.alpha, config.least, version, new, before, old)


def failures(more: float) -> tuple[Measure, Measure]:
    """What gateways count of all answers, rated or not."""
    return Measure("failed", "failed", "answers", more), Measure("refused", "refused", "answers", more)


def harmed(
    measures: Sequence[Measure], alpha: float, least: int, version: int, new: Tally, before: int, old: Tally
) -> Breach | None:
    """The first of these that happens too often to `version`; each is tested at a third of alpha."""
    for measure in measures:
        happened, of = getattr(new, measure.name), getattr(new, measure.of)
        happened_before, of_before = getattr(old, measure.name), getattr(old, measure.of)
        if of_before < least:
            continue
        usual = highest_share(happened_before, of_before)
        evidence = log_ratio(happened, of, usual, measure.harm)
        if evidence < math.log(NUM_TESTS / alpha):
            continue
        numbers = {
            f"guard/{measure.of}": float(of), f"guard/{measure.name}": float(happened),
            f"guard/before/{measure.of}": float(of_before), f"guard/before/{measure.name}": float(happened_before),
            "guard/log_ratio": evidence, "guard/before/highest": usual,
        }  # fmt: skip
        reason = f"{measure.words} {happened} of {of} times, version {before} {happened_before} of {of_before}"
        return Breach(version=version, before=before, reason=reason, numbers=numbers)
    return None


def log_ratio(happened: int, of: int, share: float, harm: float) -> float:
    """Log likelihood ratio of a chance of `share + harm` against one of `share`; below 1 both."""
    worse = min(share + harm, 1.0 - 1e-6)
    share = min(max(share, 1e-6), worse)
    return happened * math.log(worse / share) + (of - happened) * math.log((1.0 - worse) / (1.0 - share))


def highest_share(happened: int, of: int, z: float = 1.96) -> float:
    """The upper end of Wilson's score interval (1927): what was measured before is itself a sample."""
    if not of:
        return 1.0
    share = happened / of
    centre = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (centre + half) / (1 + z * z / of)
