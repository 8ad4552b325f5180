"""Bugs the simulator must find: each is planted alone in a copy of the source, and reported within a few seeds."""

import json
import os
import subprocess
import sys

import pytest

from tests.simulator.hunt import BUGS, ROOT, read_bug

NAMES = sorted(path.stem for path in BUGS.glob("*.toml"))


def test_there_are_twenty() -> None:
    assert len(NAMES) == 20


@pytest.mark.parametrize("name", NAMES)
def test_the_patch_applies_to_the_source_as_it_is(name: str) -> None:
    assert read_bug(BUGS / f"{name}.toml")["says"]


@pytest.mark.slow
def test_every_planted_bug_is_found_and_the_source_without_it_is_clean() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.simulator.hunt"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert said.returncode == 0, said.stdout + said.stderr
    found = {one["bug"]: one for one in map(json.loads, said.stdout.splitlines())}
    assert sorted(found) == NAMES
    wrong = [one for one in found.values() if one["seed"] < 0 or one["clean"] is not True]
    assert not wrong, said.stderr
