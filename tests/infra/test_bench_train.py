"""The benchmark of training beside TRL: the sides begin alike, and one that does not arrive is said to have not."""

import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from actors.tasksets.arithmetic import write_arithmetic
from infra.cli.bench.beside import OURS
from infra.cli.bench.learning.train import (
    REWARDS,
    TRL,
    TrainPlan,
    TrainRun,
    asked_of,
    heard,
    peer_minutes,
    require_alike,
    sooner,
)
from infra.cli.bench.learning.train_ours import RunFollower, warmed
from infra.cli.bench.rows import rows_of
from infra.cli.bench.tables import train_table
from infra.cli.demo.char_model import Size, build_char_model
from infra.cli.demo.settings import DemoOptions, demo_toml
from infra.cli.settings import Settings, load_settings
from schemas import EvalResult, PolicyEvent, Progress, Task
from trainer.config import TrainerConfig

OWN = TrainRun(OURS, 0, 0.3, 0.92, 80, 0.8, 600.0, wall_s=100.0, cpu_s=190.0)
SLOW = TrainRun(TRL, 0, 0.3, 0.91, 90, 0.8, 600.0, wall_s=250.0, cpu_s=490.0)
LATE = TrainRun(TRL, 0, 0.3, 0.5, 90, 0.41, 600.0, wall_s=590.0, cpu_s=950.0, arrived=False)


def settings_in(folder: Path, *sets: str) -> Settings:
    (folder / "headrace.toml").write_text(demo_toml(DemoOptions(directory=folder, seed=0)))
    return load_settings(folder / "headrace.toml", list(sets))


def test_one_that_does_not_arrive_is_said_to_have_not_and_never_has_a_time() -> None:
    assert LATE.words == "not within 10 minutes: 50.0% right after 590 s, 950 s of CPU, 90 steps, at reward 0.41"
    assert sooner([OWN, SLOW], 0, OURS) == ("", 2.5)
    assert sooner([OWN, LATE], 0, OURS) == (": at least", 5.9)
    assert sooner([OWN, LATE], 0, OURS, "cpu_s") == (": at least", 5.0)
    late = msgspec.structs.replace(OWN, arrived=False)
    assert sooner([late, SLOW], 0, OURS) == (": at most", 2.5)
    assert sooner([late, LATE], 0, OURS) is None and sooner([OWN], 0, OURS) is None
    unseen = msgspec.structs.replace(LATE, wall_s=0.0, cpu_s=0.0)
    assert sooner([OWN, unseen], 0, OURS) is None, "a peer that was never looked at says nothing"
    console = Console(file=io.StringIO(), width=170)
    console.print(train_table([OWN, LATE]))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "not within 10 minutes" in shown and "at least 5.90" in shown and "at least 5.00" in shown


def test_bench_all_has_a_row_a_side_and_seed() -> None:
    rows = rows_of("train", msgspec.to_builtins([OWN, LATE]))
    assert [(one.what, one.value, one.ours, one.peer, one.low) for one in rows] == [
        (f"seed 0, {OURS}, {TRL}: at least", 5.9, 100.0, 590.0, 2.0),
        (f"seed 0, {OURS}, {TRL}, CPU: at least", 5.0, 190.0, 950.0, float("-inf")),
    ]


def test_a_peer_has_until_it_is_known_whether_headrace_is_twice_as_soon() -> None:
    plan = TrainPlan(minutes=10.0)
    slow = msgspec.structs.replace(OWN, wall_s=480.0)
    assert peer_minutes(plan, [OWN]) == 10.0
    assert peer_minutes(plan, [OWN, slow]) == pytest.approx(17.6)
    assert peer_minutes(plan, [msgspec.structs.replace(slow, arrived=False)]) == 10.0


def test_sides_that_do_not_begin_alike_are_not_compared() -> None:
    assert require_alike([OWN, SLOW]) == [OWN, SLOW]
    with pytest.raises(RuntimeError, match="begin with other shares"):
        require_alike([OWN, msgspec.structs.replace(SLOW, begun=0.35)])


