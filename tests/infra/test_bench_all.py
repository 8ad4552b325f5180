"""`headrace bench all`: every figure in one table, and a benchmark that fails stops no other."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from infra.cli.bench import codec
from infra.cli.bench import console as bench_console
from infra.cli.bench.all import BENCHES, BenchRow, command_of, run
from infra.cli.bench.beside import Beside
from infra.cli.bench.console_load import RunInterval, Watching, figures_of
from infra.cli.bench.growth import GrowthLine, GrowthPoint
from infra.cli.bench.looking import PageViews
from infra.cli.bench.tables import all_table
from infra.cli.bench.targets import TARGETS
from infra.cli.main import bench_app

HOP = [
    Beside(case="verify", name="headrace", cpu_us=(200.0, 220.0), wall_us=(1.0, 1.0)),
    Beside(case="verify", name="loop", cpu_us=(100.0, 90.0), wall_us=(1.0, 1.0), times=(0.5, 0.4), target=1.0),
]
LEARNER = {"shapes": [{"shape": "one row", "faster": 1.1, "headrace": {"cpu_s_min": 2.0}, "plain": {"cpu_s_min": 2.2}}]}
DELTA = {"full_over_delta": 120.0, "bit_exact": 1.0, "encode_ms": 3.0}


def _printing(printed: dict[str, object]) -> "dict[str, list[str]]":
    """Commands that say something, print JSON, and fail where there is none."""
    said = "import sys; print('working', file=sys.stderr); print(sys.argv[1]) if sys.argv[1] else sys.exit('no disk')"
    return {name: [sys.executable, "-c", said, json.dumps(one) if one else ""] for name, one in printed.items()}


def test_a_benchmark_that_fails_is_one_line_and_the_rest_goes_on() -> None:
    commands = _printing({"hop": msgspec.to_builtins(HOP), "transport": None, "delta": DELTA, "learner": LEARNER})
    said: list[str] = []
    rows, failures = run(list(commands), said.append, commands.__getitem__)
    assert [(one.bench, one.why) for one in failures] == [("transport", "exit code 1: no disk")]
    assert [line for line in said if "failed" in line] == ["bench transport failed: exit code 1: no disk"]
    assert said.count("  working") == 4 and said[0] == "bench hop (1 of 4)"
    assert rows[0] == BenchRow("hop", "verify, loop", 0.5, ours=200.0, peer=100.0, low=1.0)
    assert [(one.bench, one.what) for one in rows[1:]] == [
        ("delta", "full_over_delta"), ("delta", "bit_exact"), ("learner", "one row"),
    ]  # fmt: skip
    assert [one.is_met for one in rows] == [False, True, True, True]


def test_wall_time_has_a_row_where_it_has_a_target_and_growth_has_its_exponents() -> None:
    vllm = Beside(
        case="model",
        name="vLLM",
        cpu_us=(4.0, 4.0),
        wall_us=(3.0, 3.0),
        times=(2.0, 2.0),
        sooner=(1.5, 1.5),
        sooner_target=1.0,
    )
    ours = Beside(case="model", name="headrace", cpu_us=(2.0, 2.0), wall_us=(2.0, 2.0))
    lines = [GrowthLine("audit", (GrowthPoint("audit", 10, 1.0),), 1.5), GrowthLine("draw", (), None)]
    printed = {"gateway-peers": msgspec.to_builtins([ours, vllm]), "growth": msgspec.to_builtins(lines)}
    rows, failures = run(list(printed), lambda line: None, _printing(printed).__getitem__)
    assert not failures and rows == [
        BenchRow("gateway-peers", "model, vLLM", 2.0, ours=2.0, peer=4.0),
        BenchRow("gateway-peers", "model, vLLM, wall", 1.5, ours=2.0, peer=3.0, low=1.0),
        BenchRow("growth", "audit: exponent", 1.5, high=1.1),
    ]
    assert [one.is_met for one in rows] == [True, True, False]


def test_a_benchmark_that_prints_something_else_is_one_line_too() -> None:
    rows, failures = run(["hop", "delta"], lambda line: None, _printing({"hop": {"a": 1}, "delta": DELTA}).__getitem__)
    assert [one.bench for one in failures] == ["hop"] and len(rows) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_runs_ends_with_the_command(number: int) -> None:
    script = """
import sys
from infra.cli.bench.all import run
bench = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(600)"
run(["delta"], lambda line: print(line, flush=True), lambda name: [sys.executable, "-c", bench])
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("bench delta")
        bench = int(process.stdout.readline())
        process.send_signal(number)
    deadline = time.monotonic() + 30.0
    while Path(f"/proc/{bench}").exists():
        assert time.monotonic() < deadline, "the benchmark runs on"
        time.sleep(0.05)


def test_the_codecs_shapes_have_a_row_for_every_target() -> None:
    shape = codec.measure(2, 4, 8, rounds=1, budget_s=0.0)
    rows, failures = run(["codec"], lambda line: None, _printing({"codec": {"small": shape}}).__getitem__)
    assert not failures and [one.low for one in rows] == list(codec.TARGETS.values())


@pytest.mark.slow
def test_the_console_has_a_row_for_every_target() -> None:
    figures = bench_console.run(experiences=1024, looks=1)
    rows, failures = run(["console"], lambda line: None, _printing({"console": figures}).__getitem__)
    assert not failures and [one.what for one in rows] == list(TARGETS["console"])


def test_people_at_the_console_have_a_row_for_every_target() -> None:
    pieces = [
        RunInterval(is_watched, at * 10_000, (at + 1) * 10_000) for at, is_watched in enumerate((False, True) * 2)
    ]
    watching = Watching(busy_s=20.0, calm_s=20.0, seen=PageViews(took_ms=[1.0, 2.0]))
    figures = figures_of(pieces, [*range(0, 40_000, 900)], watching, people=10)
    rows, failures = run(["console-load"], lambda line: None, _printing({"console-load": figures}).__getitem__)
    assert not failures and [one.what for one in rows] == list(TARGETS["console-load"])


def test_the_table_shows_what_ours_and_the_peer_took() -> None:
    rows = [
        BenchRow("hop", "verify, loop", 0.5, ours=200.0, peer=100.0, low=1.0),
        BenchRow("delta", "bit_exact", 1.0, low=1.0, high=1.0),
        BenchRow("hop", "verify, other", 2.0, ours=200.0, peer=400.0),
    ]
    console = Console(file=io.StringIO(), width=140)
    console.print(all_table(rows))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    first = next(line for line in lines if "verify, loop" in line)
    assert all(one in first for one in ("200", "100", "0.5", "at least 1"))
    assert "at least" not in next(line for line in lines if "verify, other" in line)


def test_every_one_of_them_is_a_command_and_has_targets() -> None:
    commands = {one.name for one in bench_app.registered_commands}
    assert set(BENCHES) <= commands and "all" not in BENCHES
    assert all(name in TARGETS for name, rows in BENCHES.items() if rows.__name__ == "_flat")
    assert command_of("hop")[-3:] == ["bench", "hop", "--json"]
