"""Every benchmark runs at its smallest size and yields rows."""

import shlex
from pathlib import Path

import pytest

from infra.cli.demo.demo import write_settings
from infra.cli.demo.settings import DemoOptions
from infra.cli.settings import load_settings
from tests.bench import recipes
from tests.bench.__main__ import main, names
from tests.bench.report import Row, read, table

# Smallest options by benchmark; those that need a broker, a server or minutes run in the full suite alone.
QUICK = {
    "codec": "--rounds 1 --budget-s 0 --largest 1",
    "record-bytes": "--small",
    "learner": "--tiny --hidden 128 --layers 1 --repeat 1",
    "overlap": "--steps 3 --seeds 1 --groups 2 --mean 8",
}
FULL = {
    "weights": "--gb 0.01 --versions 2 --engines 2 --steps 3",
    "growth": "--sizes 200,400",
    "old-samples": "--losses dppo --lags 0,1 --seeds 1 --steps 10 --groups 2 --size 4 --warm-steps 3",
    "gateway": "--rounds 1 --answers 16 --streams 8",
    "hop": "--rounds 1 --groups 1 --pending 64 --joins 8",
    "transport": "--rounds 1 --answers 16",
    "start": "--roles master --no-demo",
    "crash": "--intervals 5 --pause-s 2",
    "reload": "--versions 3 --groups 1 --long 1 --modes keep",
    "weight-bugs": "--rooms torch",
}
CASES = [pytest.param(*each, marks=pytest.mark.slow) for each in QUICK.items()]
CASES += [pytest.param(*each, marks=pytest.mark.full) for each in FULL.items()]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_benchmark_runs_at_its_smallest_size(name: str, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, *options.split()])
    assert ended.value.code == 0 and name in capsys.readouterr().out


def test_every_benchmark_has_a_smallest_size_and_every_kept_run_is_of_a_benchmark() -> None:
    assert {*QUICK, *FULL} == {*names()} - {"train", "gate"}, "train takes minutes, gate has tests of its own"
    assert {*read()} - {"gate"} <= {*names()}


def test_a_row_is_met_missed_or_says_why_it_is_not_measured() -> None:
    rows = [Row("a", 1.0, high=2.0), Row("b", 1.0, low=2.0), Row("c", why="no peer"), Row("d", 1.0)]
    assert [row.verdict for row in rows] == ["met", "missed", "not measured: no peer", ""]
    assert table("t", rows).row_count == 4


def test_every_recipe_has_settings_that_load_and_measured_figures_within_its_bounds(tmp_path: Path) -> None:
    assert {*recipes.pages()} == {path.stem for path in recipes.PAGES.glob("*.md")} - {"README"}
    for name, page in recipes.pages().items():
        assert f"--dir {recipes.RUNS}/{name}" in recipes.commands(page) and ".png)" in page
        words = shlex.split(recipes.commands(page).replace("\\\n", " "))
        sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        options = DemoOptions(directory=tmp_path / name, traffic="--traffic" in words, sets=sets)
        load_settings(write_settings(options)).streams()
        figures = recipes.EXPECTED.findall(page)
        assert {"wall_s", "memory_gb"} < {what for what, *_ in figures}
        for what, side, bound, measured in figures:
            assert (float(measured) - float(bound)) * (1 if side == "least" else -1) >= 0, f"{name}: {what}"
    curve = {"accuracy": {"dev": [(5, 0.4), (15, 0.6)]}, "policy_versions": 15, "steps": 14}
    assert [recipes.figure(curve, f"dev {at}") for at in (5, 10, 20)] == [0.4, 0.6, None]
    assert [recipes.figure(curve, name) for name in ("steps", "steps 15", "steps 16")] == [14, 14, None]


def test_an_unknown_name_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2 and "codec" in capsys.readouterr().out
