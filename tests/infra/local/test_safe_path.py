"""Files of the current folder never run: it may be a clone or an unpacked archive."""

import importlib.metadata
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from infra.cli.options import SettingsFile
from infra.cli.run.up import INDEX, ROLES, broker_child, role_child
from infra.cli.settings import load_settings
from infra.local.jars import JARS_VARIABLE
from infra.local.process import start_watched
from infra.local.supervisor import Child
from streams.scores.child import ScoreChild

SETTINGS = 'app = "bot"\nplugins = ["plugins"]\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\ndeadline_s = 0.1\n'


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with a module of every top-level name that Python or an installed package has; each tells that it ran."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "infra", "mine"}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\n")
    return folder


def children(folder: Path) -> list[Child]:
    file = folder / "headrace.toml"
    file.write_text(SETTINGS)
    (folder / "plugins").mkdir()
    broker = broker_child(load_settings(file, ["kafka.bootstrap_servers="]))
    assert broker is not None
    settings = load_settings(file)
    return [
        replace(broker, env={**broker.env, JARS_VARIABLE: str(folder / "nowhere")}),
        role_child(settings, SettingsFile(file), INDEX),
        *(role_child(settings, SettingsFile(file), role) for role in ("serve", *ROLES)),
    ]


def test_no_role_imports_a_module_from_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    started = [start_watched(child.argv, log=child.log, env=child.env, cwd=hostile) for child in children(tmp_path)]
    for watched in started:
        assert watched.process.wait(120) in (1, 2), "each ends for the broker or the model that is not there"
        watched.release()
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_no_helper_process_imports_a_module_from_the_current_folder(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    child = ScoreChild("streams.scores.pattern_worker")
    child.close()
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_a_plug_in_is_found_in_the_folder_that_the_settings_name(hostile: Path, tmp_path: Path) -> None:
    child = children(tmp_path)[1]
    (tmp_path / "plugins" / "mine.py").write_text("def agent() -> None: ...\n")
    code = (
        "from pathlib import Path; from infra.settings.plugin import add_plugin_folders, find;"
        f"add_plugin_folders(Path({str(tmp_path)!r}), ['plugins']); print(find('mine:agent', 'use').__module__)"
    )
    watched = start_watched((sys.executable, "-c", code), log=child.log, cwd=hostile)
    assert watched.process.wait(60) == 0, child.log.read_text()
    watched.release()
    assert child.log.read_text() == "mine\n" and not (tmp_path / "ran").exists()
