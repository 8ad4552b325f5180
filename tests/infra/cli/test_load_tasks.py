"""`headrace load tasks`: a data set by its name, and validation of tasks before a run."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from infra.chain.processor import score
from infra.cli.main import app
from schemas import Experience

JUDGED = """
app = "t"
[[score]]
name = "exact"
use = "streams.scores.exact:exact"
[[score]]
name = "sum"
use = "tests.infra.cli.test_load_tasks:even"
"""


@score(version=1, inline=True)
def even(experience: Experience) -> float:
    """A rule that no answer of an odd task can meet."""
    return float(int(experience.answer or 1) % 2 == 0)


def load_tasks(folder: Path, *arguments: str) -> Result:
    (folder / "headrace.toml").write_text(JUDGED)
    arguments = ("load", "tasks", *arguments, "-c", str(folder / "headrace.toml"))
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.mark.parametrize(("answers", "code", "line"), [((2, 4), 0, "2 of 2 tasks"), ((2, 3, None), 1, "1 of 3 tasks")])
def test_validate_says_before_a_run_which_own_answers_the_scores_refuse(
    tmp_path: Path, answers: tuple[int | None, ...], code: int, line: str
) -> None:
    rows = [{"id": f"t{n}", "prompt": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_tasks(tmp_path, str(tmp_path / "tasks.jsonl"), "--validate")
    assert found.exit_code == code, found.output
    assert f"{line}: their own answer gets 1.0 by exact, sum; 0 rows broken" in found.output
    assert ("task t1: its own answer gets sum 0.0" in found.output) == bool(code)
    assert ("task t2 has no answer" in found.output) == bool(code)


def test_tasks_come_from_one_place(tmp_path: Path) -> None:
    found = load_tasks(tmp_path, "tasks.jsonl", "--dataset", "openai/gsm8k")
    assert found.exit_code == 2 and "expected one of a FILE, --dataset owner/name and --use module:name" in found.output


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the package is installed")
def test_a_data_set_without_the_package_is_one_line(tmp_path: Path) -> None:
    found = load_tasks(tmp_path, "--dataset", "openai/gsm8k:main", "--validate")
    assert (found.exit_code, found.output.splitlines()) == (
        2, ['headrace: --dataset: needs the package datasets: pip install "datasets>=4"']
    )  # fmt: skip


def test_a_data_set_is_read_by_name_and_what_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "sums").mkdir()
    rows = [{"question": f"{n}+{n}=", "total": str(2 * n)} for n in range(3)]
    (tmp_path / "sums" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["--dataset", str(tmp_path / "sums"), "--validate", "--map", "prompt=question"]
    found = load_tasks(tmp_path, *named, "--map", "answer=total", "--split", "train")
    assert found.exit_code == 0 and "3 of 3 tasks" in found.output, found.output
    for more, words in (
        (["--map", "answer=gold"], "has no column 'gold', expected one of question, total"),
        (["--split", "dev"], "split 'dev' cannot be had"),
    ):
        found = load_tasks(tmp_path, *named, *more)
        assert found.exit_code == 2 and words in found.output and len(found.output.splitlines()) == 1
    away = load_tasks(tmp_path, "--dataset", "nobody/nothing", "--validate")
    assert away.exit_code == 2 and "nobody/nothing" in away.output and "local cache" in away.output
