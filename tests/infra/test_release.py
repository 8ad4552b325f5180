"""Which headrace this is."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from typer.testing import CliRunner

from infra.cli.main import app
from infra.observe.release import commit, release
from tests.own_sources import ROOT


def test_the_command_says_its_release_and_its_commit() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert re.fullmatch(rf"headrace {re.escape(release())}( \([0-9a-f]{{12}}(\+changes)?\))?", done.output.strip())


def test_package_chart_and_the_newest_section_of_the_changelog_are_of_one_release() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = yaml.safe_load((ROOT / "infra" / "deploy" / "chart" / "Chart.yaml").read_text(encoding="utf-8"))
    newest = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert {declared, chart["version"], chart["appVersion"], newest} == {release()}


def test_a_checkout_has_a_commit_and_says_where_its_files_are_others(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
    checkout = tmp_path / "checkout"
    for words in (
        ("init", "-q", str(checkout)),
        ("-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"),
    ):
        subprocess.run(["git", *words], check=True)
    (checkout / "file").write_text("1")
    subprocess.run(["git", "-C", str(checkout), "add", "file"], check=True)
    assert re.fullmatch(r"[0-9a-f]{12}\+changes", commit(checkout))
