"""The learner's benchmark: both steps agree before they are timed, and what a step needs is counted from its shape alone."""

from pathlib import Path

import msgspec
import pytest

from infra.cli.bench.common import peak
from infra.cli.bench.learner import memory
from infra.cli.bench.learner.learner import (
    NEAR,
    BatchShape,
    BenchMachine,
    LearnerBenchPlan,
    ShapeComparison,
    Timed,
    require_near,
    run,
)
from infra.cli.bench.learner.memory_held import MemoryPlan
from infra.cli.bench.tables import learner_table
from infra.model.flops import FORWARD_AND_BACKWARD, TokenCost, peak_tflops, token_cost
from tests.infra.tiny_families import build_family

SMALL = LearnerBenchPlan(hidden=128, layers=1, repeat=2, max_tokens=128, peak=2.0)
SHARED = BatchShape("4 to one prompt", answers=4, prompt=20, sampled=10, shared=True)
ALONE = BatchShape("3 alone", answers=3, prompt=20, sampled=10, shared=False)


def test_the_learner_and_the_plain_step_agree_and_are_timed_on_every_shape() -> None:
    machine, found = run(SMALL, say=lambda text: None, shapes=(SHARED, ALONE))
    assert machine.dtype == "float32" and machine.peak_tflops == 2.0 and machine.parameters_m > 4
    assert [one.positions for one in found] == [20 + 4 * 9, 3 * 29], "the last token of an answer is no input"
    for one in found:
        assert one.loss_apart <= NEAR["float32"][0] and 0 < one.gradient_apart <= NEAR["float32"][1]
        for timed in (one.headrace, one.plain):
            assert 0 < timed.wall_s_min <= timed.wall_s_median and timed.cpu_s_min > 0
            assert timed.mfu == pytest.approx(timed.tflops / 2.0)


def test_steps_in_bfloat16_agree_with_autocast() -> None:
    _, found = run(msgspec.structs.replace(SMALL, dtype="bfloat16", repeat=1), lambda text: None, (SHARED,))
    assert found[0].gradient_apart <= NEAR["bfloat16"][1]


@pytest.mark.parametrize(("loss", "gradient"), [(1e-4, 1e-6), (1e-8, 0.1), (float("nan"), 1e-6), (1e-8, float("nan"))])
def test_steps_that_differ_are_not_timed(loss: float, gradient: float) -> None:
    with pytest.raises(RuntimeError, match="the steps differ: loss by"):
        require_near(loss, gradient, "float32")


def test_arithmetic_is_counted_of_the_weights_that_a_token_meets(tmp_path: Path) -> None:
    dense = token_cost(build_family(tmp_path / "dense", "qwen3"))
    # Hidden 32, 2 layers: queries and output 32 × 128, keys and values 32 × 64, three matrices of 32 × 64.
    assert dense.position == 2 * 2 * (2 * 32 * 128 + 2 * 32 * 64 + 3 * 32 * 64)
    assert dense.pair == 4 * 2 * 4 * 32 and dense.head == 2 * 32 * 128
    sparse = token_cost(build_family(tmp_path / "sparse", "qwen3_moe"))
    # Two of four experts of 3 × 32 × 16 in each layer, and a router of 32 × 4.
    assert sparse.position == 2 * 2 * (2 * 32 * 128 + 2 * 32 * 64 + 2 * 3 * 32 * 16 + 32 * 4)
    assert TokenCost(1.0, 10.0, 100.0).step(2, 3, 4) == FORWARD_AND_BACKWARD * (2 + 30 + 400)


def test_a_card_is_known_by_the_beginning_of_its_name() -> None:
    known = {"NVIDIA H100 PCIe": 756.0, "NVIDIA H200": 989.5, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA L4": 121.0}
    assert {name: peak_tflops(name) for name in (*known, "NVIDIA L40S")} == known | {"NVIDIA L40S": 362.0}
    assert peak_tflops("cpu") == 0.0


def test_the_peak_of_some_work_is_what_it_held_at_once() -> None:
    held = peak.peak_bytes(lambda: [bytearray(2**20) for _ in range(64)] and None, "cpu")
    assert 60 * 2**20 < held < 100 * 2**20
    assert peak.most_bytes() >= held


def test_what_a_learner_holds_is_measured_beside_what_is_said_of_it() -> None:
    found = memory.run(MemoryPlan(hidden=256, layers=1))
    assert found["with_versions_mb"] > found["step_mb"] > 18 * found["parameters_m"], (
        "weights, masters, moments, gradients"
    )
    assert found["with_versions_said_mb"] - found["step_said_mb"] == pytest.approx(16 * found["parameters_m"])
    assert found["step_said_over_held"] == pytest.approx(found["step_said_mb"] / found["step_mb"])


@pytest.mark.full
def test_what_a_rank_of_zero_3_holds_is_said_within_a_seventh() -> None:
    pytest.importorskip("deepspeed")
    found = memory.run(MemoryPlan(layers=3, ranks=2, stage=3))
    assert found["parameters_m"] > 40
    for figure in ("step_said_over_held", "with_versions_said_over_held"):
        assert 6 / 7 < found[figure] < 8 / 7, found


def test_the_table_shows_mfu_only_where_the_peak_is_known() -> None:
    timed = Timed(1.0, 1.1, 1.2, 1.3, 400.0, 0.05, None, 100.0)
    known = msgspec.structs.replace(timed, mfu=0.41)
    table = learner_table([ShapeComparison("one", 10, 0.0, 0.0, known, timed, 1.5)])
    assert table.row_count == 2 and list(table.columns[6].cells) == ["41.0%", ""]
    assert BenchMachine("cpu", 26.0, "float32", 0.0).peak_tflops == 0.0
