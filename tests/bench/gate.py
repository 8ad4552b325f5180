"""The gate's decisions in simulated traffic: rates of false rejections and of detected regressions.

Each row draws people (or answers to evals) and lets the gate's own functions decide. A world is the probability of a complaint
by hour, with violations of the test's assumptions. The new version is equal, or has 1.3 times the rate or twice the odds of
complaints. At 10 % and above, 1.3 times the rate is on the margin.
"""

from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from actors.config import CanaryConfig, GateSuite
from actors.master.gate.suites import drop, total_drop
from actors.master.gate.trial import Floats, Strata, not_worse_series, worse_series
from schemas import EvalResult
from tests.bench.report import Row

HOURS = 168
CONFIG = CanaryConfig()
KINDS = {"equal": (1.0, 1.0), "1.3 times the rate": (1.3, 1.0), "twice the odds": (1.0, 2.0)}


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated people and their ratings.

    base: probability of a complaint with the old version. per_hour: people. share: part of the people with the new version.
    cycle_h: length of a cycle of ± 40 %, 0 for none. doubles: the base doubles for six hours of a random day. night: all people
    come in six hours of each day. copies: share of people who repeat the previous rating, of any version or (`within`) of
    theirs. tenants: shares of the people. burst: people of the last tenant who all complain in one hour. dies: sessions of one
    hour that fail on the new version's engine. jump: share and base from the middle on.
    """

    base: float = 0.1
    per_hour: float = 100.0
    share: float = 0.1
    cycle_h: float = 0.0
    doubles: bool = False
    night: bool = False
    copies: float = 0.0
    within: bool = False
    tenants: tuple[float, ...] = (1.0,)
    burst: int = 0
    dies: int = 0
    jump: tuple[float, float] = (0.0, 0.0)


WORLDS = {
    **{f"base {base:g}": World(base=base) for base in (0.005, 0.02, 0.1, 0.3)},
    "base 0.02, 20 per hour": World(base=0.02, per_hour=20.0),
    "1,000 per hour": World(per_hour=1000.0),
    "daily ± 40 %": World(cycle_h=24.0),
    "weekly ± 40 %": World(cycle_h=168.0),
    "doubles for six hours": World(doubles=True),
    "only at night": World(night=True),
    "20 % copy any rater": World(copies=0.2),
    "50 % copy any rater": World(copies=0.5),
    "20 % copy a rater of their version": World(copies=0.2, within=True),
    "50 % copy a rater of their version": World(copies=0.5, within=True),
    "burst of a tenant with 50 keys": World(tenants=(0.8, 0.2), burst=50),
    "tenants of 99 and 1 %": World(tenants=(0.99, 0.01)),
    "engine dies with 10 of 20": World(base=0.0, per_hour=200.0, dies=10),
    "engine dies with 50 of 100": World(base=0.0, per_hour=1000.0, dies=50),
    "share 0.02 to 0.5, base 0.02 to 0.2": World(base=0.02, share=0.02, jump=(0.5, 0.2)),
    "watch": World(share=0.9),
    "watch, weekly ± 40 %": World(share=0.9, cycle_h=168.0),
    "watch, daily ± 40 %, base 0.3": World(base=0.3, share=0.9, cycle_h=24.0),
}


def run(paths: int = 300) -> Iterator[Row]:
    """Simulate every world, each kind of version, and the evals. paths: simulated weeks of each."""
    for (name, world), (kind, worse) in product(WORLDS.items(), KINDS.items()):
        found = people(world, worse, paths, np.random.default_rng(0))
        turned, passed = decided(found)
        bound = 0.01 if kind == "equal" and not world.within else None
        yield Row(f"{name}, {kind}: rejected", _percent(turned), "%", high=bound and 100 * bound)
        yield Row(
            f"{name}, {kind}: passed",
            _percent(passed),
            "%",
            high=None if kind == "equal" else _beta(world, kind, paths),
        )
    turned, _ = decided(people(WORLDS["watch, weekly ± 40 %"], (1.0, 1.0), 12 * paths, np.random.default_rng(1)))
    yield Row("12 promotions, weekly ± 40 %: any rolled back", _percent(turned.reshape(-1, 12).any(1)), "%", high=2.0)
    yield from evals(paths)


def _percent(values: ArrayLike) -> float:
    return 100.0 * float(np.mean(values))


def _beta(world: World, kind: str, paths: int) -> float | None:
    """Largest allowed percentage of passes of a version beyond the margin, with two standard errors."""
    ratio, odds = KINDS[kind]
    new = ratio * odds * world.base / (1.0 + (odds - 1.0) * world.base)
    is_beyond = new >= max(world.base + CONFIG.margin, world.base * (1.0 + CONFIG.relative_margin)) - 1e-9
    chance = 2.0 * (CONFIG.beta * (1.0 - CONFIG.beta) / paths) ** 0.5
    return 100 * (CONFIG.beta + chance) if is_beyond and not world.copies and world.base else None


def decided(found: Strata) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks of the paths that end as worse, and as not worse."""
    first = []
    for series in (worse_series, not_worse_series):
        reached = series(CONFIG, found, 0.5) >= 1.0
        first.append(np.where(reached.any(-1), reached.argmax(-1), reached.shape[-1]))
    return first[0] < first[1], first[1] < first[0]


