"""Thousands of small runs of all roles under faults: no seed breaks a promise, and every seed runs the same way again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.faults import Mixture
from tests.simulator.run import run_seed

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_FAST = 20
NUM_SEEDS = 1_000
# What a thousand seeds must have come across: a fault nobody meets proves nothing.
MUST_BE_SEEN = {
    "dies", "stalls", "goes on", "loses the network", "is asked to stop", "finds an empty disk", "FencedOut", "StoreError",
    "BrokerUnavailable", "issued again", "superseded", "late", "missing at deadline", "Tick", "DeadLetter", "Stub",
    "Skip", "Rollback", "EvalResult", "promoted", "held", "pinned", "rolled_back", "/v1/chat/completions 200", "Received",
    "spooled", "reads what somebody else put there",
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


def test_the_same_seed_gives_the_same_trace_here_and_in_another_process() -> None:
    here = [run_seed(seed).trace for seed in (3, 3, 4)]
    assert here[0] == here[1] != here[2]
    command = [sys.executable, "-m", "tests.simulator.run", "--seed", "3"]
    environment = {**os.environ, "PYTHONHASHSEED": "17", "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"trace {here[0]}" in said.stdout


@pytest.mark.slow
def test_no_promise_is_broken_in_a_thousand_seeds() -> None:
    command = [sys.executable, "-m", "tests.simulator.run", "--seeds", f"0:{NUM_SEEDS}", "--jobs", "2", "--go-on"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert said.returncode == 0, said.stdout + said.stderr
    summary = json.loads(said.stdout.splitlines()[-1])
    assert summary["seeds"] == NUM_SEEDS and not summary["failed"]
    assert not MUST_BE_SEEN - summary["seen"].keys()
