"""A hundred stops of each role, each ended after another took over: what goes on then changes nothing that counts."""

from collections import Counter

import pytest

from tests.simulator.faults import Mixture
from tests.simulator.run import run_seed

CYCLES = 100
STOPS = 14  # of a run that never loses a request: what goes wrong here, zombies do


@pytest.mark.slow
@pytest.mark.parametrize("role", ["train", "master", "process"])
def test_a_role_that_was_stopped_and_overtaken_adds_nothing_that_is_loaded_trained_or_counted(role: str) -> None:
    seen: Counter[str] = Counter()
    seed = 0
    while seen["goes on overtaken"] < CYCLES:
        outcome = run_seed(seed, mixture=Mixture(stalls=STOPS, focus=role))
        assert not outcome.violations, outcome.words()
        assert outcome.num_trained > 0
        seen.update(outcome.seen)
        seed += 1
    assert role == "process" or seen["FencedOut"] >= CYCLES / 2, f"zombies that noticed nothing: {seen}"