def people(world: World, worse: tuple[float, float], paths: int, random: np.random.Generator) -> Strata:
    """Draw paths of a week, in blocks of an hour. worse: factors of the rate and of the odds with the new version."""
    hour = np.arange(HOURS)
    old = np.full((paths, HOURS), world.base)
    share = np.full(HOURS, world.share)
    if world.cycle_h:
        old *= 1.0 + 0.4 * np.sin(2 * np.pi * (hour + random.uniform(0, world.cycle_h, (paths, 1))) / world.cycle_h)
    if world.doubles:
        begins = random.integers(0, HOURS - 6, (paths, 1))
        old *= 1.0 + ((hour >= begins) & (hour < begins + 6))
    if world.jump[0]:
        share[HOURS // 2 :], old[:, HOURS // 2 :] = world.jump
    per_hour = np.where(hour % 24 < 6, 4.0 * world.per_hour, 0.0) if world.night else np.full(HOURS, world.per_hour)
    new = np.clip(worse[0] * worse[1] * old / (1.0 + (worse[1] - 1.0) * old), 0.0, 1.0)
    draw = _copying if world.copies else _independent
    tenants = []
    for number, part in enumerate(world.tenants):
        counts = draw(world, random, part * per_hour, share, new, old)
        if world.burst and number == len(world.tenants) - 1:
            drawn, when = random.binomial(world.burst, world.share, paths), random.integers(0, HOURS, paths)
            for column, more in ((0, drawn), (1, drawn), (2, world.burst - drawn), (3, world.burst - drawn)):
                counts[np.arange(paths), when, column] += more
        tenants.append(counts)
    if world.dies:
        when = random.integers(0, HOURS, paths)
        tenants[0][np.arange(paths), when, 1] = np.minimum(world.dies, tenants[0][np.arange(paths), when, 0])
    return Strata(np.stack([_thick(counts) for counts in tenants], 1), np.array(world.tenants))


def _independent(
    world: World, random: np.random.Generator, per_hour: Floats, share: Floats, new: Floats, old: Floats
) -> Floats:
    num_new, num_old = (random.poisson(np.broadcast_to(per_hour * part, new.shape)) for part in (share, 1.0 - share))
    return np.stack([num_new, random.binomial(num_new, new), num_old, random.binomial(num_old, old)], -1).astype(float)


def _copying(
    world: World, random: np.random.Generator, per_hour: Floats, share: Floats, new: Floats, old: Floats
) -> Floats:
    """People rate in turn; some repeat the previous rating."""
    paths = np.arange(len(new))
    counts = np.zeros((*new.shape, 4))
    last = np.zeros((len(new), 2), bool)
    for hour, num in enumerate(per_hour.astype(int)):
        for _ in range(num):
            side = np.where(random.random(len(new)) < share[hour], 0, 1)
            own = random.random(len(new)) < np.where(side == 0, new[:, hour], old[:, hour])
            whose = side if world.within else np.zeros_like(side)
            word = np.where(random.random(len(new)) < world.copies, last[paths, whose], own)
            last[paths, whose] = word
            counts[paths, hour, 2 * side] += 1
            counts[paths, hour, 2 * side + 1] += word
    return counts


def _thick(counts: Floats) -> Floats:
    """Blocks with too few people wait for the next, as `strata` does it."""
    found, waiting = np.zeros_like(counts), np.zeros_like(counts[:, 0])
    for block in range(counts.shape[1]):
        waiting = waiting + counts[:, block]
        enough = (waiting[:, 0] > 0) & (waiting[:, 2] > 0) & (waiting[:, 0] + waiting[:, 2] >= 8)
        found[enough, block] = waiting[enough]
        waiting[enough] = 0.0
    return found


def evals(paths: int) -> Iterator[Row]:
    """Candidates in a row with one sampled answer per task, at first 0.8 correct."""
    for tasks, suites in ((500, 1), (500, 3), (2000, 1)):
        held = [any(candidates(12, 0.0, tasks, suites, seed)) for seed in range(paths)]
        name = f"12 equal candidates, {suites} suite{'s' * (suites > 1)} of {tasks} tasks: any held"
        yield Row(name, _percent(held), "%", high=5.0)
    for tasks in (500, 2000):
        found = [candidates(1, 0.02, tasks, 1, seed)[0] for seed in range(paths)]
        yield Row(f"worse by max_drop, {tasks} tasks: held", _percent(found), "%", high=1.0)
    found = [candidates(1, 0.1, 500, 1, seed)[0] for seed in range(paths)]
    yield Row("10 points worse, 500 tasks: held", _percent(found), "%", low=70.0)
    behind = [sum(candidates(7, 0.0, 500, 1, seed, first_bad=True)) for seed in range(paths // 10)]
    yield Row("good candidates held after a bad candidate, of 7", float(max(behind, default=0)), "", high=0.0)
    for tasks in (500, 2000):
        lost = [0.003 * (60 - sum(candidates(60, 0.003, tasks, 1, seed))) for seed in range(max(1, paths // 30))]
        yield Row(f"60 candidates, each 0.3 points worse, {tasks} tasks: points lost", 100 * max(lost), "", high=7.0)


def candidates(num: int, less: float, tasks: int, suites: int, seed: int, *, first_bad: bool = False) -> list[bool]:
    """True for each candidate that is held; each is worse than the previous by `less`. Eight versions before them passed."""
    random, suite = np.random.default_rng(seed), GateSuite()
    hard = random.beta(1.6, 0.4, (suites, tasks))

    def answered(version: int, worse: float) -> list[EvalResult]:
        right = (random.random((suites, tasks)) < hard - worse).astype(int).tolist()
        return [
            EvalResult(
                policy="main",
                version=version,
                suite="dev",
                num_tasks=tasks,
                num_correct=sum(row),
                right=tuple(row),
                tasks="9f",
            )
            for row in right
        ]

    passed = [answered(version, 0.0) for version in range(8)]
    held = []
    for number in range(num + first_bad):
        is_bad = first_bad and number == 0
        new = answered(8 + number, 0.4 if is_bad else less * (number + 1))
        is_held = any(
            drop(suite, result, stable, 2 * suites)
            or total_drop(suite, [row[index] for row in passed], result, 2 * suites)
            for index, (result, stable) in enumerate(zip(new, passed[-1], strict=True))
        )
        if not is_bad:
            held.append(is_held)
        if not is_held:
            passed.append(new)
    return held
