"""What is typed: help that teaches, mistakes told in one line, and exit codes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.observe.release import full_release, release

SETTINGS = 'app = "bot"\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\ndeadline_s = 0.3\n'
NEEDS_CONFIG = (
    ["up"], ["check"], ["master"], ["explore"], ["process"], ["train"], ["load", "tasks", "f"], ["load", "experts", "f"],
    ["status"], ["peek", "buffer"], ["audit"], ["audit", "--drain"], ["reprocess", "verify"],
)  # fmt: skip


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def told(result: Result, code: int) -> str:
    """The one line of a mistake; anything else would be a traceback."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("headrace: ")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "headrace.toml"
    file.write_text(SETTINGS)
    return file


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command below a group, which has `commands`, with what is typed for it."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, command in group.commands.items():
        found.append(((*path, name), command))
        if hasattr(command, "commands"):
            found += commands(command, (*path, name))
    return found


def test_help_names_every_command_and_says_where_to_start() -> None:
    words = call("--help").output
    for name in [
        "demo",
        "up",
        "check",
        "master",
        "explore",
        "process",
        "train",
        "load",
        "status",
        "peek",
        "audit",
        "reprocess",
        "plan",
    ]:
        assert f" {name} " in words
    assert "headrace demo" in words and "Exit codes" in words


def test_every_command_explains_itself_and_its_options() -> None:
    for path, command in commands(typer.main.get_command(app)):
        assert command.help and len(command.help) > 30, path
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{path}: {parameter.name} has no help"
        result = call(*path, "--help")
        assert result.exit_code == 0 and command.help.split()[0] in result.output


@pytest.mark.parametrize("arguments", NEEDS_CONFIG, ids=" ".join)
def test_a_missing_config_is_one_line_that_says_what_is_expected(arguments: list[str], tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    line = told(call(*arguments, "--config", str(missing)), 2)
    assert line == f"{missing}: no such file; expected a headrace.toml here, or --config FILE"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('app = "bot"\n[trainer]\nlerning_rate = 1\n', ['trainer.lerning_rate', 'did you mean "learning_rate"?']),
        ('app = "bot"\n[pacing]\nmax_staleness = "two"\n', ["pacing.max_staleness", "got 'two'", "expected a whole number"]),
        ('app = "bot"\n[kafka]\ntiered = true\n', ["kafka.tiered", "unknown key", f"this is release {release()}"]),
        ('app = "bot"\n[kafka]\npartitions = 0\n', ["kafka.partitions", "got 0", "1 or more"]),
        ("[kafka]\n", ["app", "missing"]),
        ('app = "bot"\nplugins = [\n', ["not valid TOML", "at end of document"]),
        ('app = "bot"\n[[score]]\nname = "x"\nuse = "nowhere"\n', ["score[0].use", "nowhere", "module:name"]),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_line_with_what_got_expected_where(
    text: str, words: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "bot.toml"
    config.write_text(text)
    line = told(call("status", "-c", str(config)), 2)
    assert line.startswith(str(config)) and all(word in line for word in words), line


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trainer.max_steps", ["got no '='", "a.b=value"]),
        ("trainer.max_step=3", ["trainer.max_step", 'did you mean "max_steps"?']),
        ("app.x=3", ["app is a value", "expected a table"]),
        ("trainer.max_steps=many", ["trainer.max_steps", "got 'many'"]),
        ("score.3.name=x", ["score"]),
        ("a b=1", ["names joined by dots"]),
    ],
)
def test_a_mistake_in_set_is_one_line(setting: str, words: list[str], config: Path) -> None:
    line = told(call("status", "-c", str(config), "--set", setting), 2)
    assert all(word in line for word in words), line


def test_set_overrides_the_file(config: Path) -> None:
    line = told(call("status", "-c", str(config), "--set", "kafka.bootstrap_servers=127.0.0.1:2"), 1)
    assert "127.0.0.1:2" in line


@pytest.mark.parametrize("topic", ["bufer", "bot.bufer", ""])
def test_an_unknown_topic_is_one_line_that_lists_those_there_are(topic: str, config: Path) -> None:
    line = told(call("peek", topic, "-c", str(config)), 2)
    assert "buffer" in line and "dead-letters" in line and repr(topic.removeprefix("bot.")) in line


@pytest.mark.parametrize("arguments", [["status"], ["peek", "bot.buffer"], ["audit"]], ids=" ".join)
def test_a_broker_that_is_not_there_is_one_line_with_its_address(arguments: list[str], config: Path) -> None:
    line = told(call(*arguments, "-c", str(config)), 1)
    assert line.startswith("Kafka at 127.0.0.1:1 is not reachable") and "0.3 s" in line


def test_no_broker_at_all_says_the_two_ways_out(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text('app = "bot"\n')
    line = told(call("status", "-c", str(config)), 2)
    assert "headrace up" in line and "kafka.bootstrap_servers" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reprocess", "buffer"], "got 'buffer', expected one of tasks, verify, collect, dead-letters"),
        (["reprocess", "dead-letters", "--diff"], "takes no --diff"),
        (["audit", "--drain", "--timeout", "soon"], 'got "soon", expected a duration'),
    ],
)
def test_an_order_that_cannot_be_is_one_line(arguments: list[str], words: str, config: Path) -> None:
    assert words in told(call(*arguments, "-c", str(config)), 2)


@pytest.mark.parametrize("kind", ["tasks", "experts"])
def test_a_file_to_load_that_is_not_there_is_one_line(kind: str, config: Path) -> None:
    assert told(call("load", kind, "none.jsonl", "-c", str(config)), 2).startswith("none.jsonl: cannot be read")


@pytest.mark.parametrize("role", ["train", "explore"])
def test_a_role_without_a_model_says_which_setting_is_missing(role: str, config: Path) -> None:
    command = [sys.executable, "-m", "infra.cli.main", role, "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (started,) = [line for line in done.stderr.splitlines() if f"started role={role}" in line]
    assert started.endswith(f" release={full_release()}")
    assert done.stderr.splitlines()[-1].endswith(
        "policy.model: missing, expected a model folder or a Hugging Face name"
    )


def test_a_mistake_on_the_command_line_exits_with_2() -> None:
    assert call("peek").exit_code == call("nonsense").exit_code == call("peek", "buffer", "-n", "-1").exit_code == 2


@pytest.mark.parametrize(("option", "words"), [("--engine", "vllm, torch"), ("--control", "none, shuffled, sft, rl")])
def test_a_demo_option_that_is_not_there_is_one_line(option: str, words: str, tmp_path: Path) -> None:
    line = told(call("demo", "--dir", str(tmp_path), option, "other"), 2)
    assert line == f"{option}: got 'other', expected one of {words}"
