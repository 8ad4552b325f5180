"""The likelihood ratios that decide: martingales where nothing differs, whatever the numbers."""

import math
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.master.gate.evidence import against, log_odds_ratio, mean_chance, sign_chance, wilson

FEW = st.integers(0, 40)
ODDS = st.floats(1.01, 10.0)


@given(FEW, FEW, FEW, ODDS)
def test_the_ratio_of_an_urn_has_mean_one_where_both_sides_are_as_good_and_its_inverse_where_the_odds_are_so_high(
    new: int, old: int, bad: int, odds: float
) -> None:
    bad = min(bad, new + old)
    counts = range(max(0, bad - old), min(new, bad) + 1)
    chances = {k: math.comb(new, k) * math.comb(old, bad - k) / math.comb(new + old, bad) for k in counts}
    ratios = {k: math.exp(log_odds_ratio(new, k, old, bad - k, odds)) for k in counts}
    assert math.isclose(sum(chances[k] * ratios[k] for k in counts), 1.0, rel_tol=1e-9)
    whole = sum(chance * odds**k for k, chance in chances.items())
    worse = {k: chances[k] * odds**k / whole for k in counts}  # Fisher's noncentral hypergeometric distribution
    assert math.isclose(sum(worse[k] / ratios[k] for k in counts), 1.0, rel_tol=1e-9)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=6), st.floats(3, 10), st.floats(0.1, 0.99))
def test_one_tenant_alone_neither_reaches_the_bound_nor_keeps_all_others_from_it(
    logs: list[float], bound: float, share: float
) -> None:
    assert against([*(min(one, 0.0) for one in logs), 1e9], bound, share) < bound
    assert against([-1e9, *[1e9] * 100], bound, share) >= bound
    assert math.isclose(against(logs, bound, 1.0), math.fsum(logs), abs_tol=1e-9)


@given(st.integers(1, 500), st.data())
def test_an_interval_of_wilsons_holds_the_share_it_was_made_of(of: int, data: st.DataObject) -> None:
    happened = data.draw(st.integers(0, of))
    low, high = wilson(happened, of)
    assert 0.0 <= low <= happened / of + 1e-12 and happened / of - 1e-12 <= high <= 1.0


def test_luck_reaches_the_bound_seldom_though_what_speaks_against_it_is_cut() -> None:
    """20 tenants, nothing differs: 1,200 paths of 60 blocks each, at a bound that 5 % may reach, and 1.25 times as many."""
    random, bound, reached = Random(0), math.log(20), 0
    for _ in range(1200):
        logs, top = [0.0] * 20, 0.0
        for _ in range(60):
            tenant = random.randrange(20)
            new_bad, old_bad = (sum(random.random() < 0.3 for _ in range(count)) for count in (4, 12))
            logs[tenant] += log_odds_ratio(4, new_bad, 12, old_bad, 2.0)
            top = max(top, against(logs, bound, 0.5))
        reached += top >= bound
    assert reached <= 1200 * 0.05 * 1.25


@given(st.lists(st.floats(-5.0, 5.0).map(lambda size: round(size, 3)), max_size=9))
def test_differences_are_never_as_likely_by_chance_as_is_allowed_for(gaps: list[float]) -> None:
    sums = [
        sum(sign * abs(gap) for sign, gap in zip(signs, gaps, strict=True))
        for signs in product((1, -1), repeat=len(gaps))
    ]
    exact = sum(one >= sum(gaps) - 1e-9 for one in sums) / len(sums)
    assert sign_chance(gaps) >= exact - 1e-12


def test_what_differences_are_allowed_for_chance_is_hoeffdings() -> None:
    assert sign_chance([2.0, 2.0, -1.0, 0.0]) == pytest.approx(math.exp(-9 / 18))
    assert sign_chance([1.0, -1.0]) == sign_chance([-3.0]) == sign_chance([]) == 1.0


@given(st.integers(1, 40), st.data())
def test_a_mean_is_never_as_high_by_chance_as_is_allowed_for(count: int, data: st.DataObject) -> None:
    high, most = data.draw(st.integers(0, count)), data.draw(st.floats(0.01, 0.99))
    tail = sum(math.comb(count, k) * most**k * (1 - most) ** (count - k) for k in range(high, count + 1))
    assert mean_chance([1.0] * high + [0.0] * (count - high), most) >= tail - 1e-9


def test_what_a_mean_is_allowed_for_chance_is_hoeffdings() -> None:
    assert mean_chance([1.0, 0.5], 0.5) == pytest.approx(math.exp(-2 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))))
    assert mean_chance([1.0, 1.0], 0.9) == pytest.approx(0.81)
    assert mean_chance([0.4, 0.6], 0.5) == mean_chance([], 0.5) == mean_chance([0.0], 0.0) == 1.0
    assert mean_chance([1.0], 1.0) == 1.0 and mean_chance([0.1], 0.0) == 0.0
