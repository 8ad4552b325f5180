"""Evidence from counts: the likelihood ratios are those of their distributions, and nobody gives more than a share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.master.gate.evidence import against, log_odds_ratio, log_share_ratio, wilson

COUNTS = st.tuples(st.integers(0, 12), st.integers(0, 12)).flatmap(
    lambda sides: st.tuples(st.just(sides[0]), st.integers(0, sides[0]), st.just(sides[1]), st.integers(0, sides[1]))
)


def urn(new: int, new_bad: int, old: int, old_bad: int, odds: float) -> float:
    """Fisher's noncentral hypergeometric chance, written out."""
    bad = new_bad + old_bad
    weights = {
        count: math.comb(new, count) * math.comb(old, bad - count) * odds**count
        for count in range(bad + 1)
        if count <= new and bad - count <= old
    }
    return weights[new_bad] / sum(weights.values())


@given(COUNTS, st.floats(1.1, 5.0))
def test_evidence_for_higher_odds_is_the_ratio_of_the_two_urns(counts: tuple[int, int, int, int], odds: float) -> None:
    expected = math.log(urn(*counts, odds) / urn(*counts, 1.0))
    assert log_odds_ratio(*counts, odds) == pytest.approx(expected, abs=1e-9)


def test_where_only_one_outcome_is_possible_nothing_is_learned() -> None:
    for counts in ((5, 0, 7, 0), (5, 5, 7, 7), (0, 0, 7, 3), (5, 2, 0, 0)):
        assert log_odds_ratio(*counts, 2.0) == 0.0
    assert log_odds_ratio(1, 1, 1, 0, 2.0) == pytest.approx(math.log(4 / 3))


def test_many_people_overflow_nothing() -> None:
    assert 0 < log_odds_ratio(40_000, 4_000, 40_000, 2_000, 2.0) < math.inf


def test_evidence_for_a_higher_share_is_the_ratio_of_the_two_binomials() -> None:
    expected = 3 * math.log(0.2 / 0.1) + 7 * math.log(0.8 / 0.9)
    assert log_share_ratio(3, 10, 0.1, 0.2) == pytest.approx(expected)


def test_shares_of_nothing_and_of_all_are_kept_where_a_logarithm_is() -> None:
    assert log_share_ratio(1, 1, 0.0, 0.5) == pytest.approx(math.log(0.5 / 1e-6))
    assert log_share_ratio(0, 1, 0.5, 1.0) == pytest.approx(math.log(1e-6 / 0.5), rel=1e-6)
    assert log_share_ratio(1, 1, 0.5, 2.0) == pytest.approx(math.log(2), rel=1e-5)
    assert log_share_ratio(3, 9, 0.4, 0.2) == 0.0, "what is usual is never taken to be above what is worse"


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert wilson(0, 0) == wilson(3, -1) == (0.0, 1.0)
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    assert wilson(1, 10, 1.0) == pytest.approx((0.03887, 0.23385), abs=1e-5)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27754), abs=1e-5) and wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(0, 10)[0] >= 0.0 and wilson(10, 10)[1] <= 1.0 and wilson(10.5, 10)[1] == 1.0
    assert wilson(0.5, 1) == pytest.approx((0.05462, 0.94538), abs=1e-5)
    assert wilson(-0.1, 10)[0] == 0.0


def test_no_client_gives_more_than_its_share_of_the_evidence() -> None:
    assert against([9.0, 1.0, -0.5], 6.0, 0.5) == 3.5
    assert against([-90.0, 1.0], 6.0, 0.5) == pytest.approx(-3 - math.log(2) + 1)
    assert against([9.0], 6.0, 0.5) == 3.0 and against([-9.0], 6.0, 0.5) == -3.0
    assert against([9.0, -90.0], 6.0, 1.0) == -81.0 and against([], 6.0, 0.5) == 0.0
    assert against([0.9, 0.9], 6.0, 0.1) == pytest.approx(1.2)