def test_ours_begins_with_the_version_after_the_warm_up_and_ends_where_enough_is_right() -> None:
    follower = RunFollower(0, "dev", 0.9)
    results = [("dev", 0, 0.0), ("held-out", 1, 0.95), ("dev", 1, 0.3), ("dev", 21, 0.6), ("dev", 41, 0.91)]
    follower.take(PolicyEvent(event="published", policy="main", version=0))
    assert not follower.begins.is_set()
    follower.take(PolicyEvent(event="published", policy="main", version=1))
    assert follower.begins.is_set()
    follower.take(Progress(role="train", instance="train/a/1", gauges={"reward_mean": 0.7}))
    for suite, version, share in results:
        assert not follower.arrives.is_set()
        result = EvalResult(
            suite=suite, policy="main", version=version, num_tasks=250, num_correct=round(250 * share), num_samples=1
        )
        follower.take(result)
    assert follower.arrives.is_set()
    assert (follower.looked.begun, follower.looked.step, follower.looked.reward) == (75 / 250, 40, 0.7)


def _peer(*lines: object, then: str = "") -> "subprocess.Popen[bytes]":
    """A process that says these lines as a peer does, between others."""
    said = "\n".join(["{'loss': 0.0}", *(json.dumps(one) for one in lines)])
    return subprocess.Popen(
        [sys.executable, "-c", f"import time; print({said!r}, flush=True); {then}"], stdout=subprocess.PIPE
    )


STEP = {"step": 20, "accuracy": 0.5, "wall_s": 9.0, "cpu_s": 17.0, "reward": 0.4}


@pytest.mark.parametrize("minutes", [0.01, 10.0])
def test_a_peer_arrives_or_its_time_is_over(minutes: float, tmp_path: Path) -> None:
    arrives = {**STEP, "step": 40, "accuracy": 0.95} if minutes > 1 else STEP
    peer = _peer({"begin": True, "accuracy": 0.3}, STEP, arrives, then="time.sleep(600)")
    try:
        found = heard(peer, threading.Timer(600, peer.kill), TrainPlan(minutes=minutes), 7, tmp_path / "log")
    finally:
        peer.kill()
        peer.communicate()
    assert (found.side, found.seed, found.begun) == (TRL, 7, 0.3)
    assert (found.steps, found.wall_s, found.arrived) == ((40, 9.0, True) if minutes > 1 else (20, 9.0, False))


@pytest.mark.parametrize("lines", [(), ({"begin": True, "accuracy": 0.3}, STEP)])
def test_a_peer_that_ends_by_itself_is_an_error(lines: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ImportError: no such thing\n")
    peer = _peer(*lines)
    with pytest.raises(RuntimeError, match="ImportError: no such thing"):
        heard(peer, threading.Timer(600, peer.kill), TrainPlan(), 0, tmp_path / "log")
    peer.communicate()


def test_the_peer_is_asked_what_the_demos_settings_say(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    tasks, _ = write_arithmetic(tmp_path / "tasks")
    asked = json.loads(json.dumps(asked_of(settings, tmp_path / "warm", tasks, tmp_path, 0.9)))
    assert (asked["groups"], asked["num_episodes"], asked["suite"], asked["every"]) == (32, 16, "dev", 20)
    assert msgspec.convert(asked["trainer"], TrainerConfig) == settings.trainer
    splits = {msgspec.json.decode(line, type=Task).split for line in tasks.read_bytes().splitlines()}
    assert {asked["split"], asked["suite"]} < splits


def test_a_warmed_up_model_is_a_folder_of_the_same_form(tmp_path: Path) -> None:
    small = settings_in(tmp_path, "trainer.warmup.max_steps=3")
    model = build_char_model(tmp_path / "model", 0, size=Size(hidden=32, layers=1))
    said: list[str] = []
    assert warmed(small, model, tmp_path / "warm", said.append) == 3
    assert said == ["train: seed 0: warmed up in 3 steps"]
    names = {one.name for one in model.iterdir()}
    assert {one.name for one in (tmp_path / "warm").iterdir()} == names
    weights = "model.safetensors"
    assert (tmp_path / "warm" / weights).read_bytes() != (model / weights).read_bytes()


def test_rewards_alone_is_a_control_of_the_demo() -> None:
    from infra.cli.bench.learning.train import CONTROLS
    from infra.cli.demo.arithmetic import ARITHMETIC

    assert set(CONTROLS.values()) <= set(ARITHMETIC.lanes) and set(CONTROLS) == {OURS, REWARDS}
