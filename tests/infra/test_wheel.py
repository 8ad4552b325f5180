"""What the wheel holds: one name for site-packages, and below it all that a command refers to, once."""

import json
import os
import re
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from headrace_wheel import PACKAGES, renamed
from infra.cli.demo.init import EXAMPLES
from trainer.journal.origin import ROOTS, Definition, code_hash

ROOT = Path(__file__).resolve().parents[2]
LEARNER = Definition("trainer.learners.torch", "TorchLearner")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was unpacked in."""
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names))
        archive.extractall(folder / "installed")
    return folder / "installed"


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """What Python prints with the installed package and libraries, and no checkout on its path."""
    found = os.pathsep.join((str(installed), *site.getsitepackages()))
    environment = {**os.environ, "PYTHONPATH": found, "COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-P", "-S", *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_names_of_modules_get_the_prefix_and_nothing_else_does() -> None:
    source = 'from infra.log import log  # of infra.log\nargv = ("-m", "infra.cli.main", "trainer.lanes", "infra")\n'
    assert renamed(source.encode(), ROOT).decode() == (
        "from headrace.infra.log import log  # of infra.log\n"
        'argv = ("-m", "headrace.infra.cli.main", "trainer.lanes", "infra")\n'
    )
    with pytest.raises(ValueError, match=r"got `import infra.log.log`, expected `from … import …`"):
        renamed(b"import infra.log.log\n", ROOT)


@pytest.mark.full
def test_the_wheel_puts_one_name_into_site_packages(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"headrace"}


@pytest.mark.full
def test_the_wheel_holds_documentation_examples_and_pictures_once(installed: Path) -> None:
    top = installed / "headrace"
    files = {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}
    assert not [name for name in files if name.startswith(("infra/sdk", "docs", "tests", "README")) or ".pyc" in name]
    for kind in ("infra/docs/**/*.md", "infra/cli/examples/**/*.*", "infra/cli/**/*.png"):
        found = [path for path in ROOT.glob(kind) if path.suffix != ".pyc"]
        assert found and {path.relative_to(ROOT).as_posix() for path in found} <= files


@pytest.mark.full
def test_the_installed_command_finds_its_documentation_and_its_examples(installed: Path, tmp_path: Path) -> None:
    shown = re.search(r"Documentation: (\S+)", run(installed, tmp_path, "-m", "headrace", "--help"))
    assert shown and Path(shown[1]) == installed / "headrace/infra/docs/README.md" and Path(shown[1]).is_file()
    for example in sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / "headrace.toml").is_file()):
        run(installed, tmp_path, "-m", "headrace", "init", example, "--from", example, "--engine", "torch", "--tiny")
        run(installed, tmp_path, "-m", "headrace", "check", "-c", f"{example}/headrace.toml")


@pytest.mark.full
def test_installed_every_module_is_imported_from_below_headrace_and_makes_the_same_bits(
    installed: Path, tmp_path: Path
) -> None:
    """What ships is named as in the repository, and the code of a run has the same hash installed and not."""
    script = (
        "import importlib, json, pkgutil, sys, headrace\n"
        "assert all(getattr(headrace, name) for name in headrace.__all__)\n"
        "left_out = ('deepspeed', 'vllm', 'worker', 'child', '__main__', 'headrace.infra.cli.demo', 'sandbox',"
        " 'peers.ray_queue', 'peers.redis_stream')\n"  # they run in the environment of `make bench-deps`
        "for one in pkgutil.walk_packages(headrace.__path__, 'headrace.'):\n"
        "    if not any(word in one.name for word in left_out):\n"
        "        importlib.import_module(one.name)\n"
        "from headrace.infra.settings.plugin import find\n"
        "from headrace.trainer.journal.origin import ROOTS, Definition, code_hash\n"
        "learner = find('trainer.learners.torch:TorchLearner')\n"
        "code = code_hash((*ROOTS, Definition(learner.__module__, learner.__name__)))\n"
        "print(json.dumps([sorted({name.partition('.')[0] for name in sys.modules}), headrace.__file__, code]))\n"
    )
    loaded, file, code = json.loads(run(installed, tmp_path, "-c", script))
    assert file.startswith(str(installed)) and not set(loaded) & set(PACKAGES)
    assert code == code_hash((*ROOTS, LEARNER))
