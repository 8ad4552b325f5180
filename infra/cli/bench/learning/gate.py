"""The gate's tests, simulated: how often they are wrong where nothing differs, and how often they find twice the odds.

Every row is a world of people who rate answers (`people.py`), or of evals; the decisions are those of the gate's own functions.
A promise is kept where no more than 1 % of the decisions are wrong, up to two standard errors, or 80 % or more of what is worse
is found; a row without a promise says what is given up instead (see `[master.gate.guard]`).
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context

import msgspec
import numpy as np

from actors.config import CanaryConfig, GateGuardConfig, GateSuite
from actors.master.gate.suites import drop, total_drop
from infra.cli.bench.learning.people import SimulatedPeople, guarded, share_of, tried
from schemas import EvalResult

AT_MOST, AT_LEAST = 0.01, 0.8
DAY_H = 24.0
VERSIONS = 60
TWICE = ", twice the odds"
DELAYS = (("complaints slow, praise fast", 24.0, 1.0), ("complaints fast, praise slow", 1.0, 24.0))
Simulated = Callable[[int], tuple[str, int]]


class GateRow(msgspec.Struct, frozen=True):
    """One line.

    test: of the gate. name: what is simulated. path: how it ends with a seed, and after how many ratings. worse: the
    new version is. promised: whether a promise covers it. part: one path of so many is simulated, where paths are long.
    """

    test: str
    name: str
    path: Simulated
    worse: bool = False
    promised: bool = True
    part: int = 1


class Figures(msgspec.Struct, frozen=True):
    """What came of a row.

    test, name, worse: as in the row. paths: simulated. failed: share of paths in which the version was turned away,
    taken back or held. error: its standard error. passed: share let through. restless: share of alarms that the rate
    changes by itself. ratings: median until a decision, of those that came to one. kept: whether the promise was, None
    where it has none.
    """

    test: str
    name: str
    worse: bool
    paths: int
    failed: float
    error: float
    passed: float
    restless: float
    ratings: float
    kept: bool | None


def rows() -> list[GateRow]:
    """All of them."""
    return [*_trials(), *_guards(), *_evals()]


def _trials() -> Iterator[GateRow]:
    config = CanaryConfig()

    def row(name: str, world: SimulatedPeople, hours: float = 3 * DAY_H, *, part: int = 1) -> GateRow:
        return GateRow("trial", name, partial(tried, config, world, hours), world.odds > 1.0, True, part)

    for base in (0.02, 0.1, 0.3):
        yield row(f"base {base:g}", SimulatedPeople(base=base), 7 * DAY_H)
    for base, hours in ((0.02, 7 * DAY_H), (0.1, 2 * DAY_H), (0.3, DAY_H)):
        yield row(f"base {base:g}{TWICE}", SimulatedPeople(base=base, odds=2.0), hours)
    for swing, per_hour in product((0.05, 0.08), (50.0, 200.0, 1000.0)):
        name, part = f"0.1 ± {swing:g} over the day, {per_hour:g} an hour", 4 if per_hour > 200 else 1
        yield row(name, SimulatedPeople(swing=swing, per_hour=per_hour), part=part)
    for share, odds in product((0.1, 0.5), (1.0, 2.0)):
        name = f"0.05 to 0.2 in 48 h, share {share:g}{TWICE if odds > 1 else ''}"
        yield row(name, SimulatedPeople(base=0.05, rise=0.2, share=share, odds=odds))
    for (name, bad_h, good_h), odds in product(DELAYS, (1.0, 2.0)):
        yield row(name + (TWICE if odds > 1 else ""), SimulatedPeople(bad_h=bad_h, good_h=good_h, odds=odds))
    for alike, each in product((0.2, 0.5), (10, 30)):
        name = f"{each} ratings a person, correlation {alike:g}"
        yield row(name, SimulatedPeople(each=each, alike=alike, per_hour=500.0), part=2)
    for heavy in (0.05, 0.1):
        yield row(f"one person gives {heavy:.0%}, complaints", SimulatedPeople(heavy=heavy))


def _guards() -> Iterator[GateRow]:
    config = GateGuardConfig()

    def row(name: str, world: SimulatedPeople, *, promised: bool = True, part: int = 2) -> GateRow:
        path = partial(guarded, config, world, 3 * DAY_H, 3 * DAY_H)
        return GateRow("guard", name, path, world.odds > 1.0, promised, part)

    for base in (0.02, 0.1, 0.3):
        yield row(f"base {base:g}", SimulatedPeople(base=base))
    for base in (0.02, 0.1, 0.3):
        yield row(f"base {base:g}{TWICE}", SimulatedPeople(base=base, odds=2.0))
    for swing, per_hour in product((0.05, 0.08), (50.0, 200.0, 1000.0)):
        name, part = f"0.1 ± {swing:g} over the day, {per_hour:g} an hour", 8 if per_hour > 200 else 2
        yield row(name, SimulatedPeople(swing=swing, per_hour=per_hour), part=part)
    yield row(f"0.1 ± 0.08 over the day{TWICE}", SimulatedPeople(swing=0.08, odds=2.0))
    yield row("0.05 to 0.2 in 48 h, promoted in the middle", SimulatedPeople(base=0.05, rise=0.2, rise_from_h=-24.0))
    rising = SimulatedPeople(base=0.05, rise=0.2, rise_from_h=-24.0, odds=2.0)
    yield row(f"the same{TWICE} (only gross harm is found)", rising, promised=False)
    rising = SimulatedPeople(base=0.05, rise=0.2)
    yield row("0.05 to 0.2 in 48 h from the promotion on (it is taken back)", rising, promised=False)
    for name, bad_h, good_h in DELAYS:
        yield row(name, SimulatedPeople(bad_h=bad_h, good_h=good_h))
    for alike, each in product((0.2, 0.5), (10, 30)):
        name = f"{each} ratings a person, correlation {alike:g}"
        yield row(name, SimulatedPeople(each=each, alike=alike, per_hour=500.0), part=4)
    for heavy in (0.05, 0.1):
        yield row(f"one person gives {heavy:.0%}, complaints", SimulatedPeople(heavy=heavy))


def _evals() -> Iterator[GateRow]:
    bar = GateSuite()
    for tasks in (250, 500, 2000):
        yield GateRow("evals", f"{tasks} tasks, as good", partial(weighed, bar, tasks, 0.0, 2))
    for tasks in (500, 2000):
        name = f"{tasks} tasks, 10 points worse" if tasks == 500 else f"{tasks} tasks, 5 points worse"
        yield GateRow("evals", name, partial(weighed, bar, tasks, 0.1 if tasks == 500 else 0.05, 2), worse=True)
    for tasks in (500, 2000):
        name = f"{tasks} tasks, the last of {VERSIONS} as good"
        yield GateRow("evals", name, partial(weighed, bar, tasks, 0.0, VERSIONS), part=4)
        name = f"{tasks} tasks, {VERSIONS} versions of 0.3 points less each"
        yield GateRow("evals", name, partial(weighed, bar, tasks, 0.003, VERSIONS), worse=True, part=20)


def weighed(bar: GateSuite, tasks: int, less: float, versions: int, seed: int) -> tuple[str, int]:
    """Versions one after the other, each worse by `less`, answered once a task at a temperature: 0.8 right at first.

    "failed" where the last is held, or, of more than two that get worse, where fewer than 6 points are lost in the end.
    """
    random, stable = np.random.default_rng(seed), 0
    hard = random.beta(1.6, 0.4, tasks)
    history: list[EvalResult] = []
    held = False
    for version in range(versions):
        right = (random.random(tasks) < hard - less * version).astype(int).tolist()
        result = EvalResult(policy="main", version=version, suite="dev", num_tasks=tasks, num_correct=sum(right))
        history.append(msgspec.structs.replace(result, right=tuple(right), tasks="the same"))
        if drop(bar, history[-1], history[stable]) or total_drop(bar, history):
            held = True
        else:
            stable, held = version, False
    bounded = less * stable < 0.06 if versions > 2 and less else held
    return "failed" if bounded else "passed", 0


def figures_of(row: GateRow, paths: int) -> Figures:
    """The row on so many paths."""
    found = [row.path(seed) for seed in range(max(1, paths // row.part))]
    endings = [ended for ended, _ in found]
    failed, error = share_of(endings, "failed")
    decided = [ratings for ended, ratings in found if ended in ("failed", "passed")]
    kept = failed >= AT_LEAST if row.worse else failed - 2 * error <= AT_MOST  # beyond chance
    return Figures(
        row.test, row.name, row.worse, len(found), failed, error, share_of(endings, "passed")[0],
        share_of(endings, "restless")[0], statistics.median(decided) if decided else 0.0, kept if row.promised else None,
    )  # fmt: skip


def run(paths: int = 1000, *, jobs: int = 2, wanted: Sequence[GateRow] | None = None) -> list[Figures]:
    """Every row; figures do not depend on how many jobs there are."""
    wanted = rows() if wanted is None else wanted
    if jobs == 1:
        return [figures_of(row, paths) for row in wanted]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(figures_of, wanted, [paths] * len(wanted)))
