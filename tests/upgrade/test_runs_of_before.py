"""A run that an earlier commit recorded is replayed by this one, to the same bits."""

import json
from pathlib import Path

import pytest

from tests.infra.cli.test_replay_command import call

RUNS = sorted((Path(__file__).parent / "recorded").glob("*.headrace"))
OURS = {
    "code",
    "settings",
    "attention",
}  # what commits change; every other difference is one of the machine or its packages


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_a_run_of_an_earlier_commit_is_replayed_to_the_same_bits(file: Path) -> None:
    """The file is named by the commit whose torch learner made the run: a warm-up on demonstrations, then two lanes."""
    result = call("replay", file, "--verify", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["steps"] == 16 and len(found["checkpoints"]) == 4 and not found["faults"]
    if elsewhere := set(found["differs"]) - OURS:
        pytest.skip(f"bits are not compared: {', '.join(sorted(elsewhere))} differ from the machine of the run")
    assert found["equal"]
