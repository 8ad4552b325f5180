"""The gate's tests, simulated: how often they are wrong where nothing differs, and how often they find twice the odds.

Every row is a world of people who rate answers (`infra.bench.people`), or of evals; the decisions are those of the gate's
own functions. A promise is kept where no more than 1 % of the decisions are wrong, or 80 % or more of what is worse is found;
a row that keeps none says what it gives up instead (see `[master.gate.guard]`).
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import msgspec
import numpy as np

from actors.config import CanaryConfig, GateSuite, GuardConfig
from actors.suites import drop, total_drop
from infra.bench.people import World, guarded, share_of, tried
from schemas import EvalResult

AT_MOST, AT_LEAST = 0.01, 0.8
DAY_H = 24.0
VERSIONS = 60
Path = Callable[[int], tuple[str, int]]


class Row(msgspec.Struct, frozen=True):
    """One line. path: how it ends with a seed, and after how many ratings. worse: the new version is. promised: whether a
    promise covers it. part: one path of so many is simulated, where paths are long.
    """

    test: str
    name: str
    path: Path
    worse: bool = False
    promised: bool = True
    part: int = 1


class Figures(msgspec.Struct, frozen=True):
    """What came of a row. failed: share of paths in which the version was turned away, taken back or held. error: its
    standard error. passed: share let through. restless: share of alarms that the rate changes by itself. ratings: median
    until a decision, of those that came to one. kept: whether a promise was, None where there is none.
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


def rows() -> list[Row]:
    """All of them."""
    return [*_trials(), *_guards(), *_evals()]


def _trials() -> Iterator[Row]:
    config = CanaryConfig()

    def row(name: str, hours: float, *, worse: bool = False, part: int = 1, **world: float) -> Row:
        return Row("trial", name, partial(tried, config, World(**world), hours), worse, True, part)

    for base in (0.02, 0.1, 0.3):
        yield row(f"base {base:g}", 7 * DAY_H, base=base)
    for base, hours in ((0.02, 7 * DAY_H), (0.1, 2 * DAY_H), (0.3, DAY_H)):
        yield row(f"base {base:g}, twice the odds", hours, worse=True, base=base, odds=2.0)
    for swing in (0.05, 0.08):
        for per_hour in (50.0, 200.0, 1000.0):
            name, part = f"0.1 ± {swing:g} over the day, {per_hour:g} an hour", 4 if per_hour > 200 else 1
            yield row(name, 3 * DAY_H, swing=swing, per_hour=per_hour, part=part)
    for share in (0.1, 0.5):
        for worse in (False, True):
            name = f"0.05 to 0.2 in 48 h, share {share:g}" + ", twice the odds" * worse
            yield row(name, 3 * DAY_H, worse=worse, base=0.05, rise=0.2, share=share, odds=1.0 + worse)
    for bad_h, good_h, name in (
        (24.0, 1.0, "complaints slow, praise fast"),
        (1.0, 24.0, "complaints fast, praise slow"),
    ):
        for worse in (False, True):
            more = {"bad_h": bad_h, "good_h": good_h, "odds": 1.0 + worse}
            yield row(name + ", twice the odds" * worse, 3 * DAY_H, worse=worse, **more)
    for alike in (0.2, 0.5):
        for each in (10, 30):
            name = f"{each} ratings a person, correlation {alike:g}"
            yield row(name, 3 * DAY_H, each=each, alike=alike, per_hour=500.0, part=2)
    for heavy in (0.05, 0.1):
        yield row(f"one person gives {heavy:.0%}, complaints", 3 * DAY_H, heavy=heavy)


def _guards() -> Iterator[Row]:
    config = GuardConfig()

    def row(name: str, *, worse: bool = False, promised: bool = True, part: int = 2, **world: float) -> Row:
        path = partial(guarded, config, World(**world), 3 * DAY_H, 3 * DAY_H)
        return Row("guard", name, path, worse, promised, part)

    for base in (0.02, 0.1, 0.3):
        yield row(f"base {base:g}", base=base)
    for base in (0.02, 0.1, 0.3):
        yield row(f"base {base:g}, twice the odds", worse=True, base=base, odds=2.0)
    for swing in (0.05, 0.08):
        for per_hour in (50.0, 200.0, 1000.0):
            name, part = f"0.1 ± {swing:g} over the day, {per_hour:g} an hour", 8 if per_hour > 200 else 2
            yield row(name, swing=swing, per_hour=per_hour, part=part)
    yield row("0.1 ± 0.08 over the day, twice the odds", worse=True, swing=0.08, odds=2.0)
    rise = {"base": 0.05, "rise": 0.2, "rise_h": 48.0}
    yield row("0.05 to 0.2 in 48 h, promoted in the middle", rise_from_h=-24.0, **rise)
    rising = {"rise_from_h": -24.0, "odds": 2.0, **rise}
    yield row("the same, twice the odds (gross harm alone is found)", worse=True, promised=False, **rising)
    yield row("0.05 to 0.2 in 48 h from the promotion on (it is taken back)", promised=False, **rise)
    for bad_h, good_h, name in (
        (24.0, 1.0, "complaints slow, praise fast"),
        (1.0, 24.0, "complaints fast, praise slow"),
    ):
        yield row(name, bad_h=bad_h, good_h=good_h)
    for alike in (0.2, 0.5):
        for each in (10, 30):
            yield row(f"{each} ratings a person, correlation {alike:g}", each=each, alike=alike, per_hour=500.0, part=4)
    for heavy in (0.05, 0.1):
        yield row(f"one person gives {heavy:.0%}, complaints", heavy=heavy)


def _evals() -> Iterator[Row]:
    bar = GateSuite()
    for tasks in (250, 500, 2000):
        yield Row("evals", f"{tasks} tasks, as good", partial(weighed, bar, tasks, 0.0, 2))
    for tasks in (500, 2000):
        name = f"{tasks} tasks, 10 points worse" if tasks == 500 else f"{tasks} tasks, 5 points worse"
        yield Row("evals", name, partial(weighed, bar, tasks, 0.1 if tasks == 500 else 0.05, 2), worse=True)
    for tasks in (500, 2000):
        name = f"{tasks} tasks, the last of {VERSIONS} as good"
        yield Row("evals", name, partial(weighed, bar, tasks, 0.0, VERSIONS), part=4)
        name = f"{tasks} tasks, {VERSIONS} versions of 0.3 points less each"
        yield Row("evals", name, partial(weighed, bar, tasks, 0.003, VERSIONS), worse=True, part=20)


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


def figures_of(row: Row, paths: int) -> Figures:
    """The row on so many paths."""
    found = [row.path(seed) for seed in range(max(1, paths // row.part))]
    endings = [ended for ended, _ in found]
    failed, error = share_of(endings, "failed")
    decided = [ratings for ended, ratings in found if ended in ("failed", "passed")]
    kept = failed >= AT_LEAST if row.worse else failed <= AT_MOST
    return Figures(
        row.test, row.name, row.worse, len(found), failed, error, share_of(endings, "passed")[0],
        share_of(endings, "restless")[0], statistics.median(decided) if decided else 0.0, kept if row.promised else None,
    )  # fmt: skip


def run(paths: int = 1000, *, jobs: int = 2, wanted: Sequence[Row] | None = None) -> list[Figures]:
    """Every row; figures do not depend on how many jobs there are."""
    wanted = rows() if wanted is None else wanted
    if jobs == 1:
        return [figures_of(row, paths) for row in wanted]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(figures_of, wanted, [paths] * len(wanted)))
