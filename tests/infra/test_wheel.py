"""What the wheel holds: all that a command refers to, once, and `headrace` beside the packages it re-exports."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from infra.cli.init import EXAMPLES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """What a command of the installed package prints, away from the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_documentation_examples_and_pictures_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names)) and "headrace/__init__.py" in names
    assert not [name for name in names if name.startswith(("infra/sdk", "docs", "tests", "README"))]
    for kind in ("infra/docs/**/*.md", "infra/cli/examples/**/*.*", "infra/cli/**/*.png"):
        found = [path for path in ROOT.glob(kind) if path.suffix != ".pyc"]
        assert found and {path.relative_to(ROOT).as_posix() for path in found} <= set(names)


def test_the_installed_command_finds_its_documentation_and_its_examples(wheel: Path, tmp_path: Path) -> None:
    installed, home = tmp_path / "installed", tmp_path / "home"
    home.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    shown = re.search(r"Documentation: (\S+)", run(installed, home, "-m", "infra.cli.main", "--help"))
    assert shown and Path(shown[1]) == installed / "infra" / "docs" / "README.md" and Path(shown[1]).is_file()
    for example in sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / "headrace.toml").is_file()):
        run(installed, home, "-m", "infra.cli.main", "init", example, "--from", example, "--engine", "torch")
        run(installed, home, "-m", "infra.cli.main", "check", "-c", f"{example}/headrace.toml")
    assert run(installed, home, "-c", "import headrace; print(headrace.__file__)").startswith(str(installed))
