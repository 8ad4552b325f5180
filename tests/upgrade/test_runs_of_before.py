"""A run that an earlier commit recorded is replayed by this one, to the same bits.

Two models of CPU may compute other bits, so beside a run lie the hashes that its own commit gives it elsewhere, by the CPU.
"""

import json
from pathlib import Path

import pytest

from tests.infra.cli.test_replay_command import call
from trainer.learners.numerics import cpu_model

RUNS = sorted((Path(__file__).parent / "recorded").glob("*.headrace"))
# What commits change, and what the run does not say; every other difference is one of the machine or its packages.
OURS = {"code", "settings", "attention", "cpu_model"}


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_a_run_of_an_earlier_commit_is_replayed_to_the_same_bits(file: Path) -> None:
    """The file is named by the commit whose torch learner made the run: a warm-up on demonstrations, then two lanes."""
    result = call("replay", file, "--verify", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["steps"] == 16 and len(found["checkpoints"]) == 4 and not found["faults"]
    if elsewhere := set(found["differs"]) - OURS:
        pytest.skip(f"bits are not compared: {', '.join(sorted(elsewhere))} differ from the machine of the run")
    if found["equal"]:
        return
    elsewhere_got = json.loads(file.with_suffix(".json").read_text())
    if cpu_model() not in elsewhere_got:
        pytest.skip(f"bits are not compared: its own commit was not run on {cpu_model()}")
    assert [one["got"] for one in found["checkpoints"]] == elsewhere_got[cpu_model()]
