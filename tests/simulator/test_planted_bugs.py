"""Bugs the simulator must find: each is planted alone in a copy of the source, and reported within a few seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.hunt import BUGS, PATCHED, ROOT, place_of, read_bug

NAMES = sorted(path.stem for path in BUGS.glob("*.toml"))
# The twenty classes of bugs that a log between actors and a trainer is prone to; the others are of what was added to it.
TWENTY = {
    "ack_before_send", "attempt_with_same_ids", "buffer_trimmed_too_far", "checkpoint_after_publication",
    "dead_letter_not_confirmed", "deadline_by_wall_clock", "delta_on_wrong_parent", "duplicate_closure",
    "event_before_manifest", "feedback_before_answer", "feedback_to_last_answer", "journal_after_step",
    "manifest_before_shards", "offset_before_state", "drop_marker_not_sent", "rng_left_out", "state_before_outputs",
    "token_missing_in_journal", "token_missing_in_path", "uses_not_in_checkpoint",
}  # fmt: skip


def test_the_twenty_are_planted() -> None:
    assert len(TWENTY) == 20 and set(NAMES) >= TWENTY


@pytest.mark.parametrize("name", NAMES)
def test_the_patch_applies_to_the_source_as_it_is(name: str) -> None:
    assert read_bug(BUGS / f"{name}.toml")["says"]


def test_a_bug_survives_a_move_of_the_code_it_is_planted_in(tmp_path: Path) -> None:
    bug = read_bug(BUGS / "ended_group_brought_back.toml")
    (edit,) = bug["edit"]
    before = place_of(edit, ROOT, "it")
    for top in PATCHED:
        (tmp_path / top).mkdir()
    moved = tmp_path / "streams" / "elsewhere" / f"{before.stem}_of_another_name.py"
    moved.parent.mkdir()
    moved.write_text(before.read_text())
    assert place_of(edit, tmp_path, "it") == moved
    (tmp_path / "schemas" / "copy.py").write_text(before.read_text())
    with pytest.raises(ValueError, match="expected once in one file"):
        place_of(edit, tmp_path, "it")
    with pytest.raises(ValueError, match="found in no file"):
        place_of({"search": "what nobody wrote"}, tmp_path, "it")


@pytest.mark.full
def test_every_planted_bug_is_found_and_the_source_without_it_is_clean() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.simulator.hunt"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert said.returncode == 0, said.stdout + said.stderr
    found = {one["bug"]: one for one in map(json.loads, said.stdout.splitlines())}
    assert sorted(found) == NAMES
    wrong = [one for one in found.values() if one["seed"] < 0 or one["clean"] is not True]
    assert not wrong, said.stderr
