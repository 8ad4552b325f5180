"""`headrace bench`: figures beside their targets."""

import io

from rich.console import Console
from rich.table import Table

from infra.cli.bench import codec
from infra.cli.benches import TARGETS, figures_table, number, shapes_table, words


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
