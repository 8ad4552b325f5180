"""`headrace init` and `headrace keys`: what they write is accepted as it is, and nothing is overwritten."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from actors.gateway.config import GatewayConfig
from infra.cli.main import app
from infra.cli.run.roles import webhooks_of
from infra.cli.run.up import ROLES, roles_of, say_door
from infra.cli.settings import load_settings
from schemas.errors import ConfigError


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
    for word in ("not_trivial", "brief", "10m", "webhook", "/v1/feedback", "correct"):
        assert word in checked.stdout
    assert "csat" not in checked.stdout, "a source that nobody writes would hold every answer"
    (folder / "plugins" / "mine.py").write_text("mine = 1")
    again = headrace("init", str(folder))
    assert again.exit_code == 2 and "is there already" in again.stderr
    assert (folder / "plugins" / "mine.py").read_text() == "mine = 1"


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "bot"\n[gateway]\nkeys_reload_s = 0.5\n')
    made = headrace("keys", "create", "--tenant", "acme", "--scope", "serve,admin", "--rpm", "60", "-c", str(file))
    assert "gateways know it within 0.5 s" in made.stderr
    (shown,) = made.stdout.split()
    key_id = shown.split("-")[1]
    listed = json.loads(headrace("keys", "list", "--json", "-c", str(file)).stdout)
    assert [(one["id"], one["tenant"], one["scopes"], one["rpm"], one["state"]) for one in listed] == [
        (key_id, "acme", ["serve", "admin"], 60, "live")
    ]
    assert shown.split("-", 2)[2] not in (tmp_path / "store" / "gateway" / "keys" / key_id).read_text()
    assert headrace("keys", "revoke", shown, "-c", str(file)).exit_code == 0
    assert json.loads(headrace("keys", "list", "--json", "-c", str(file)).stdout)[0]["state"] == "revoked"
    for wrong in (["--scope", "serve,root"], ["--train", "maybe"], ["--expires", "soon"]):
        refused = headrace("keys", "create", *wrong, "-c", str(file))
        assert refused.exit_code == 2 and refused.stderr.startswith("headrace: "), refused.stderr


def test_up_serves_where_there_is_a_gateway_and_shows_a_key_once(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "bot"\n[gateway]\nlisten = "127.0.0.1:8123"\n')
    settings = load_settings(file)
    assert roles_of(settings) == ("serve", *ROLES)
    with (tmp_path / "said").open("w") as said:
        say_door(settings, Console(file=said))
        say_door(settings, Console(file=said))
    words = (tmp_path / "said").read_text()
    assert words.count("http://127.0.0.1:8123/v1") == 2 and words.count("api_key") == 1
    file.write_text('app = "bot"\n')
    assert roles_of(load_settings(file)) == ROLES


def test_webhook_secrets_come_from_the_environment_and_their_absence_is_told(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(
        'app = "bot"\n[gateway]\n[[feedback]]\nname = "z"\nuse = "m:f"\n'
        'from = { webhook = "/zendesk", secret_env = "HEADRACE_TEST_NO_SUCH_SECRET" }\n'
    )
    with pytest.raises(ConfigError, match="HEADRACE_TEST_NO_SUCH_SECRET"):
        webhooks_of(load_settings(tmp_path / "headrace.toml"))
    assert webhooks_of(load_settings(_empty(tmp_path))) == ()
    assert GatewayConfig().train_on == "nothing", "nobody's answers are learned from by default"


def _empty(folder: Path) -> Path:
    file = folder / "empty.toml"
    file.write_text('app = "bot"\n')
    return file
