"""`headrace init`, and the examples it copies."""

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from infra.cli.commands.init import EXAMPLES, example_files
from infra.cli.main import app
from infra.cli.run.up import ROLES, roles_to_start, say_door
from infra.cli.settings import load_settings
from tests.infra.test_docs import parse


def headrace(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_tiny_model_is_written_beside_the_settings_that_name_it_and_nowhere_else(tmp_path: Path) -> None:
    done = headrace("init", str(tmp_path / "mine"), "--from", "program", "--tiny", "--engine", "torch")
    assert done.exit_code == 0, done.stderr
    settings = load_settings(tmp_path / "mine" / "headrace.toml")
    assert (settings.folder / settings.policy.model / "model.safetensors").is_file()
    refused = headrace("init", str(tmp_path / "other"), "--tiny", "--model", "../Qwen/Qwen3-0.6B")
    assert refused.exit_code == 2 and "expected a name for the folder" in refused.stderr.replace("\n", " ")
    assert not (tmp_path / "other").exists()


def test_what_init_writes_check_accepts_and_init_does_not_write_twice(tmp_path: Path) -> None:
    folder = tmp_path / "Support Bot"
    done = headrace("init", str(folder), "--engine", "torch", "--tiny")
    assert done.exit_code == 0, done.stderr
    assert load_settings(folder / "headrace.toml").app == "support-bot"
    checked = headrace("check", "-c", str(folder / "headrace.toml"))
    assert checked.exit_code == 0, checked.stderr
    for word in ("not_trivial", "brief", "10m", "webhook", "/v1/feedback", "correct", "64 answers or more per step"):
        assert word in checked.stdout
    assert "csat" not in checked.stdout, "a source that nobody writes would hold every answer"
    (folder / "plugins" / "mine.py").write_text("mine = 1")
    again = headrace("init", str(folder))
    assert again.exit_code == 2 and "exists already" in again.stderr
    assert (folder / "plugins" / "mine.py").read_text() == "mine = 1"


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "bot"\n[gateway]\nkeys_reload_s = 0.5\n')
    made = headrace("keys", "create", "--tenant", "acme", "--scope", "serve,admin", "--rpm", "60", "-c", str(file))
    assert "gateways know it within 0.5 s" in made.stderr
    (shown,) = made.stdout.split()
    key_id = shown.split("-")[1]
    listed = json.loads(headrace("keys", "list", "--json", "-c", str(file)).stdout)
    assert [(item["id"], item["tenant"], item["scopes"], item["rpm"], item["state"]) for item in listed] == [
        (key_id, "acme", ["serve", "admin"], 60, "live")
    ]
    assert shown.split("-", 2)[2] not in (tmp_path / "store" / "gateway" / "keys" / key_id).read_text()
    assert headrace("keys", "revoke", shown, "-c", str(file)).exit_code == 0
    assert json.loads(headrace("keys", "list", "--json", "-c", str(file)).stdout)[0]["state"] == "revoked"
    for wrong in (["--scope", "serve,root"], ["--train", "maybe"], ["--expires", "soon"], ["--expires", "0s"]):
        refused = headrace("keys", "create", *wrong, "-c", str(file))
        assert refused.exit_code == 2 and wrong[1] in refused.stderr, refused.stderr


def test_up_serves_where_there_is_a_gateway_and_shows_a_key_once(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "bot"\n[gateway]\nlisten = "127.0.0.1:8123"\n')
    settings = load_settings(file)
    assert roles_to_start(settings) == ("serve", *ROLES)
    with (tmp_path / "said").open("w") as said:
        say_door(settings, Console(file=said))
        say_door(settings, Console(file=said))
        say_door(load_settings(file, ["gateway.listen=0.0.0.0:8124"]), Console(file=said, width=200))
    words = (tmp_path / "said").read_text()
    assert words.count("http://127.0.0.1:8123/v1") == 2 and words.count("api_key") == 1
    assert f"http://{socket.gethostname()}:8124/v1" in words, "nobody can open 0.0.0.0"
    file.write_text('app = "bot"\n')
    assert roles_to_start(load_settings(file)) == ROLES


NAMES = sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / "headrace.toml").is_file())


@pytest.fixture(autouse=True)
def no_plugins_left() -> Any:
    """Plugin folders of one test are not those of the next."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    added = tuple(folder for folder in sys.path if folder not in path)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if added and (getattr(sys.modules[name], "__file__", None) or "").startswith(added):
            del sys.modules[name]


def copied(name: str, folder: Path, *more: str) -> Path:
    done = CliRunner().invoke(app, ["init", str(folder), "--from", name, "--engine", "torch", "--model", "m", *more])
    assert done.exit_code == 0, done.output
    return folder / "headrace.toml"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_a_folder_that_check_accepts_beside_a_model(name: str, tmp_path: Path) -> None:
    config = copied(name, tmp_path / "Mine", "--tiny")
    settings = load_settings(config)
    assert (settings.app, settings.policy.model, settings.engine.use) == (
        "mine", "m", "actors.engines.torch:TorchEngine"
    )  # fmt: skip
    assert {*example_files(name)} >= {"headrace.toml", "README.md"}
    checked = CliRunner().invoke(app, ["check", "-c", str(config)])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_an_example_s_readme_are_there(name: str) -> None:
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    lines = [
        line
        for fence in re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for line in fence.split("\n")
    ]
    for line in filter(None, lines):
        parse(line.split()[1:], name)
    assert lines and all(
        (EXAMPLES / name / item).exists() for item in re.findall(r"^- `([\w/.]+)`", text, re.MULTILINE)
    )


def test_an_example_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["init", str(tmp_path / "x"), "--from", "gess"])
    assert done.exit_code == 2 and f"expected one of {', '.join(NAMES)}" in done.stderr.replace("\n", "")


def test_every_folder_is_an_example_and_the_help_of_init_says_what_it_is() -> None:
    assert [
        folder.name for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir() and folder.name != "__pycache__"
    ] == NAMES
    shown = CliRunner().invoke(app, ["init", "--help"], env={"COLUMNS": "200"}).output
    assert [name for name in NAMES if name not in shown] == []
