"""The test of two versions, and of eval suites: seldom wrong in any world, and it finds what is worse.

The rates of every world with more paths: `make bench NAME=gate`.
"""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from actors.config import CanaryConfig, GateSuite
from actors.master.gate.suites import difference, total_drop
from actors.master.gate.trial import (
    BLOCK_SHARE,
    Evidence,
    Strata,
    ending,
    not_worse_series,
    power,
    strata,
    worse_series,
)
from schemas import EvalResult
from tests.bench.gate import KINDS, WORLDS, World, candidates, decided, people

CONFIG = CanaryConfig()
SUITE = GateSuite(max_drop=0.02)
PATHS = 40
SLOW = {name for name, world in WORLDS.items() if world.copies}


@pytest.mark.parametrize("name", [name for name in WORLDS if name not in SLOW])
def test_an_equal_version_is_never_turned_away_nor_one_beyond_the_margin_let_through(name: str) -> None:
    """Of 40 paths; alpha is 1 % and beta 5 %, so 1 and 6 are allowed by chance."""
    for kind, worse in KINDS.items():
        turned, passed = decided(people(WORLDS[name], worse, PATHS, np.random.default_rng(3)))
        if kind == "equal":
            assert turned.sum() <= 1
        elif kind == "twice the odds" and WORLDS[name].base >= 0.1:
            assert passed.sum() <= 6


@pytest.mark.parametrize(
    ("name", "kind", "at_least"),
    [
        ("base 0.005", "equal", 0.95), ("base 0.1", "equal", 0.7), ("base 0.3", "equal", 0.9), ("watch", "twice the odds", 0.8),
        ("base 0.1", "twice the odds", 0.8), ("1,000 per hour", "equal", 0.95), ("1,000 per hour", "twice the odds", 0.95),
        ("weekly ± 40 %", "twice the odds", 0.8), ("only at night", "twice the odds", 0.8),
        ("tenants of 99 and 1 %", "twice the odds", 0.8), ("tenants of 99 and 1 %", "equal", 0.7),
    ],
)  # fmt: skip
def test_a_week_is_enough_to_decide(name: str, kind: str, at_least: float) -> None:
    turned, passed = decided(people(WORLDS[name], KINDS[kind], PATHS, np.random.default_rng(4)))
    assert (passed if kind == "equal" else turned).mean() >= at_least


def test_people_who_copy_others_turn_no_equal_version_away() -> None:
    busy = World(per_hour=60.0, copies=0.5)
    for world in (busy, replace(busy, within=True)):
        found = people(world, KINDS["equal"], PATHS, np.random.default_rng(5))
        assert decided(found)[0].sum() <= 1


def test_the_expected_evidence_is_one_at_most_on_the_margin_and_within_it() -> None:
    """Exact: every outcome of a block of three and nine people, for chances on either side of both margins."""
    for old in (0.02, 0.1, 0.3, 0.6):
        margin = max(CONFIG.margin, CONFIG.relative_margin * old)
        for series, new in (
            (worse_series, (old, old + margin)),
            (not_worse_series, (old + margin, min(1.0, old + 2 * margin))),
        ):
            for chance in new:
                total = 0.0
                for bad, old_bad in np.ndindex(4, 10):
                    weight = math.comb(3, bad) * chance**bad * (1 - chance) ** (3 - bad)
                    weight *= math.comb(9, old_bad) * old**old_bad * (1 - old) ** (9 - old_bad)
                    counts = np.array([[[3.0, bad, 9.0, old_bad]]])
                    bound = math.log(3 / CONFIG.alpha) if series is worse_series else math.log(1 / CONFIG.beta)
                    total += weight * math.exp(bound * series(CONFIG, Strata(counts, np.ones(1)))[-1])
                assert total <= 1.0 + 1e-9


def test_any_measure_shows_that_a_version_is_worse_and_all_must_show_that_it_is_not() -> None:
    worse, good, open_ = Evidence(worse=1.0), Evidence(not_worse=1.0), Evidence()
    assert ending({"a": worse, "b": good}) == "worse"
    assert ending({"a": good, "b": good}) == "not worse"
    assert ending({"a": good, "b": open_}) == ""


# ---- eval suites


def result(right: list[int], samples: int = 1, version: int = 3, tasks: str = "9f") -> EvalResult:
    return EvalResult(
        policy="main", version=version, suite="dev", num_tasks=len(right), num_correct=sum(right), num_samples=samples,
        right=tuple(right), tasks=tasks,
    )  # fmt: skip


