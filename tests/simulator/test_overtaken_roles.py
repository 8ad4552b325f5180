"""A hundred stops of each role, each ended after another took over: what goes on then changes nothing that counts."""

from collections import Counter

import msgspec
import pytest

from tests.simulator.faults import Mixture
from tests.simulator.run import run_seed
from tests.simulator.scenario import draw_scenario

CYCLES = 100
STOPS = 14  # of a run that never loses a request: what goes wrong here, zombies do


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("role", ["train", "master", "serve", "canary"])
def test_customers_get_what_was_decided_as_far_as_it_was_heard_whoever_was_overtaken(role: str) -> None:
    seen: Counter[str] = Counter()
    seed = 0
    while seen["goes on overtaken"] < CYCLES:
        drawn = draw_scenario(seed)
        scenario = msgspec.structs.replace(drawn, num_customers=3, num_suite=2, num_moves=8, num_trials=3)
        outcome = run_seed(seed, mixture=Mixture(stalls=STOPS, focus=role), scenario=scenario)
        assert not outcome.violations, outcome.words()
        seen.update(outcome.seen)
        seed += 1
    assert all(seen[f"answers of {one}"] and seen[f"{one} there at the end"] for one in ("serve", "canary"))
    assert seen["promoted"] and seen["held"] and seen["rolled_back"] and seen["pinned"]
