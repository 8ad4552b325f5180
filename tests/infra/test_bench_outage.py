"""A broker that is killed under a gateway and comes back costs no client an answer, and no answer its place in the log."""

import math

import pytest

from infra.cli.bench.serving.outage import run

pytestmark = pytest.mark.full


def test_an_outage_fails_no_request_and_loses_no_answer() -> None:
    figures = run(0.1, per_s=10.0, around_s=2.0)
    assert figures["requests_away"] >= 10 and figures["spool_peak_mb"] > 0, "the outage was one"
    assert figures["failed"] == figures["lost"] == figures["stored_of_nobody"] == 0
    assert math.isfinite(figures["drain_s"])
