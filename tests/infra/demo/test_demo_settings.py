"""The demo's settings file: what each engine and control changes, and that a folder keeps its options."""

from pathlib import Path

import pytest

from infra.cli.settings import Settings, load_settings
from infra.demo.demo import write_settings
from infra.demo.settings import CONTROLS, ENGINES, DemoOptions, demo_toml
from infra.plugin import find
from schemas.errors import ConfigError
from streams.chain_builder import build_collect, build_verify
from trainer.waiting import share_of


def settings(folder: Path, **options: object) -> Settings:
    return load_settings(write_settings(DemoOptions(directory=folder, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("control", CONTROLS)
def test_every_engine_and_control_gives_settings_that_hold(engine: str, control: str, tmp_path: Path) -> None:
    found = settings(tmp_path, engine=engine, control=control, seed=7, minutes=1.5)
    build_verify(found.streams())
    build_collect(found.streams())
    assert callable(find(found.engine.use))
    assert (found.master.seed, found.master.stop.after) == (7, "1.5m")
    assert not found.kafka.bootstrap_servers, "it brings its own broker"


def test_a_control_changes_one_thing_only(tmp_path: Path) -> None:
    plain = demo_toml(DemoOptions(directory=tmp_path))
    for control in CONTROLS[1:]:
        other = demo_toml(DemoOptions(directory=tmp_path, control=control))
        changed = [line for line in other.splitlines() if line not in plain.splitlines()]
        assert changed and all("weight" in line for line in changed) == (control != "shuffled"), control


def test_the_controls_weigh_the_lanes_as_they_say(tmp_path: Path) -> None:
    weights = {}
    for control in CONTROLS:
        lanes = settings(tmp_path / control, control=control).trainer.lanes
        weights[control] = (lanes["usual"].weight, lanes["expert"].weight)
        assert lanes["expert"].weight == 0.0 or share_of(lanes["expert"]) == pytest.approx(1 / 3)
    assert weights == {"none": (0.75, 0.25), "shuffled": (0.75, 0.25), "sft": (0.0, 0.25), "rl": (1.0, 0.0)}


def test_the_stop_is_decided_on_another_suite_than_the_reported_one(tmp_path: Path) -> None:
    found = settings(tmp_path)
    suites = {one.suite: one.tasks for one in found.master.evals}
    assert found.master.stop.suite == "dev" and suites["held-out"] >= 500


def test_shuffling_comes_after_the_advantage_it_shuffles(tmp_path: Path) -> None:
    names = [step.name for step in build_collect(settings(tmp_path, control="shuffled").streams())]
    assert names.index("shuffle_advantages") == names.index("advantage") + 1


def test_the_same_folder_goes_on_only_with_the_same_options(tmp_path: Path) -> None:
    settings(tmp_path, seed=1)
    settings(tmp_path, seed=1)
    with pytest.raises(ConfigError, match="other options"):
        settings(tmp_path, seed=2)
