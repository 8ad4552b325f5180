"""The page of all benchmarks: every row, by how much a target is missed, and what bounds it."""

from pathlib import Path

from infra.cli.bench.all import USES
from infra.cli.bench.ends import BenchEnd, write_ends
from infra.cli.bench.limits import LIMITS
from infra.cli.bench.rows import BenchRow
from infra.cli.commands import measure
from infra.cli.docs.benchmarks import page, verdict


def test_the_page_has_every_row_and_what_bounds_those_that_miss(tmp_path: Path) -> None:
    rows = (
        BenchRow("codec", "verify, loop | lists", 0.5, ours=200.0, peer=100.0, low=1.0),
        BenchRow("codec", "verify, Faust", 9.0, ours=200.0, peer=1800.0, low=8.0),
        BenchRow("codec", "Ray", why="no ray"),
    )
    codec = BenchEnd("codec", rows, took_s=90.0, at="2026-11-25 21:40", load=6.5, options=("--repeat", "1"))
    lora = BenchEnd("lora", (BenchRow("lora", "share", low=0.0, high=0.01, why="no disk"),), why="no disk")
    write_ends(tmp_path / "all.json", [lora, codec])
    assert page("# All\n\n", ["codec", "lora", "plan"], tmp_path / "all.json") == (
        "# All\n\nOf 3 targets 1 are met, 1 are missed, 1 are not run.\n"
        "\n## codec\n\n2026-11-25 21:40 UTC, 1.5 minutes, load 6.5 on two cores, with `--repeat 1`. Beside so much other"
        " work its figures of the clock say little.\n\n"
        "| | headrace | peer | target | seen | |\n|---|---|---|---|---|---|\n"
        "| verify, loop \\| lists | 200 | 100 | at least 1 | 0.5 | missed: 0.5 of it |\n"
        "| verify, Faust | 200 | 1,800 | at least 8 | 9 | met |\n"
        "| Ray |  |  |  |  | not run: no ray |\n"
        f"\nWhat bounds it: {LIMITS['codec']}\n"
        "\n## lora\n\nNot measured: no disk.\n"
        f"\n## plan\n\nNot measured: {USES['plan'].why}.\n"
    )


def test_by_how_much_a_target_is_missed() -> None:
    assert verdict(BenchRow("reload", "failed", 3.0, low=0.0, high=0.0)) == "missed"
    assert verdict(BenchRow("delta", "times", 1.0)) == ""


def test_what_bounds_is_said_of_benchmarks_that_there_are() -> None:
    assert set(LIMITS) <= set(measure.commands())
