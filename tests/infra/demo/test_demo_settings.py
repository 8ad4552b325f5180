"""The demo's settings file: what each task and engine gives, and that a folder keeps its options."""

from pathlib import Path

import msgspec
import pytest

from actors.rollout.workflow import Workflows
from infra.cli.demo.demo import write_settings
from infra.cli.demo.settings import TASKS, DemoOptions, DemoTask
from infra.cli.settings import Settings, load_settings
from infra.settings.config import read_toml
from infra.settings.plugin import find
from schemas.errors import ConfigError
from streams.stages.chain_builder import build_collect, build_tasks, build_verify


def settings(folder: Path, **options: object) -> Settings:
    return load_settings(write_settings(DemoOptions(directory=folder, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("task", "engine"), [(name, engine) for name in TASKS for engine in TASKS[name].engines])
def test_every_task_and_engine_gives_settings_that_hold(task: str, engine: str, tmp_path: Path) -> None:
    found = settings(tmp_path, task=task, engine=engine, seed=7, minutes=1.5)
    for build in (build_tasks, build_verify, build_collect):
        build(found.streams())
    Workflows(found.explore.workflow, found.explore.options, found.explore.workflows)
    assert callable(find(found.engine.use)) and callable(find(TASKS[task].write))
    assert (found.master.seed, found.master.stop.after) == (7, "110s" if task == "traffic" else "1.5m")
    assert TASKS[task].suite in {suite.suite for suite in found.master.evals}
    assert not found.kafka.bootstrap_servers, "it brings its own broker"


def test_an_engine_a_task_does_not_run_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'torch', expected one of vllm"):
        settings(tmp_path, traffic=True, engine="torch")
    with pytest.raises(ConfigError, match="expected one of instructions, add, traffic"):
        settings(tmp_path, task="chess")


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_what_set_says_stands_in_the_file_that_other_commands_read(task: DemoTask, tmp_path: Path) -> None:
    options = DemoOptions(directory=tmp_path / "plain", task=task.name)
    sets = [
        "trainer.lanes.usual.weight=0.8", "trainer.lanes.new={loss=\"sft\", weight=0.1}", "trainer.lora.rank=8",
        'trainer.lora.targets=["q_proj", "v_proj"]', "reward={blend={teacher=1.0}}", "score.0.name=form", "app=other",
        "verify.teacher.url=http://127.0.0.1:8101/v1", "verify.teacher.model=teacher", "collect.difficulty.on=false",
        'processor=[{use="mine:short", options={min_tokens=8}}]', "master.evals.0.tasks=16", "kafka.partitions=3",
    ]  # fmt: skip
    expected = read_toml(write_settings(options), sets)
    config = write_settings(msgspec.structs.replace(options, directory=tmp_path / "set", sets=sets))
    assert read_toml(config) == expected, "as the overrides say, over the demo's own settings"
    assert "# Written by `headrace demo`" in config.read_text(), "the comments stay"
    assert write_settings(msgspec.structs.replace(options, directory=tmp_path / "set", sets=sets)) == config, "goes on"
    with pytest.raises(ConfigError, match="other options"):
        write_settings(msgspec.structs.replace(options, directory=tmp_path / "set", sets=sets[1:]))
