"""The benchmark of the weights' way runs and compares what arrives; its figures are for `headrace bench weights`."""

from pathlib import Path
from re import fullmatch

import msgspec

from infra.cli.bench.targets import TARGETS
from infra.cli.bench.weights.sweep import sweep
from infra.cli.bench.weights.table import ROWS, rows
from infra.cli.bench.weights.weights import WeightsPlan, run


def test_the_way_of_weights_is_measured_from_the_copy_to_the_engines_file() -> None:
    said: list[str] = []
    found = run(WeightsPlan(gb=0.002), said.append)
    assert TARGETS["weights"].keys() <= found.keys()
    assert found["full_over_delta"] > 20
    noted = [line.partition(":")[0].removeprefix("version ") for line in said if line.startswith("version ")]
    assert noted == [str(version + more) for version in (1, 5, 20, 50) for more in range(3)]


def test_the_worst_figure_of_a_target_decides_whether_it_is_met_and_what_was_not_measured_is_named() -> None:
    figures = {name: 0.5 for name in TARGETS["weights"]}
    found = {"weights": figures | {"trainer_v20_cpu_s_per_gb": 1.2}, "fan-out": {"get_over_one_connection": 7.0}}
    said = {one.target.what: (one.seen, one.is_met) for one in rows(found)}
    assert said["any later version, CPU s per GB to publish"] == (1.2, False)
    assert said["first version of a run, CPU s per GB to publish"] == (0.5, True)
    assert said["throughput over that of one connection"] == (7.0, False)
    assert said["pause p50, ms, rebuilt"] == (None, None)


def test_every_target_of_the_way_of_weights_is_in_a_row() -> None:
    named = {
        name for name in TARGETS["weights"] for row in ROWS if row.bench == "weights" and fullmatch(row.figures, name)
    }
    assert named == TARGETS["weights"].keys()


def test_a_sweep_writes_its_figures_and_a_picture(tmp_path: Path) -> None:
    found = sweep([0.002, 0.001], 0.014, tmp_path, lambda line: None)
    assert list(found) == [0.001, 0.002]
    assert msgspec.json.decode((tmp_path / "weights.json").read_bytes(), type=dict[float, dict[str, float]]) == found
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
