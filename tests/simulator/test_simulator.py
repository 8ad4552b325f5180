"""Thousands of small runs of all roles under faults: no seed breaks a promise, and every seed runs the same way again."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tests.own_sources import ROOT
from tests.simulator.faults import Mixture
from tests.simulator.run import run_seed
from tests.simulator.scenario import draw_scenario
from tests.simulator.virtual_loop import Process, VirtualLoop
from tests.simulator.world import World

NUM_FAST = 20
NUM_SEEDS = 1_000
# Events that a thousand seeds must have met: a fault that never happens proves nothing.
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
    assert ["LookupError('in the broker')" in violation.what for violation in world.watch.violations] == [True]


@pytest.mark.full
def test_no_promise_is_broken_in_a_thousand_seeds() -> None:
    command = [sys.executable, "-m", "tests.simulator.run", "--seeds", f"0:{NUM_SEEDS}", "--jobs", "2", "--go-on"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert said.returncode == 0, said.stdout + said.stderr
    summary = json.loads(said.stdout.splitlines()[-1])
    assert summary["seeds"] == NUM_SEEDS and not summary["failed"]
    assert not MUST_BE_SEEN - summary["seen"].keys()


CYCLES = 100
STOPS = 14  # stalls of a run that never loses a request: zombies are its only fault


def overtaken(role: str, **fields: object) -> Counter[str]:
    """Counts of events in runs until a role has gone on overtaken CYCLES times. fields: of the scenario."""
    seen: Counter[str] = Counter()
    for seed in count():
        scenario = msgspec.structs.replace(draw_scenario(seed), **fields)
        outcome = run_seed(seed, mixture=Mixture(stalls=STOPS, focus=role), scenario=scenario)
        assert not outcome.violations, outcome.words()
        assert fields or outcome.num_trained > 0
        seen.update(outcome.seen)
        if seen["goes on overtaken"] >= CYCLES:
            break
    return seen


@pytest.mark.full
@pytest.mark.parametrize("role", ["train", "master", "process"])
def test_a_role_that_was_stopped_and_overtaken_adds_nothing_that_is_loaded_trained_or_counted(role: str) -> None:
    seen = overtaken(role)
    assert role == "process" or seen["FencedOut"] >= CYCLES / 2, f"zombies that noticed nothing: {seen}"


@pytest.mark.full
@pytest.mark.parametrize("role", ["train", "master", "serve", "canary"])
def test_customers_get_what_was_decided_as_far_as_it_was_heard_whoever_was_overtaken(role: str) -> None:
    seen = overtaken(role, num_customers=3, num_suite=2, num_moves=8, num_trials=3)
    assert all(seen[f"answers of {item}"] and seen[f"{item} there at the end"] for item in ("serve", "canary"))
    assert seen["promoted"] and seen["held"] and seen["rolled_back"] and seen["pinned"]


BUGS = Path(__file__).parent / "bugs"
NAMES = sorted(path.stem for path in BUGS.glob("*.toml"))
PATCHED = ("schemas", "infra", "streams", "actors", "trainer")
MAX_SEEDS = 80


def read_bug(name: str) -> dict[str, Any]:
    return tomllib.loads((BUGS / f"{name}.toml").read_text())


def place_of(edit: dict[str, str], source: Path) -> Path:
    """The file of an edit: the one that holds the text that it replaces, and `beside` where it names that."""
    search, beside = edit["search"].removeprefix("\n"), edit.get("beside", "")
    texts = {path: path.read_text() for top in PATCHED for path in (source / top).rglob("*.py")}
    found = {path: count for path, text in texts.items() if (count := text.count(search)) and beside in text}
    assert sum(found.values()) == 1, f"found in {found or 'no file'}, expected once in one file:\n{search}"
    return next(iter(found))


def planted(bug: dict[str, Any], folder: Path) -> Path:
    """A copy of the source with the bug in it. The bytecode comes along: only edited files are compiled again."""
    for name in (*PATCHED, "tests/simulator"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("docs", "pictures"))
    for name in ("tests/__init__.py", "tests/role.py"):
        shutil.copy(ROOT / name, folder / name)
    places = [place_of(edit, folder) for edit in bug["edit"]]
    for edit, path in zip(bug["edit"], places, strict=True):
        path.write_text(path.read_text().replace(edit["search"].removeprefix("\n"), edit["replace"].removeprefix("\n")))
    return folder


def first_failed(source: Path, bug: dict[str, Any], seeds: int) -> list[int]:
    """The first of the seeds that finds a violation in this source, by the fields that the bug asks for."""
    fields = [word for name in ("mixture", "scenario") for word in (f"--{name}", json.dumps(bug.get(name, {})))]
    command = [sys.executable, "-m", "tests.simulator.run", "--seeds", f"0:{seeds}", *fields]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    said = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=900)
    assert said.stdout, said.stderr
    return list(json.loads(said.stdout.splitlines()[-1])["failed"])


@pytest.mark.parametrize("name", NAMES)
def test_the_patch_applies_to_the_source_as_it_is(name: str) -> None:
    assert all(place_of(edit, ROOT) for edit in read_bug(name)["edit"])


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_bug_is_found_and_the_source_without_it_is_clean(name: str, tmp_path: Path) -> None:
    bug = read_bug(name)
    (seed,) = first_failed(planted(bug, tmp_path), bug, MAX_SEEDS)
    assert first_failed(ROOT, bug, seed + 1) == []


def test_processes_are_shuffled_and_each_keeps_its_order() -> None:
    orders = set()
    for seed in range(20):
        loop, ran = VirtualLoop(Random(seed)), []
        contexts = [Process(name).context for name in "ab"]

        async def main(loop: VirtualLoop, ran: list, contexts: list) -> None:  # type: ignore[type-arg]
            for number in range(2):
                for index, context in enumerate(contexts):
                    loop.call_soon(ran.append, (index, number), context=context)
            await asyncio.sleep(1)

        loop.run_until_complete(main(loop, ran, contexts))
        assert [item for item in ran if item[0] == 0] == [(0, 0), (0, 1)]
        orders.add(tuple(ran))
    assert len(orders) > 2
