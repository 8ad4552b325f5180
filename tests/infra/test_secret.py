"""Secrets of the settings: from a variable or a file, one way for all, and never shown."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.rollout.environments.http import HttpEnvironment
from actors.rollout.environments.openenv import OpenEnv
from actors.rollout.tools.mcp import McpServer
from infra.cli.run.roles import webhooks_of
from infra.cli.settings import load_settings
from infra.settings.secret import bearer, secret_of
from schemas.errors import ConfigError


def test_a_file_goes_before_the_variable_and_blanks_around_it_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("  from a file\n")
    environment = {"HEADRACE_X": "from a variable"}
    assert secret_of("a.b", "HEADRACE_X", "secret", tmp_path, environment) == "from a file"
    assert secret_of("a.b", "HEADRACE_X", "", tmp_path, environment) == "from a variable"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("", "a.b_env: the environment has no HEADRACE_X; set it, or name a file in b_file"),
        ("nowhere", "nowhere cannot be read: No such file or directory"),
        ("empty", "empty is empty"),
        ("bytes", "bytes holds no text"),
    ],
)
def test_a_secret_that_is_not_there_is_one_line_that_names_the_setting(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"s3cret\xff")
    with pytest.raises(ConfigError) as failed:
        secret_of("a.b", "HEADRACE_X", file, tmp_path, {})
    shown = str(failed.value)
    assert said in shown and shown.startswith("a.b_") and "s3cret" not in shown


def test_the_secret_of_a_webhook_lies_beside_the_settings(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("s3cret\n")
    source = 'name = "csat"\nuse = "streams.sources.received:rating"\nfrom = { webhook = "/z", secret_file = "hook" }\n'
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n[[feedback]]\n{source}')
    (found,) = webhooks_of(load_settings(tmp_path / "headrace.toml"))
    assert found.secret == b"s3cret"
    (tmp_path / "hook").unlink()
    with pytest.raises(ConfigError, match=r"^feedback\[0\].from.secret_file: "):
        webhooks_of(load_settings(tmp_path / "headrace.toml"))


@pytest.mark.parametrize("made", [HttpEnvironment, McpServer, OpenEnv])
def test_a_token_may_lie_in_a_file(made: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token_file: got .*expected an absolute path"):
        made(url="http://x", token_file="token")
    with pytest.raises(ConfigError, match=r"token_file: .* cannot be read"):
        made(url="http://x", token_file=str(tmp_path / "token"))
    (tmp_path / "token").write_text("s3cret\n")
    made(url="http://x", token_file=str(tmp_path / "token"))
    assert bearer("", str(tmp_path / "token")) == {"Authorization": "Bearer s3cret"} and bearer("", "") == {}
