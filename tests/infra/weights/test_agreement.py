"""The bound on what two programs may differ by: what it claims where its assumptions hold, and what becomes of it where not."""

import math

import numpy as np
import pytest

from infra.policies.agreement import (
    DRIFT,
    FLOOR_TOKENS,
    LARGEST,
    SPREAD,
    Agreement,
    agreement,
    bounds,
    disagreement,
    joined,
)

NOISE = 0.02  # nats at surprise 0, above what a floor may at least be


def reading(random: np.random.Generator, noise: float, *, tokens: int = 63, rows: int = 4) -> tuple[list, list]:
    """A reading of `rows` sequences and one that is off by half-normal e."""
    theirs = -random.exponential(3.0, (rows, tokens))
    ours = theirs + noise * random.normal(size=theirs.shape) * (1 - theirs)
    return ours.tolist(), theirs.tolist()


def refused(random: np.random.Generator, floor: Agreement, noise: float, trials: int = 300) -> float:
    found = [agreement(*reading(random, noise)) for _ in range(trials)]
    return sum(bool(disagreement(one, floor, "bfloat16")) for one in found) / trials


def floors(random: np.random.Generator, count: int) -> list[Agreement]:
    return [agreement(*reading(random, NOISE, rows=FLOOR_TOKENS // 63 + 1)) for _ in range(count)]


def test_where_the_assumptions_hold_no_honest_version_is_refused_also_after_the_drift_that_is_allowed() -> None:
    random = np.random.default_rng(0)
    for scale in (1 / DRIFT, 1.0, DRIFT):
        assert max(refused(random, floor, scale * NOISE) for floor in floors(random, 10)) == 0.0


def test_versions_whose_noise_varies_as_much_as_is_assumed_are_not_refused() -> None:
    """All tokens of a version share a factor; with what single tokens add, the spread is what assumption 2 allows."""
    random = np.random.default_rng(5)
    shared = math.sqrt(SPREAD**2 - 1) / math.sqrt(252)
    (floor,) = floors(random, 1)
    found = [agreement(*reading(random, NOISE * math.exp(shared * random.normal()))) for _ in range(3000)]
    assert sum(bool(disagreement(one, floor, "bfloat16")) for one in found) <= 1


def test_a_fault_of_a_tenth_of_the_tokens_is_told_by_the_percentile() -> None:
    random = np.random.default_rng(2)
    (floor,) = floors(random, 1)
    for _ in range(50):
        ours, theirs = (np.array(one) for one in reading(random, NOISE))
        ours[:, ::10] += 1.0 - theirs[:, ::10]  # one nat per nat
        assert disagreement(agreement(ours.tolist(), theirs.tolist()), floor, "bfloat16")


def test_unlikely_tokens_do_not_decide() -> None:
    likely, unlikely = [[-0.1] * 20], [[-19.0] * 20]
    off = 0.2
    assert agreement([[-0.1 + off] * 20], likely).mean == pytest.approx(off / 1.1)
    assert agreement([[-19.0 + off] * 20], unlikely).mean == pytest.approx(off / 20)


def test_float32_is_bounded_by_its_largest_difference_alone() -> None:
    most = LARGEST["float32"]
    assert not disagreement(Agreement(10, 9.0, 9.0, most), None, "float32")
    assert "differ by 1.10e-04, expected at most 1e-04" in disagreement(
        Agreement(10, 0.0, 0.0, 1.1 * most), None, "float32"
    )


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_finite_is_refused(odd: float, dtype: str) -> None:
    for ours, theirs in (([[odd, -1.0]], [[-1.0, -1.0]]), ([[-1.0, -1.0]], [[odd, -1.0]])):
        assert disagreement(agreement(ours, theirs), None, dtype)


def test_readings_of_different_lengths_are_an_error_that_says_both() -> None:
    with pytest.raises(ValueError, match=r"got \[1\] logprobs, expected \[2\]"):
        agreement([[-1.0]], [[-1.0, -2.0]])


def test_a_floor_is_made_of_the_first_accepted_tokens_and_then_stays() -> None:
    floor = None
    for _ in range(FLOOR_TOKENS // 128):
        floor = joined(floor, Agreement(128, 0.01, 0.04, 0.1))
    assert floor is not None and floor.tokens == FLOOR_TOKENS and floor.mean == pytest.approx(0.01)
    assert joined(floor, Agreement(128, 0.5, 0.9, 3.0)) == floor


def test_a_floor_of_few_tokens_never_allows_more_than_no_floor_does() -> None:
    assert bounds(4, Agreement(4, 0.05, 0.2, 1.0), "bfloat16") == bounds(4, None, "bfloat16")
