"""The simulation of the gate counts as the gate does, and its promises hold in a quick run of it."""

import msgspec
import numpy as np
import pytest

from actors.config import CanaryConfig, GateConfig, GateGuardConfig, PeopleConfig
from actors.master.gate import guard, trial
from actors.master.gate.people import People
from infra.cli.bench.learning.gate import GateRow, figures_of, rows, run
from infra.cli.bench.learning.people import (
    BLOCK_MS,
    HOUR_MS,
    STABLE,
    TRIAL,
    RatingsByTime,
    SimulatedPeople,
    blocks_of,
    firsts,
    hours_of,
    ratings_drawn,
)
from infra.policies.channel import Stable
from schemas import Progress
from tests.actors.rated import rated

CONFIG = GateConfig(canary=CanaryConfig(), guard=GateGuardConfig(), people=PeopleConfig(mature="24h"))
WORLD = SimulatedPeople(base=0.2, per_hour=60.0, each=3, alike=0.3, bad_h=30.0, good_h=5.0, odds=2.0, heavy=0.05)
DAYS_MS = 3 * 24 * HOUR_MS
EVERY = {(row.test, row.name): row for row in rows()}
QUICK = ("base 0.1", "base 0.1, twice the odds", "250 tasks, as good", "500 tasks, 10 points worse")


def told(found: RatingsByTime, *, on_trial: bool, from_ms: int = 0) -> People:
    """What people say, record by record, as the master hears it."""
    people = People(CONFIG)
    for number in range(found.at_h.size):
        at_ms = from_ms + int(np.floor(found.at_h[number] * HOUR_MS))
        closure = rated(
            "s", TRIAL if found.new[number] else STABLE, float(not found.bad[number]), at_ms=at_ms,
            trial=TRIAL if on_trial else -1, rater=f"p{found.person[number]}", number=number,
            late_ms=int(np.floor(found.late_h[number] * HOUR_MS)),
        )  # fmt: skip
        people.closure(closure, at_ms)
    people.progress(Progress(role="master", instance="master/1"), from_ms + DAYS_MS + 48 * HOUR_MS)
    return people


def test_a_simulated_trial_counts_as_the_master_does_record_by_record() -> None:
    found = ratings_drawn(WORLD, np.random.default_rng(0), 0.0, 72.0, drawn=True)
    own = blocks_of(firsts(found, 24.0, daily=False))
    people = told(found, on_trial=True)
    others = trial.blocks_of(people.ratings.of_trial(TRIAL), TRIAL, STABLE, BLOCK_MS, 2 * DAYS_MS)
    assert [msgspec.structs.replace(one, tenant="") for one in others] == own
    assert CONFIG.canary is not None
    heard = trial.evidence_of(CONFIG.canary, CONFIG.people, own, several=False)
    assert people.of_trial(TRIAL, STABLE) == heard and heard.people > 0 and heard.against != 0.0


def test_a_simulated_guard_counts_as_the_master_does_record_by_record() -> None:
    found = ratings_drawn(WORLD, np.random.default_rng(0), -72.0, 48.0, drawn=False)
    new, old = hours_of(firsts(found, 24.0, daily=True))
    people = told(found, on_trial=False, from_ms=DAYS_MS)
    people.moved(Stable(), Stable(version=TRIAL, promoted=TRIAL), DAYS_MS)
    assert CONFIG.guard is not None
    heard = guard.compared(CONFIG.guard, CONFIG.people, new, guard.before_of(old), several=False)
    assert people.of_stable(TRIAL) == heard and heard.same_hour != 0.0 and heard.people_before > 0


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, id=", ".join(place), marks=[] if place[1] in QUICK else pytest.mark.full)
        for place, row in EVERY.items()
        if row.promised
    ],
)
def test_a_quick_run_keeps_the_promise(place: tuple[str, str]) -> None:
    """12 paths of each row: at most one of them wrong where nothing differs, two in three found where something does."""
    figures = figures_of(msgspec.structs.replace(EVERY[place], part=1), 12 if place[0] != "evals" else 6)
    assert figures.failed >= 0.66 if figures.worse else figures.failed <= 1 / figures.paths


def test_figures_do_not_depend_on_how_many_processes_make_them() -> None:
    wanted: list[GateRow] = [EVERY["trial", "base 0.3"], EVERY["evals", "250 tasks, as good"]]
    found = run(4, jobs=1, wanted=wanted)
    assert run(4, jobs=2, wanted=wanted) == found
