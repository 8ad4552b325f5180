"""The benchmark of growth: exponents of what was measured, and a point that would take too long is named."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from infra.cli.bench.growth.growth import LINEAR, GrowthLine, GrowthPoint, exponent, lines_of, run
from infra.cli.bench.tables import growth_table


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_an_exponent_is_that_of_the_cost(power: float) -> None:
    points = [GrowthPoint("master", size, 1e-2 * (size / 10) ** power) for size in (10, 100, 1000)]
    assert exponent(points) == pytest.approx(power)
    assert GrowthLine("master", tuple(points), exponent(points)).is_met == (power <= LINEAR)


def test_of_noise_nothing_is_said() -> None:
    assert exponent([GrowthPoint("a", 10, 1e-6), GrowthPoint("a", 100, 1.0)]) is None
    assert GrowthLine("a", (), None).is_met is None


def test_a_point_that_was_left_out_is_one_of_every_line_of_its_work_and_of_no_exponent() -> None:
    points = [
        GrowthPoint("audit", 100, 1.0, 5.0), GrowthPoint("trace", 100, 2.0, 5.0),
        GrowthPoint("audit", 1000, 10.0, 6.0), GrowthPoint("trace", 1000, 20.0, 6.0),
        GrowthPoint("audit", 10_000, work="audit", why="about 9 minutes"),
        GrowthPoint("trace", 10_000, work="audit", why="about 9 minutes"),
    ]  # fmt: skip
    lines = lines_of(points)
    assert [(one.what, round(one.exponent or 0, 6), len(one.points)) for one in lines] == [
        ("audit", 1.0, 3), ("trace", 1.0, 3),
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=140)
    console.print(growth_table(lines))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.count("left out: about 9 minutes") == 2 and "1.00" in shown and "10, 6" in shown


def test_everything_is_measured_and_drawn_and_what_would_take_too_long_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    lines = run((200, 400, 10**12), tmp_path, said.append, limit_s=600.0)
    assert {one.what.partition(",")[0] for one in lines} == {
        "master", "readers", "collect", "audit", "trace", "buffer", "uses",
    }  # fmt: skip
    for one in lines:
        *measured, left_out = one.points
        assert [point.size for point in measured] == [200, 400] and all(point.cpu_s > 0 for point in measured)
        assert "minutes" in left_out.why and not left_out.cpu_s
    assert sum("is left out: it would take about" in line for line in said) == 7
    assert len(json.loads((tmp_path / "growth.json").read_bytes())) == len(lines)
    assert (tmp_path / "growth.png").stat().st_size > 1000


def test_one_thing_that_grows_can_be_measured_alone(tmp_path: Path) -> None:
    lines = run((200,), tmp_path, lambda line: None, only=("trace",))
    assert [one.what for one in lines] == ["trace, index", "trace, a question"]


def test_what_was_measured_is_kept_when_it_is_ended_before_the_end(tmp_path: Path) -> None:
    def say(line: str) -> None:
        if "400" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run((200, 400, 800), tmp_path, say, only=("uses",))
    kept = json.loads((tmp_path / "growth.json").read_bytes())
    assert {len(one["points"]) for one in kept} == {2}
