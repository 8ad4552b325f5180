"""People who rate answers, simulated: who rates when, which version answered, what they think, and how late they say it.

One path is one deployment. What is drawn is turned into what the gate's pure functions take (blocks of a trial, hours of
the guard), as `actors.master.gate.ratings` does it record by record: one word of each person that comes in time, about
their first rated answer. tests/infra/test_bench_gate.py shows that both count alike.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.config import CanaryConfig, GateGuardConfig, PeopleConfig
from actors.master.gate.guard import RESTLESS, Hour, before_of, breach, compared
from actors.master.gate.trial import PeopleBlock, decided, merged, weighed

HOUR_MS = 3_600_000
BLOCK_MS = 600_000
TRIAL, STABLE = 5, 3
Floats = NDArray[np.float64]


class SimulatedPeople(msgspec.Struct, frozen=True, kw_only=True):
    """What people are like.

    base: share of complaints. per_hour: ratings of all people. swing: of the base over the day. rise: to so much over
    `rise_h` hours from `rise_from_h` on, None for none. rise_from_h, rise_h: see rise. each: ratings of one person,
    within an hour. alike: their correlation. heavy: share of the ratings that one person gives, complaints all of them,
    who meets the new version alone. odds: how many times the odds of a complaint are with the new version. bad_h,
    good_h: mean hours until a complaint and until praise. mature_h: what comes later counts for nothing. share:
    of people that meet the new version in a trial.
    """

    base: float = 0.1
    per_hour: float = 100.0
    swing: float = 0.0
    rise: float | None = None
    rise_from_h: float = 0.0
    rise_h: float = 48.0
    each: int = 1
    alike: float = 0.0
    heavy: float = 0.0
    odds: float = 1.0
    bad_h: float = 0.0
    good_h: float = 0.0
    mature_h: float = 24.0
    share: float = 0.1


class RatingsByTime(msgspec.Struct, frozen=True):
    """Ratings by the time of their answers, one array each. at_h: of the answer. person: -1 for the heavy one. new: the
    answer is of the new version. bad: it is a complaint. late_h: after the answer.
    """

    at_h: Floats
    person: NDArray[np.int64]
    new: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    late_h: Floats


def rate(world: SimulatedPeople, at_h: Floats) -> Floats:
    """The chance of a complaint about the stable version at a time."""
    found = world.base + world.swing * np.sin(2.0 * math.pi * at_h / 24.0)
    if world.rise is not None:
        done = np.clip((at_h - world.rise_from_h) / world.rise_h, 0.0, 1.0)
        found = found + (world.rise - world.base) * done
    return np.clip(found, 0.0, 1.0)


def ratings_drawn(
    world: SimulatedPeople, random: np.random.Generator, start_h: float, end_h: float, *, drawn: bool
) -> RatingsByTime:
    """What people say of answers between two times. drawn: a share meets the new version; else all people after hour 0."""
    num = random.poisson(world.per_hour * (end_h - start_h) / world.each)
    begun = random.uniform(start_h, end_h, num)
    person = np.repeat(np.arange(num), world.each)
    at_h = begun[person] + random.uniform(0.0, 1.0, person.size) * (world.each > 1)
    new = (random.random(num) < world.share)[person] if drawn else at_h >= 0.0
    usual = rate(world, at_h)
    if world.alike:
        spread = 1.0 / world.alike - 1.0
        mean = np.clip(rate(world, begun), 1e-9, 1.0 - 1e-9)
        usual = random.beta(mean * spread, (1.0 - mean) * spread)[person]
    worse = world.odds * usual / (1.0 + (world.odds - 1.0) * usual)
    bad = random.random(at_h.size) < np.where(new, worse, usual)
    if world.heavy:
        since_h = start_h if drawn else max(start_h, 0.0)
        many = random.poisson(world.heavy / (1.0 - world.heavy) * world.per_hour * (end_h - since_h))
        at_h = np.concatenate([at_h, random.uniform(since_h, end_h, many)])
        person = np.concatenate([person, np.full(many, -1)])
        new, bad = np.concatenate([new, np.ones(many, bool)]), np.concatenate([bad, np.ones(many, bool)])
    late_h = random.exponential(1.0, at_h.size) * np.where(bad, world.bad_h, world.good_h)
    order = np.argsort(at_h)
    return RatingsByTime(at_h[order], person[order], new[order], bad[order], late_h[order])


def firsts(found: RatingsByTime, mature_h: float, *, daily: bool) -> RatingsByTime:
    """One word of each person, in a trial or on each day: about their first answer of which they speak in time."""
    kept = np.flatnonzero(found.late_h <= mature_h)
    day = np.floor(found.at_h[kept] / 24.0).astype(np.int64) if daily else np.zeros(kept.size, np.int64)
    # Whose and which in one number, so that one sort of numbers does; by time they are in order already.
    whose, which = np.divmod(
        np.sort((found.person[kept] * 4096 + day) * kept.size + np.arange(kept.size)), max(kept.size, 1)
    )
    kept = kept[np.sort(which[np.diff(whose, prepend=whose[:1] - 1) != 0])]
    return RatingsByTime(found.at_h[kept], found.person[kept], found.new[kept], found.bad[kept], found.late_h[kept])


def blocks_of(voices: RatingsByTime) -> list[PeopleBlock]:
    """What the trial takes, of one tenant."""
    block = np.floor(voices.at_h * HOUR_MS / BLOCK_MS).astype(np.int64)
    if not block.size:
        return []
    first = block.min()
    counts = [
        np.bincount(block[which] - first, minlength=int(block.max() - first) + 1)
        for which in (voices.new, voices.new & voices.bad, ~voices.new, ~voices.new & voices.bad)
    ]
    return [
        PeopleBlock("", int(first + index) * BLOCK_MS, *(int(count) for count in found))
        for index, found in enumerate(zip(*counts, strict=True))
        if found[0] or found[2]
    ]


def hours_of(voices: RatingsByTime) -> tuple[list[Hour], list[Hour]]:
    """What the guard takes, of one tenant: of the new version, and of the days before."""
    found: list[list[Hour]] = []
    for which in (voices.new, ~voices.new):
        hour = np.floor(voices.at_h[which]).astype(np.int64)
        values, where = np.unique(hour, return_inverse=True)
        bad = np.bincount(where, weights=voices.bad[which], minlength=values.size)
        people = np.bincount(where, minlength=values.size)
        found.append([Hour("", int(a), int(b), int(c)) for a, b, c in zip(values, people, bad, strict=True)])
    return found[0], found[1]


def tried(config: CanaryConfig, world: SimulatedPeople, hours: float, seed: int) -> tuple[str, int]:
    """How a trial ends that may take so many hours, and after how many ratings of both sides: "" where it does not."""
    found = ratings_drawn(world, np.random.default_rng(seed), 0.0, hours, drawn=True)
    blocks = merged(blocks_of(firsts(found, world.mature_h, daily=False)))
    evidence = weighed(config, PeopleConfig(), blocks, several=False)
    for block, (against, favour) in zip(blocks, evidence, strict=True):
        if ended := decided(config, against, favour):
            return ended, int((found.at_h * HOUR_MS < block.at_ms + BLOCK_MS).sum())
    return "", found.at_h.size


def guarded(
    config: GateGuardConfig, world: SimulatedPeople, before_h: float, hours: float, seed: int
) -> tuple[str, int]:
    """Whether the guard takes a version back within so many hours, looking every hour, and after how many ratings of it.

    "failed" where it does; "restless" where the days before differed, so that it took none by the hour; else "".
    """
    found = ratings_drawn(world, np.random.default_rng(seed), -before_h, hours, drawn=False)
    new, old = hours_of(firsts(found, world.mature_h, daily=True))
    before = before_of(old)
    for end in accumulate(1 for _ in new):
        evidence = compared(config, PeopleConfig(), new[:end], before, several=False)
        if breach(config, PeopleConfig(), (TRIAL, STABLE), evidence, {}, {}) is not None:
            return "failed", int(((found.at_h >= 0.0) & (found.at_h < new[end - 1].hour + 1)).sum())
    return "restless" if before.unrest >= RESTLESS else "", int((found.at_h >= 0.0).sum())


def share_of(endings: Sequence[str], wanted: str) -> tuple[float, float]:
    """How often, and the standard error of that: of one more of either, so that never and always have one too."""
    count, of = sum(one == wanted for one in endings), len(endings)
    near = (count + 1) / (of + 2)
    return count / of, math.sqrt(near * (1.0 - near) / of)
