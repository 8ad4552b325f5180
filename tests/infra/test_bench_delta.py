"""The delta benchmark runs and its check of exactness holds; its numbers are for `headrace bench delta`."""

import pytest

from infra.cli.bench.weights.delta import run


@pytest.mark.full
def test_every_benchmarked_delta_is_bit_exact() -> None:
    report = run(training_steps=3, settling_steps=1, measured_steps=2)
    assert report["bit_exact"] == 1.0
    assert report["full_bytes"] == 2 * 886_144
    assert report["delta_bytes"] < report["full_bytes"]
