"""`headrace bench all`: every benchmark that there is, every figure in one table, and one that fails stops no other."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from infra.cli.bench.all import USES, BenchUse, command_of, in_order, run
from infra.cli.bench.beside import Beside
from infra.cli.bench.ends import BenchEnd, as_figures, read_ends, with_end, write_ends
from infra.cli.bench.growth.growth import GrowthLine, GrowthPoint
from infra.cli.bench.learner.families import Family
from infra.cli.bench.learning.gate import Figures as GateFigures
from infra.cli.bench.looking import console as bench_console
from infra.cli.bench.looking.console_load import RunInterval, Watching, figures_of
from infra.cli.bench.looking.looking import PageViews
from infra.cli.bench.records import codec
from infra.cli.bench.rows import BenchRow, rows_of, rows_without
from infra.cli.bench.tables import all_table
from infra.cli.bench.targets import TARGETS
from infra.cli.commands import measure
from infra.cli.main import bench_app
from schemas.errors import ConfigError

HOP = [
    Beside(case="verify", name="headrace", cpu_us=(200.0, 220.0), wall_us=(1.0, 1.0)),
    Beside(case="verify", name="loop", cpu_us=(100.0, 90.0), wall_us=(1.0, 1.0), times=(0.5, 0.4), target=1.0),
]
LEARNER = {"shapes": [{"shape": "one row", "faster": 1.1, "headrace": {"cpu_s_min": 2.0}, "plain": {"cpu_s_min": 2.2}}]}
DELTA = {"full_over_delta": 120.0, "bit_exact": 1.0, "encode_ms": 3.0}


def _printing(printed: dict[str, object]) -> Callable[[str, Sequence[str]], list[str]]:
    """Commands that say something, print JSON, and fail where there is none."""
    said = "import sys; print('working', file=sys.stderr); print(sys.argv[1]) if sys.argv[1] else sys.exit('no disk')"

    def command(name: str, options: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", said, json.dumps(printed[name]) if printed[name] else "", *options]

    return command


def test_a_benchmark_that_fails_is_one_line_and_the_rest_goes_on() -> None:
    printed = {"hop": msgspec.to_builtins(HOP), "transport": None, "delta": DELTA, "learner": LEARNER}
    said: list[str] = []
    found = run(list(printed), said.append, command=_printing(printed))
    assert [(one.bench, one.why) for one in found if one.why] == [("transport", "exit code 1: no disk")]
    assert [line for line in said if "failed" in line] == [
        "bench transport failed after 0.0 minutes: exit code 1: no disk"
    ]
    assert said.count("  working") == 4 and said[0] == "bench hop (1 of 4) begins: 30 minutes at most"
    rows = [row for one in found for row in one.rows]
    assert rows[0] == BenchRow("hop", "verify, loop", 0.5, ours=200.0, peer=100.0, low=1.0)
    assert [(one.bench, one.what, one.verdict) for one in rows[1:]] == [
        ("transport", "", "not run"),
        ("delta", "full_over_delta", "met"), ("delta", "bit_exact", "met"), ("learner", "one row", "met"),
    ]  # fmt: skip
    assert rows[0].verdict == "missed" and rows[1].why == "exit code 1: no disk"


def test_each_has_a_time_of_its_own_and_the_rest_goes_on_when_it_is_over() -> None:
    sleeps = "import sys, time; print('asleep', file=sys.stderr, flush=True); time.sleep(600)"
    said: list[str] = []
    found = run(
        ["stream", "delta"],
        said.append,
        command=lambda name, options: (
            [sys.executable, "-c", sleeps] if name == "stream" else _printing({"delta": DELTA})(name, options)
        ),
        uses={"stream": BenchUse(minutes=0.02)},
    )
    assert [one.why for one in found] == ["not done after 0.02 minutes: asleep", ""]
    assert [row.verdict for row in found[0].rows] == ["not run"] * len(TARGETS["stream"])


def test_what_is_left_behind_with_the_pipe_open_keeps_nobody_waiting() -> None:
    leaves = (
        "import os, sys, time\n"
        "if not os.fork():\n"
        "    os.setsid(); time.sleep(8); os._exit(0)\n"
        'print(\'{"full_over_delta": 120.0, "bit_exact": 1.0}\')'
    )
    begin_s = time.monotonic()
    (found,) = run(["delta"], lambda line: None, command=lambda name, options: [sys.executable, "-c", leaves])
    assert not found.why and len(found.rows) == 2
    assert time.monotonic() - begin_s < 60.0, "it waited for the process that was left"


def test_of_a_first_look_sizes_are_small_and_what_takes_long_is_named() -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []
    said: list[str] = []

    def command(name: str, options: Sequence[str]) -> list[str]:
        asked.append((name, tuple(options)))
        return _printing({"delta": DELTA, "hop": msgspec.to_builtins(HOP)})(name, options)

    uses = {"delta": BenchUse(), "hop": BenchUse(quick=("--repeat", "1")), "mix": BenchUse(quick=None)}
    found = run(["delta", "hop", "mix"], said.append, quick=True, command=command, uses=uses)
    assert asked == [("delta", ()), ("hop", ("--repeat", "1"))]
    assert said[0] == "bench delta (1 of 3) begins: 5 minutes at most"
    assert said[-1] == "bench mix (3 of 3) is not run: left out of a first look"
    assert [one.is_run for one in found] == [True, True, False]
    assert [row.verdict for row in found[2].rows] == ["not run"] * len(TARGETS["mix"])


def test_a_peer_that_is_missing_is_a_row_that_was_not_run() -> None:
    said = ["draw: cpprb is left out: no cpprb (`make bench-deps`)", "transport: Redis streams are left out: no redis"]
    rows = rows_of("delta", DELTA, [*said, "working", "delta: 5 rounds"])
    assert [(one.what, one.why) for one in rows[-2:]] == [
        ("cpprb", "no cpprb (`make bench-deps`)"),
        ("Redis streams", "no redis"),
    ]
    assert [one.verdict for one in rows] == ["met", "met", "not run", "not run"]


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
    rows = [row for one in run(list(printed), lambda line: None, command=_printing(printed)) for row in one.rows]
    assert rows == [
        BenchRow("gateway-peers", "model, vLLM", 2.0, ours=2.0, peer=4.0),
        BenchRow("gateway-peers", "model, vLLM, wall", 1.5, ours=2.0, peer=3.0, low=1.0),
        BenchRow("growth", "audit: exponent", 1.5, high=1.1),
    ]
    assert [one.verdict for one in rows] == ["", "met", "missed"]


def test_families_and_rows_of_the_gate_have_their_limits() -> None:
    families = [Family("llama", "packed", gradient=1e-6, engine=2e-4), Family("odd", refused="no")]
    rows = rows_of("families", msgspec.to_builtins(families))
    assert [(one.verdict, one.why) for one in rows] == [("missed", ""), ("not run", "refused: no")]
    gate = [
        GateFigures("trial", "better", False, 100, 0.02, 0.01, 0.9, 0.0, 10.0, True),
        GateFigures("trial", "worse", True, 100, 0.7, 0.01, 0.3, 0.0, 10.0, False),
        GateFigures("trial", "not promised", True, 100, 0.7, 0.01, 0.3, 0.0, 10.0, None),
    ]
    assert [one.verdict for one in rows_of("gate", msgspec.to_builtins(gate))] == ["met", "missed", ""]


def test_a_benchmark_that_prints_something_else_is_one_line_too() -> None:
    printed: dict[str, object] = {"hop": [{"a": 1}], "delta": DELTA}
    found = run(["hop", "delta"], lambda line: None, command=_printing(printed))
    assert [bool(one.why) for one in found] == [True, False] and len(found[1].rows) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_runs_ends_with_the_command(number: int) -> None:
    script = """
