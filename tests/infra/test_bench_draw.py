"""The benchmark of draws: cpprb draws in turn with headrace, and is named where it is missing."""

import sys
from pathlib import Path

import pytest

from infra.cli.bench.learner.draw import cpprb_draws, run

# What of cpprb is asked for, in an environment that has it.
CPPRB = """
import numpy as np

class PrioritizedReplayBuffer:
    def __init__(self, size, columns, alpha):
        assert columns == {{"at": {{"dtype": np.int64}}}} and alpha == 1.0

    def add(self, *, at, priorities):
        self.at, self.chances = at, priorities / priorities.sum()

    def sample(self, count):
        return {{"at": np.random.default_rng(0).choice(self.at, {count}, p=self.chances)[:, None]}}
"""


def _environment(folder: Path, count: str = "count") -> Path:
    """A Python that has a cpprb which draws so many."""
    (folder / "cpprb.py").write_text(CPPRB.format(count=count))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


def test_a_peer_that_is_missing_is_named_and_has_no_figures(tmp_path: Path) -> None:
    said: list[str] = []
    figures = run(num_experiences=640, num_drawn=10, rounds=1, python=tmp_path / "python", say=said.append)
    assert not [name for name in figures if "cpprb" in name]
    assert ["Reverb" in line for line in said] == [True, False]
    assert "cpprb is left out" in said[1] and "make bench-deps" in said[1]


def test_cpprb_draws_in_turn_with_headrace(tmp_path: Path) -> None:
    figures = run(num_experiences=640, num_drawn=30, rounds=3, python=_environment(tmp_path), say=lambda line: None)
    assert 0 < figures["cpprb_ms_min"] <= figures["cpprb_ms_p50"]
    assert figures["cpprb_over_ours"] == figures["cpprb_ms_min"] / figures["beside_cpprb_ms_min"]


def test_a_peer_that_draws_too_few_is_not_timed(tmp_path: Path) -> None:
    with (
        cpprb_draws(_environment(tmp_path, "count - 1"), 640, 50) as draw,
        pytest.raises(RuntimeError, match="cpprb draws what it should not"),
    ):
        draw()