def test_one_block_of_all_tenants_gives_a_quarter_of_what_decides_and_one_of_two_tenants_half() -> None:
    bad, good = [60.0, 60.0, 540.0, 0.0], [60.0, 6.0, 540.0, 54.0]
    blocks = np.array([[bad] * 8, [good] * 8])
    alone = worse_series(CONFIG, Strata(blocks[:1, :3], np.ones(1)))
    assert alone == pytest.approx([BLOCK_SHARE * n for n in (1, 2, 3)])
    five = worse_series(CONFIG, Strata(np.array([[bad, good]] * 5), np.full(5, 0.2)), 0.5)
    assert five.max() == pytest.approx(BLOCK_SHARE), "an engine that died once failed for all of them"
    both = Strata(blocks, np.array([0.5, 0.5]))
    assert worse_series(CONFIG, both, 0.5).max() < 0.5 < 1.0 <= worse_series(CONFIG, both, 1.0).max()
    assert worse_series(CONFIG, Strata(blocks, np.array([0.9, 0.1])), 0.5).max() >= 1.0, "nearly all of the people"


def test_small_tenants_that_are_counted_together_have_their_part_of_the_people() -> None:
    large, small = {("a", block): (90, 0) for block in range(60)}, {("b", block): (3, 3) for block in range(60)}
    found = strata({**large, **small}, {**large, **{place: (3, 0) for place in small}})
    assert sorted(found.parts) == pytest.approx([6 / 186, 180 / 186])
    assert worse_series(CONFIG, found, 0.5).max() < 1.0, "three of a hundred people do not decide alone"
    rest = {("", 0): (9, 0), ("b", 0): (3, 3)}
    assert strata(rest, rest).counts.sum() == 18 + 12, "nobody is left out"


def test_power_grows_with_traffic() -> None:
    few, many = power(CONFIG, base=0.1, per_hour=20.0, share=0.1), power(CONFIG, base=0.1, per_hour=400.0, share=0.1)
    assert few[0] < 0.5 < 0.95 <= many[0] and few[1] < 0.5 < 0.95 <= many[1]


def test_one_bad_candidate_holds_none_of_the_good_ones_behind_it() -> None:
    for seed in range(20):
        assert candidates(7, 0.0, 500, 1, seed, first_bad=True) == [False] * 7


@pytest.mark.parametrize(("tasks", "suites"), [(100, 1), (500, 1), (500, 3), (2000, 1)])
def test_of_twelve_equal_candidates_in_a_row_seldom_any_is_held(tasks: int, suites: int) -> None:
    assert sum(any(candidates(12, 0.0, tasks, suites, seed)) for seed in range(40)) <= 2


@pytest.mark.parametrize("tasks", [500, 2000])
def test_a_candidate_worse_by_max_drop_is_seldom_held_and_one_much_worse_is(tasks: int) -> None:
    assert sum(candidates(1, 0.02, tasks, 1, seed)[0] for seed in range(100)) <= 2
    assert sum(candidates(1, 0.15, tasks, 1, seed)[0] for seed in range(40)) >= 36


@pytest.mark.parametrize(("tasks", "most"), [(500, 0.075), (2000, 0.05)])
def test_versions_that_each_lose_a_little_are_stopped_before_much_is_lost(tasks: int, most: float) -> None:
    for seed in range(5):
        held = candidates(60, 0.003, tasks, 1, seed)
        last = max(number for number, is_held in enumerate(held) if not is_held)
        assert 0.003 * (last + 1) <= most


def test_equal_candidates_that_answer_most_tasks_like_the_one_before_are_seldom_held() -> None:
    """Of 300; alpha is 1 %. Greedy answers: 80 % of the tasks are right, and few change from version to version."""
    held = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        right, passed = random.random(500) < 0.8, list[EvalResult]()
        for _ in range(40):
            right = right ^ (random.random(500) < np.where(right, 0.005, 0.02))
            passed.append(result(right.astype(int).tolist()))
        held += total_drop(SUITE, passed[:-1], passed[-1], 2) > 0.0
    assert held <= 3


def test_a_small_result_on_other_tasks_is_as_uncertain_as_its_size_makes_it() -> None:
    _, variance = difference(result([1] * 100 + [0] * 900), result([1] * 25 + [0] * 25, tasks="7a"))
    assert variance == pytest.approx(0.1 * 0.9 / 1000 + 0.5 * 0.5 / 50)


def test_a_run_that_declined_can_come_back() -> None:
    passed = [result([1] * 450 + [0] * 50)] * 8 + [result([1] * 425 + [0] * 75)] * 8
    assert total_drop(SUITE, passed, result([1] * 425 + [0] * 75)) == pytest.approx(0.05)
    assert total_drop(SUITE, passed, result([1] * 442 + [0] * 58)) == 0.0