import sys
from infra.cli.bench.all import run
bench = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(600)"
say = lambda line: print(line, flush=True)
run(["delta"], say, command=lambda name, options: [sys.executable, "-c", bench])
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
    rows = rows_of("codec", {"16 x (200 + 500)": shape})
    assert [one.low for one in rows] == list(codec.TARGETS.values())
    short = rows_of("codec", dict.fromkeys(codec.SHORT, shape))
    assert short and not [one for one in short if "lists" in one.what], (
        "lists are aimed at from 16 answers of 500 tokens on"
    )
    assert set(codec.SHORT) < set(codec.SHAPES)


@pytest.mark.full
def test_the_console_has_a_row_for_every_target() -> None:
    figures = bench_console.run(experiences=1024, looks=1)
    assert all(one.value is not None for one in rows_of("console", figures))


def test_people_at_the_console_have_a_row_for_every_target() -> None:
    pieces = [
        RunInterval(is_watched, at * 10_000, (at + 1) * 10_000) for at, is_watched in enumerate((False, True) * 2)
    ]
    watching = Watching(busy_s=20.0, calm_s=20.0, seen=PageViews(took_ms=[1.0, 2.0]))
    rows = rows_of("console-load", figures_of(pieces, [*range(0, 40_000, 900)], watching, people=10))
    assert [one.what for one in rows if one.value is not None] == list(TARGETS["console-load"])


