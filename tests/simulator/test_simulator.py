"""Thousands of small runs of all roles under faults: no seed breaks a promise, and every seed runs the same way again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.faults import Mixture
from tests.simulator.run import run_seed
from tests.simulator.scenario import draw_scenario
from tests.simulator.world import World

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_FAST = 20
NUM_SEEDS = 1_000
# What a thousand seeds must have come across: a fault nobody meets proves nothing.
MUST_BE_SEEN = {
    "dies", "stalls", "goes on", "loses the network", "is asked to stop", "finds an empty disk", "FencedOut", "StoreError",
    "BrokerUnavailable", "issued again", "superseded", "late", "missing at deadline", "Tick", "DeadLetter", "DropMarker",
    "Skip", "Rollback", "EvalResult", "promoted", "held", "pinned", "rolled_back", "/v1/chat/completions 200", "Received",
    "spooled", "reads what somebody else put there", "answers of serve", "answers of canary", "serve there at the end",
    "canary there at the end", "snapshots_written", "snapshots_taken_up", "snapshots_failed",
}  # fmt: skip


@pytest.mark.parametrize("seed", range(NUM_FAST))
def test_no_promise_is_broken(seed: int) -> None:
    outcome = run_seed(seed)
    assert not outcome.violations, outcome.words()
    assert outcome.num_trained > 0 or "Rollback" in outcome.seen, "all that was trained was taken back"


def test_without_faults_everything_is_trained_or_dropped_for_a_reason() -> None:
    outcome = run_seed(1, mixture=Mixture())
    assert not outcome.violations, outcome.words()
    assert outcome.num_trained > 5 and "dies" not in outcome.seen


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace_here_and_in_another_process() -> None:
    here = [run_seed(seed).trace for seed in (3, 3, 4)]
    assert here[0] == here[1] != here[2]
    command = [sys.executable, "-m", "tests.simulator.run", "--seed", "3"]
    environment = {**os.environ, "PYTHONHASHSEED": "17", "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"trace {here[0]}" in said.stdout


def test_a_fault_of_the_simulation_itself_is_a_violation(tmp_path: Path) -> None:
    def broken() -> None:
        raise LookupError("in the broker")

    world = World(draw_scenario(1), Mixture(), tmp_path)
    world.loop.call_later(1.0, broken, context=world.cluster.context)
    world.run()
    assert ["LookupError('in the broker')" in one.what for one in world.watch.violations] == [True]


@pytest.mark.full
def test_no_promise_is_broken_in_a_thousand_seeds() -> None:
    command = [sys.executable, "-m", "tests.simulator.run", "--seeds", f"0:{NUM_SEEDS}", "--jobs", "2", "--go-on"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert said.returncode == 0, said.stdout + said.stderr
    summary = json.loads(said.stdout.splitlines()[-1])
    assert summary["seeds"] == NUM_SEEDS and not summary["failed"]
    assert not MUST_BE_SEEN - summary["seen"].keys()
