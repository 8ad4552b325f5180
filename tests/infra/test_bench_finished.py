"""An interrupted sweep loses nothing and mixes nothing: finished runs are read back, those of other settings refused."""

from pathlib import Path

import msgspec
import pytest

from infra.cli.bench.common.finished import read_finished, write_finished
from schemas.errors import ConfigError

VARIED = ("seeds",)


class Plan(msgspec.Struct, frozen=True):
    seeds: tuple[int, ...] = (0, 1)
    learning_rate: float = 1e-4


class Run(msgspec.Struct, frozen=True):
    seed: int
    accuracy: tuple[tuple[int, float], ...]


def test_finished_runs_are_read_back_whatever_runs_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    assert read_finished(file, Plan(), VARIED, Run) == [] and read_finished(None, Plan(), VARIED, Run) == []
    runs = [Run(0, ((0, 0.5), (10, 2 / 3))), Run(1, ())]
    write_finished(file, Plan(), VARIED, runs)
    assert read_finished(file, Plan(seeds=(0, 1, 2)), VARIED, Run) == runs
    assert [one.name for one in file.parent.iterdir()] == ["bench.json"]


def test_runs_of_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    write_finished(file, Plan(), VARIED, [])
    with pytest.raises(ConfigError, match=r"bench\.json: got runs with other learning_rate, expected the same"):
        read_finished(file, Plan(learning_rate=3e-4), VARIED, Run)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text('[{"seed": 0}]')
    with pytest.raises(ConfigError, match=r"bench\.json: got a file that is not a sweep"):
        read_finished(file, Plan(), VARIED, Run)
