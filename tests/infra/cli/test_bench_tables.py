"""`headrace bench`: figures beside their targets."""

import io
import json

import pytest
import typer
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from infra.cli.bench.common.figures import number, words
from infra.cli.bench.found import Found, command, show
from infra.cli.bench.records import codec
from infra.cli.bench.tables import figures_table, shapes_table
from infra.cli.bench.targets import TARGETS


def text(table: Table) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_codecs_shapes_stand_side_by_side_with_targets() -> None:
    figures = codec.measure(2, 6, 5, rounds=1, budget_s=0.0)
    shown = text(shapes_table("codec", codec.rows({"2 x (6 + 5)": figures, "again": figures})))
    row = next(line for line in shown.splitlines() if "round_trip_over_packed" in line)
    assert "target 1" in row and row.count(f"{figures['round_trip_over_packed']:,.2f}") >= 2
    assert "2 x (6 + 5)" in shown and "again" in shown


def test_a_figure_with_a_target_shows_it() -> None:
    shown = text(figures_table("delta", {"full_over_delta": 123.4, "bit_exact": 1.0, "encode_mb_per_s": 57.31}))
    lines = {line.split()[1]: line for line in shown.splitlines() if "│" in line}
    assert "123" in lines["full_over_delta"] and "at least 90" in lines["full_over_delta"]
    assert "57.3" in lines["encode_mb_per_s"] and "at" not in lines["encode_mb_per_s"].replace("encode", "")


def test_targets_read_as_words() -> None:
    assert [words(*one) for one in TARGETS["reload"].values()] == [
        "at most 60", "at most 30", *["at most 200", "0", "at most 0.1", "at most 0.1"] * 2,
    ]  # fmt: skip
    assert [number(value) for value in (1234567.0, 0.01234, 1.0, 99.94)] == ["1,234,567", "0.0123", "1", "99.9"]


def test_a_find_is_json_or_what_a_person_reads_and_its_code_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = Found({"steps": 1.0}), Found({"rows": []}, lambda: ["no rows"], code=1)
    assert show("life", [one, other], as_json=True) == 1
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"steps": 1.0}, {"rows": []}]
    assert show("life", other, as_json=False) == 1 and show("life", one, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "no rows" in shown and "bench life" in shown


def test_a_benchmarks_command_has_its_options_its_help_and_json() -> None:
    def slow(rounds: int = 3) -> Found:
        """How slow."""
        return Found({"rounds": rounds})

    app = typer.Typer()
    app.command()(command("slow", slow))
    printed = CliRunner().invoke(app, ["--rounds", "5", "--json"])
    assert (printed.exit_code, json.loads(printed.stdout)) == (0, {"rounds": 5})
    assert "How slow." in CliRunner().invoke(app, ["--help"]).stdout
