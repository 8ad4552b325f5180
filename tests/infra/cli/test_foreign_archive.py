"""An archive that somebody else made: its data is used, and nothing it names is run."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from infra.cli.repeat.replay import check_names
from infra.cli.repeat.source import ReplaySource, unpacked
from infra.cli.settings import load_settings
from infra.ledger.archive import writing
from infra.ledger.bundle import Bundle, PartitionRange
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import topics
from schemas.errors import ConfigError
from tests.infra.cli.test_replay_command import call, exported
from trainer.config import LOSSES, TrainerConfig
from trainer.learners.learner import LEARNERS, foreign_names


def foreign(path: Path, model: str = "model", **trainer: Any) -> Path:
    """An archive with these settings of a trainer, and with nothing else in it."""
    settings = {"app": "t", "policy": {"model": model}, "trainer": trainer}
    with writing(path) as archive:
        archive.add("model/config.json", b"{}")
        archive.finish(Bundle(app="t", settings=settings, topics={topics.BUFFER.name: (PartitionRange(0, 0),)}))
    return path


def runs(mark: Path) -> dict[str, Any]:
    """A lane whose loss would write `mark`."""
    return {"loss": "subprocess:Popen", "options": {"args": ["touch", str(mark)]}}


@pytest.mark.parametrize("place", ["loss", "learner"])
def test_replaying_an_archive_runs_nothing_that_it_names(tmp_path: Path, place: str) -> None:
    mark = tmp_path / "mark"
    lane = runs(mark)
    named: dict[str, Any] = (
        {"lanes": {"usual": lane}}
        if place == "loss"
        else {"learner": {"use": lane["loss"], "options": lane["options"]}}
    )
    result = call("replay", foreign(tmp_path / "run", **named))
    assert result.exit_code == 2 and not mark.exists()
    (line,) = result.stderr.splitlines()
    assert "subprocess:Popen" in line and "--trust-plugins" in line


def test_trusted_names_are_printed_before_they_are_imported(tmp_path: Path) -> None:
    named = {"use": "no_such_module_anywhere:Learner"}
    result = call("replay", foreign(tmp_path / "run", learner=named), "--trust-plugins")
    assert result.exit_code == 2
    told = (result.stdout + result.stderr).splitlines()
    assert told[0] == 'trusted: trainer.learner.use = "no_such_module_anywhere:Learner"'
    assert 'no module "no_such_module_anywhere"' in told[-1]


def test_a_settings_file_beside_the_data_runs_nothing_either(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "evil.py").write_text(f"open({str(mark)!r}, 'w')\ndef loss(inputs): ...\n")
    toml = 'app = "t"\nplugins = ["plugins"]\n[trainer.lanes.usual]\nloss = "evil:loss"\n'
    (tmp_path / "headrace.toml").write_text(toml)
    source = ReplaySource(load_settings(tmp_path / "headrace.toml"), Log(MemoryBus(), "t"), MemoryStore(), "")
    before = list(sys.path)
    with pytest.raises(ConfigError, match="evil:loss"):
        check_names(Console(), source, trusted=False)
    assert not mark.exists() and sys.path == before


@pytest.mark.parametrize("loss", LOSSES)
def test_every_shipped_loss_is_known_by_its_name_and_by_its_module(loss: str) -> None:
    for name in (loss, f"trainer.losses.losses:{loss}"):
        assert foreign_names(msgspec.convert({"lanes": {"usual": {"loss": name}}}, TrainerConfig)) == ()


@pytest.mark.parametrize("use", LEARNERS)
def test_every_shipped_learner_is_known(use: str) -> None:
    assert foreign_names(msgspec.convert({"learner": {"use": use}}, TrainerConfig)) == ()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"lanes": {"usual": {"loss": "os:system"}}}, 'trainer.lanes.usual.loss = "os:system"'),
        ({"lanes": {"usual": {"loss": "trainer.losses.losses:load"}}}, "trainer.losses.losses:load"),
        ({"lanes": {"usual": {"loss": "infra.cli.demo.init:run_init"}}}, "infra.cli.demo.init:run_init"),
        ({"lanes": {"expert": {"loss": "../grpo"}}}, "../grpo"),
        ({"learner": {"use": "builtins:exec"}}, 'trainer.learner.use = "builtins:exec"'),
        (
            {"learner": {"use": "trainer.learners.torch:TorchLearner", "options": {"model": "/etc"}}},
            "trainer.learner.options.model",
        ),
        (
            {"learner": {"use": "trainer.learners.deepspeed:DeepSpeedLearner", "options": {"json": {"wandb": {}}}}},
            "trainer.learner.options.json",
        ),
    ],
)
def test_anything_else_is_told(config: dict[str, Any], told: str) -> None:
    (found,) = foreign_names(msgspec.convert(config, TrainerConfig))
    assert told in found


def test_only_the_settings_that_shape_a_step_are_taken_from_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = {
        "app": "t",
        "plugins": ["/tmp"],
        "engine": {"use": "subprocess:Popen"},
        "kafka": {"bootstrap_servers": "evil:9092"},
        "store": {"url": "s3://evil"},
        "policy": {"model": "somebody/tiny"},
    }
    with writing(path) as archive:
        archive.finish(Bundle(app="t", settings=settings))
    folder = tmp_path / "out"
    folder.mkdir()
    found = unpacked(path, folder).settings
    assert found.plugins == () and found.engine.use != "subprocess:Popen"
    assert found.kafka.bootstrap_servers == "" and found.store.url == "store"


@pytest.mark.parametrize("model", ["/etc", "../outside", "..", "a/../../b", "~/x", "", "a/b/c", "model/../x"])
def test_an_archive_names_no_model_of_this_machine(tmp_path: Path, model: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"policy\.model"):
        unpacked(foreign(tmp_path / "run", model=model), folder)


def test_what_an_archive_may_unpack_is_bounded_and_the_flag_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with writing(path) as archive:
        archive.add("zeros", bytes(2**21))
        archive.finish(Bundle(app="t", settings={"app": "t"}))
    result = call("replay", path, "--max-unpacked", 2**20)
    assert result.exit_code == 1 and "--max-unpacked" in result.stderr


def test_a_shipped_learner_needs_no_trust(tmp_path: Path) -> None:
    assert call("replay", exported(tmp_path), "--verify").exit_code == 0


@pytest.mark.parametrize("command", ["replay", "export"])
def test_a_run_s_folder_names_no_store_that_is_imported_unless_it_is_trusted(tmp_path: Path, command: str) -> None:
    mark = tmp_path / "mark"
    options = f'{{ args = ["touch", "{mark}"] }}'
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n[store]\nuse = "subprocess:Popen"\noptions = {options}\n')
    result = call(command, tmp_path, *((tmp_path / "archive",) if command == "export" else ()))
    assert result.exit_code == 2 and not mark.exists()
    assert "subprocess:Popen" in result.stderr and "--trust-plugins" in result.stderr
