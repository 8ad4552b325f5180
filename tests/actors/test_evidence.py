"""The likelihood ratios that decide: martingales where nothing differs, whatever the numbers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from actors.evidence import against, log_odds_ratio, wilson

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


@given(st.lists(st.floats(-50, 50), max_size=6), st.floats(0.1, 10), st.floats(0.01, 0.99))
def test_what_is_cut_of_a_tenant_never_adds_evidence_and_one_alone_never_reaches_the_bound(
    logs: list[float], bound: float, share: float
) -> None:
    assert against(logs, bound, share) <= math.fsum(logs) + 1e-9
    assert against([*(min(one, 0.0) for one in logs), 1e9], bound, share) < bound
    assert math.isclose(against(logs, bound, 1.0), math.fsum(logs), abs_tol=1e-9)


@given(st.integers(1, 500), st.data())
def test_an_interval_of_wilsons_holds_the_share_it_was_made_of(of: int, data: st.DataObject) -> None:
    happened = data.draw(st.integers(0, of))
    low, high = wilson(happened, of)
    assert 0.0 <= low <= happened / of + 1e-12 and happened / of - 1e-12 <= high <= 1.0