def test_the_table_shows_what_was_aimed_at_what_was_seen_and_whether_it_is_met() -> None:
    rows = (
        BenchRow("hop", "verify, loop", 0.5, ours=200.0, peer=100.0, low=1.0),
        BenchRow("hop", "verify, other", 2.0, ours=200.0, peer=400.0),
        BenchRow("hop", "verify, third", low=1.0, why="it is not installed"),
    )
    failed = BenchEnd("lora", tuple(rows_without("lora", "no disk")), why="no disk", took_s=12.0)
    console = Console(file=io.StringIO(), width=190)
    console.print(all_table([BenchEnd("hop", rows, took_s=180.0, at="2026-11-25 21:40"), failed]))
    assert isinstance(console.file, io.StringIO)
    lines = {line: line.split("│") for line in console.file.getvalue().splitlines()}

    def shown(what: str) -> list[str]:
        return [cell.strip() for line, cells in lines.items() if what in line for cell in cells[2:-1]]

    assert shown("verify, loop") == [
        "verify, loop",
        "200",
        "100",
        "at least 1",
        "0.5",
        "missed",
        "3.0",
        "2026-11-25 21:40",
    ]
    assert shown("verify, other") == ["verify, other", "200", "400", "", "2", "", "", ""]
    assert shown("verify, third")[-5:] == ["at least 1", "", "not run: it is not installed", "", ""]
    assert shown("share") == ["share", "", "", "at most 0.01", "", "not run: no disk", "0.2", ""]


def test_as_json_every_row_has_its_verdict_and_no_number_is_infinite() -> None:
    rows = (BenchRow("hop", "loop", 0.5, low=1.0), BenchRow("hop", "other", why="missing"))
    end = BenchEnd("hop", rows, took_s=2.0, at="2026-11-25 21:40", load=6.5, options=("--repeat", "1"))
    figures = json.loads(json.dumps(as_figures([end]), allow_nan=False))
    assert [(one["verdict"], one["low"], one["high"]) for one in figures["rows"]] == [
        ("missed", 1.0, None),
        ("not run", None, None),
    ]
    assert figures["benches"] == [
        {
            "bench": "hop", "took_s": 2.0, "is_run": True, "why": "", "at": "2026-11-25 21:40", "load": 6.5,
            "options": ["--repeat", "1"],
        }
    ]  # fmt: skip


def test_what_a_run_leaves_out_keeps_its_figures_and_their_date(tmp_path: Path) -> None:
    file = tmp_path / "bench" / "all.json"
    assert read_ends(file, ("hop",)) == []
    hop = BenchEnd("hop", (BenchRow("hop", "loop", 0.5, low=1.0), BenchRow("hop", "all", 0.5)), at="2026-11-25 21:40")
    lora = BenchEnd("lora", (BenchRow("lora", "share", 0.007, high=0.01),), at="2026-11-25 21:50", load=6.5)
    write_ends(file, [hop, lora])
    assert read_ends(file, ("hop", "lora")) == [hop, lora]
    assert read_ends(file, ("lora",)) == [lora], "a benchmark that is none any more is passed over"
    left_out = BenchEnd("hop", tuple(rows_without("hop", "left out")), why="left out", is_run=False)
    assert with_end([hop, lora], left_out) == [hop, lora] and with_end([lora], left_out) == [lora, left_out]
    failed = BenchEnd("hop", tuple(rows_without("hop", "no disk")), why="no disk", at="2026-11-26 08:00")
    assert with_end([hop, lora], failed) == [lora, failed]
    file.write_text('{"rows": []}')
    with pytest.raises(ConfigError, match=r"all\.json: got what `headrace bench all` does not write"):
        read_ends(file, ("hop",))


def test_every_benchmark_that_is_declared_is_run_those_that_take_least_first(
    tmp_path: Path,
) -> None:
    declared = {one.name for one in bench_app.registered_commands} - {"all"}
    assert set(measure.commands()) - {"all"} == declared and set(USES) <= declared
    ordered = in_order(declared)
    assert set(ordered) == declared and ordered.index("codec") < ordered.index("hop") < ordered.index("mix")
    assert command_of("hop", ("--repeat", "1"))[-5:] == ["bench", "hop", "--repeat", "1", "--json"]


@pytest.mark.parametrize("name", sorted(USES))
def test_options_of_a_first_look_are_options_of_the_benchmark(name: str) -> None:
    bench = measure.commands()[name]
    known = {f"--{parameter.replace('_', '-')}" for parameter in bench.__annotations__} | {"--no-model"}
    use = USES[name]
    assert {one for one in (*use.asked, *(use.quick or ())) if one.startswith("--")} <= known
