"""The benchmark of the weights' way runs and compares what arrives; its figures are for `headrace bench weights`."""

from pathlib import Path

import msgspec
import pytest

from infra.cli.bench.targets import TARGETS
from infra.cli.bench.weights import WeightsPlan, run
from infra.cli.bench.weights_sweep import sweep


@pytest.mark.long
def test_the_way_of_weights_is_measured_from_the_copy_to_the_engines_file() -> None:
    said: list[str] = []
    found = run(WeightsPlan(gb=0.002), said.append)
    assert TARGETS["weights"].keys() <= found.keys()
    assert found["full_over_delta"] > 20
    noted = [line.partition(":")[0].removeprefix("version ") for line in said if line.startswith("version ")]
    assert noted == [str(version + more) for version in (1, 5, 20, 50) for more in range(3)]


@pytest.mark.long
def test_a_sweep_writes_its_figures_and_a_picture(tmp_path: Path) -> None:
    found = sweep([0.002, 0.001], 0.014, tmp_path, lambda line: None)
    assert list(found) == [0.001, 0.002]
    assert msgspec.json.decode((tmp_path / "weights.json").read_bytes(), type=dict[float, dict[str, float]]) == found
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
