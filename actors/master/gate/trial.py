"""The test that compares two versions served at the same time: is the new one worse by more than a margin, or not? Pure.

Within a block of time and a tenant a random draw assigns a version to a person. Let the new version serve n people and the old
one m people, x and y of them with something bad (a complaint, a failed answer, a refusal), and let the margin be the line
p = k q + d between the chances p of the new and q of the old version. With any guess g made before the block, h = k g + d, a
bet a and b = a k n / m, the product over the people of a block

    (1 + a (1 - h))^x (1 - a h)^(n - x) (1 - b (1 - g))^y (1 + b g)^(m - y)

has an expectation of exp(n a (p - k q - d)) at most. So for a > 0 it is 1 at most where the new version is within the
margin, for a < 0 where it is beyond, and the product of blocks reaches 1 / alpha with probability alpha at most, however often
one looks (Ville's inequality). A wrong guess costs power alone. Proof and assumptions: infra/docs/explanation/statistics.md.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.config import CanaryConfig
from infra.settings.config import duration_s

Ending = Literal["", "worse", "not worse"]
Floats = NDArray[np.float64]
Sums = Mapping[tuple[str, int], Sequence[int]]  # by tenant and block: people, and how many of them had something bad

MEASURES = ("rated down", "failed", "refused")
LEAST_PEOPLE = 8  # of both versions in a stratum
BLOCK_SHARE = 0.25  # limit of the evidence of one block, as a share of the deciding evidence
SOLE_TENANT = 0.9  # a tenant with so many of the people decides by itself


class Strata(msgspec.Struct, frozen=True):
    """People of two versions by tenant and block of time.

    counts: (..., tenants, blocks, 4) people of the new version, how many of them bad, and the same of the old one; 0 where a
    tenant has too few in a block, which then count for all such tenants together, in this block or the next.
    parts: (tenants,) each tenant's part of the people; tenants that are counted together are like one.
    """

    counts: Floats
    parts: Floats


class Evidence(msgspec.Struct, frozen=True):
    """Progress of a measure towards a decision.

    new, new_bad, old, old_bad: people of both versions, and how many of them had something bad. worse, not_worse: evidence so
    far, as a share of the deciding evidence.
    """

    new: int = 0
    new_bad: int = 0
    old: int = 0
    old_bad: int = 0
    worse: float = 0.0
    not_worse: float = 0.0


def strata(new: Sums, old: Sums) -> Strata:
    """People by tenant and block. The strata depend on the numbers of people only, never on their outcomes."""
    blocks: dict[int, dict[str, Floats]] = {}
    for column, sums in ((0, new), (2, old)):
        for (tenant, block), (people, bad) in sums.items():
            row = blocks.setdefault(block, {}).setdefault(tenant, np.zeros(4))
            row[column : column + 2] += people, min(bad, people)
    found: dict[str, dict[int, Floats]] = {}
    waiting = np.zeros(4)
    for index, block in enumerate(sorted(blocks)):
        for tenant, row in sorted(blocks[block].items()):
            if tenant and _is_enough(row):
                found.setdefault(tenant, {})[index] = row
            else:
                waiting = waiting + row
        if _is_enough(waiting):
            found.setdefault("", {})[index] = waiting
            waiting = np.zeros(4)
    counts = np.zeros((max(1, len(found)), max(1, len(blocks)), 4))
    for number, rows in enumerate(found.values()):
        for index, row in rows.items():
            counts[number, index] = row
    people = counts[:, :, 0].sum(-1) + counts[:, :, 2].sum(-1)
    return Strata(counts, people / max(1.0, people.sum()))


def worse_series(config: CanaryConfig, found: Strata, tenant_share: float = 1.0) -> Floats:
    """(..., blocks) evidence that the new version is worse by more than the margin; 1 decides.

    The margin is the larger of two, so both must be exceeded: the smaller evidence counts.
    """
    bound = math.log(len(MEASURES) / config.alpha)
    by_line = [_log_factors(found.counts, line, 1.0)[0] for line in _lines(config)]
    return np.minimum(*(_added(logs, found.parts, bound, tenant_share) for logs in by_line))


def not_worse_series(config: CanaryConfig, found: Strata, tenant_share: float = 1.0) -> Floats:
    """(..., blocks) evidence that the new version is not worse by more than the margin; 1 decides.

    It is enough to exclude one of the two margins, so each block bets against the margin that is larger at the guess.
    """
    (absolute, high), (relative, low) = (_log_factors(found.counts, line, -1.0) for line in _lines(config))
    logs = np.where(high > low, absolute, relative)
    return _added(logs, found.parts, math.log(1.0 / config.beta), tenant_share)


def evidence(config: CanaryConfig, found: Strata, tenant_share: float) -> Evidence:
    """The maximum of the evidence so far; a maximum of 1 or more decides."""
    new, new_bad, old, old_bad = (int(total) for total in found.counts.sum((0, 1)))
    return Evidence(
        new, new_bad, old, old_bad,
        worse=float(worse_series(config, found, tenant_share).max()),
        not_worse=float(not_worse_series(config, found, tenant_share).max()),
    )  # fmt: skip


def ending(measures: Mapping[str, Evidence]) -> Ending:
    """Worse if any measure is, not worse if every measure is not worse by more than the margin, "" while undecided."""
    if any(found.worse >= 1.0 for found in measures.values()):
        return "worse"
    return "not worse" if all(found.not_worse >= 1.0 for found in measures.values()) else ""


def power(config: CanaryConfig, *, base: float, per_hour: float, share: float, paths: int = 100) -> tuple[float, float]:
    """Simulate how often a trial shows in its time that an equal version is not worse, and a version of twice the odds worse.

    base: share of complaints about the old version. per_hour: raters per hour. share: share of people with the new version.
    """
    num_blocks = 96
    per_block = per_hour * duration_s(config.max_duration) / 3600.0 / num_blocks
    found = []
    for odds, series in ((1.0, not_worse_series), (2.0, worse_series)):
        random, columns = np.random.default_rng(0), []
        for part, rate in ((share, odds * base / (1.0 + (odds - 1.0) * base)), (1.0 - share, base)):
            people = random.poisson(per_block * part, (paths, 1, num_blocks))
            columns += [people, random.binomial(people, rate)]
        people_drawn = Strata(np.stack(columns, -1).astype(float), np.ones(1))
        found.append(float((series(config, people_drawn).max(-1) >= 1.0).mean()))
    return found[0], found[1]


def _is_enough(row: Floats) -> bool:
    return bool(row[0] and row[2] and row[0] + row[2] >= LEAST_PEOPLE)


def _lines(config: CanaryConfig) -> tuple[tuple[float, float], tuple[float, float]]:
    """Both margins as lines p = k q + d: (d, k)."""
    return (config.margin, 1.0), (0.0, 1.0 + config.relative_margin)


def _added(logs: Floats, parts: Floats, bound: float, tenant_share: float) -> Floats:
    """(..., blocks) evidence of all tenants up to each block, as a part of the bound. A block of all tenants is limited, and so
    is a tenant: to `tenant_share`, or to its part of the people where that is more.
    """
    gained = logs.clip(0.0).sum(-2, keepdims=True)  # an engine that dies once fails for each tenant in the same block
    logs = np.where(logs > 0.0, logs * (BLOCK_SHARE * bound / gained.clip(1e-9)).clip(max=1.0), logs).cumsum(-1)
    is_limited = (parts[:, None] < SOLE_TENANT) & (tenant_share < 1.0)
    most = np.maximum(tenant_share, parts[:, None]) * bound
    # This limit of the evidence against makes the error probability at most exp(exp(-tenant_share * bound)) times as high.
    least = -tenant_share * bound - math.log(len(parts))
    total: Floats = np.where(is_limited, logs.clip(least, most), logs).sum(-2)
    return total / bound


def _log_factors(counts: Floats, line: tuple[float, float], side: float) -> tuple[Floats, Floats]:
    """(..., blocks) logarithm of each block's factor, and the limit h: see the head of this file.

    line: d and k. side: 1 bets on twice the margin, -1 on no difference.
    """
    shift, slope = line
    new, new_bad, old, old_bad = np.moveaxis(counts, -1, 0)
    people, bad = new + old, new_bad + old_bad
    before = people.cumsum(-1) - people, bad.cumsum(-1) - bad
    guess = ((before[1] + 1.0) / (before[0] + 10.0)).clip(1e-3, (0.9 - shift) / slope)
    limit = slope * guess + shift
    ratio = slope * new / old.clip(1.0)
    bet = side * (limit - guess) / (limit * (1.0 - limit)) * old / (old + slope**2 * new).clip(1.0)
    if side > 0:
        bet = np.minimum(bet, 0.5 / np.maximum(limit, ratio * (1.0 - guess)))
    else:
        bet = np.maximum(bet, -0.9 / np.maximum(1.0 - limit, 2.0 * ratio * guess))
    other = bet * ratio
    logs = (
        new_bad * np.log1p(bet * (1.0 - limit))
        + (new - new_bad) * np.log1p(-bet * limit)
        + old_bad * np.log1p(-other * (1.0 - guess))
        + (old - old_bad) * np.log1p(other * guess)
    )
    return np.where((new > 0) & (old > 0), logs, 0.0), limit
