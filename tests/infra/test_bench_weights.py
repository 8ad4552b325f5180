"""The benchmark of the weights' way runs and compares what arrives; its figures are for `headrace bench weights`."""

from infra.cli.bench.weights import WeightsPlan, run
from infra.cli.benches import TARGETS


def test_the_way_of_weights_is_measured_from_the_copy_to_the_engines_file() -> None:
    said: list[str] = []
    found = run(WeightsPlan(gb=0.002), said.append)
    assert TARGETS["weights"].keys() <= found.keys()
    assert found["full_over_delta"] > 20
    assert len(said) == 8
