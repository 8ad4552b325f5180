"""What the demo knows of a run: folded from records, over restarts of the roles."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from infra.cli.demo.demo import write_settings
from infra.cli.demo.report import accuracies, begin_of, measured, staleness, times
from infra.cli.demo.screen import DemoScreen
from infra.cli.demo.settings import DemoOptions
from infra.cli.demo.watch import Watch
from infra.cli.settings import load_settings
from infra.local.supervisor import ChildState
from infra.log.bus import Record
from infra.log.log import LogMessage
from schemas import Block, Control, EvalResult, MasterState, PolicyEvent, Progress, encode
from tests.schemas.record_samples import group_block

START_S = 1_763_715_600.0


def watch_of(*events: tuple[float, Control | Block]) -> Watch:
    watch = Watch(started_s=START_S)
    for at_s, record in events:
        watch.take(LogMessage(Record("t", 0, 0, int((START_S + at_s) * 1000), b"", encode(record)), value=record))
    return watch


def progress(role: str, number: int = 1, state: str = "running", **counters: float) -> Progress:
    return Progress(role=role, instance=f"{role}/{number}", state=state, counters=counters)


def test_counters_are_added_up_over_the_processes_a_role_has_had() -> None:
    watch = watch_of(
        (0, progress("train", 1, steps=5.0)), (1, progress("train", 1, steps=9.0)), (2, progress("train", 2, steps=4.0))
    )
    assert watch.counter("train", "steps") == 13.0


def test_drops_are_added_up_over_roles() -> None:
    watch = watch_of(
        (0, progress("train", **{"dropped{reason=stale}": 2.0})),
        (1, progress("process", **{"dropped{reason=stale}": 3.0})),
    )
    assert watch.drops() == {"stale": 5.0}


def test_only_a_master_that_is_done_in_this_run_ends_it() -> None:
    done = Progress(role="master", instance="master/1", master=MasterState(state="done"))
    assert not watch_of((-5, done)).done.is_set(), "that was an earlier process"
    assert watch_of((5, done)).done.is_set() and not watch_of((5, progress("master", state="done"))).done.is_set()


def test_start_up_is_measured_to_the_first_experience_and_not_at_all_in_a_resumed_run() -> None:
    assert times(watch_of((31.5, group_block()), (40, group_block())))["startup_s"] == 31.5
    assert times(watch_of((-100, group_block())))["startup_s"] is None


def test_the_plot_of_a_run_that_was_gone_on_with_begins_where_the_run_did() -> None:
    assert begin_of([{"elapsed_s": -3600.0}, {"elapsed_s": 50.0}]) == -3600.0
    assert begin_of([{"elapsed_s": 53.0}]) == begin_of([]) == 0.0


def test_the_reported_accuracy_is_of_held_out_versions_0_1_and_the_last() -> None:
    results = [
        (float(version), EvalResult(policy="main", version=version, suite=suite, num_tasks=10, num_correct=correct))
        for suite, version, correct in (("held-out", 0, 0), ("held-out", 1, 3), ("held-out", 40, 9), ("dev", 41, 10))
    ]
    found = accuracies(watch_of(*results), "held-out")
    assert found == {
        "accuracy_start": 0.0, "accuracy_after_sft": 0.3, "accuracy_final": 0.9, "accuracy_final_version": 40,
    }  # fmt: skip
    assert accuracies(watch_of(), "held-out")["accuracy_final"] is None


def test_several_samples_a_task_are_a_share_of_all_of_them() -> None:
    result = EvalResult(policy="main", version=1, suite="dev", num_tasks=10, num_correct=15, num_samples=4)
    assert watch_of((0, result)).accuracy == {"dev": {1: 0.375}}


def test_staleness_is_weighted_by_tokens() -> None:
    counters = {
        "staleness_tokens{versions=0}": 90.0,
        "staleness_tokens{versions=1}": 6.0,
        "staleness_tokens{versions=2}": 4.0,
    }
    watch = watch_of((0, progress("train", **counters)))
    assert staleness(watch) == {"staleness_mean": 0.14, "staleness_p95": 1, "staleness_max": 2}
    assert staleness(watch_of())["staleness_max"] is None


def test_idle_shares_and_failures_come_from_the_roles() -> None:
    busy = {"idle_seconds": 1.0, "learner_seconds": 2.0, "publish_wait_seconds": 0.5, "snapshot_seconds": 0.5}
    found = measured(watch_of((0, progress("train", **busy)), (0, progress("explore", requests_failed=3.0))))
    assert found["trainer_idle_share"] == 0.25 and found["requests_failed"] == 3


def test_a_child_that_cannot_go_on_is_named() -> None:
    watch = watch_of()
    watch.children = (
        {
            "train": ChildState(name="train", exit_code=2),
            "explore": ChildState(name="explore", given_up=True),
            "load-tasks": ChildState(name="load-tasks", exit_code=0),
        },
    )
    assert watch.failed() == ["train", "explore"]


@pytest.mark.parametrize("full", [False, True])
def test_the_screen_can_be_drawn_at_any_moment(full: bool, tmp_path: Path) -> None:
    options = DemoOptions(directory=tmp_path, control="rl")
    settings = load_settings(write_settings(options))
    events: list[tuple[float, Control | Block]] = [
        (1, progress("train", state="learning", steps=4.0, **{"dropped{reason=[stale]}": 2.0})),
        (2, progress("explore", tokens=1000.0)),
        (3, PolicyEvent(event="published", policy="main", version=3)),
        (4, EvalResult(policy="main", version=3, suite="held-out", num_tasks=10, num_correct=7)),
    ]
    watch = watch_of(*(events if full else []))
    watch.children = ({"train": ChildState(name="train", pid=7, rss_bytes=2**28)},)
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    with DemoScreen(console, watch, settings, options):
        pass
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "control: rl" in drawn and "256 MB" in drawn
    assert ("70.0% at v3" in drawn) == full and ("[stale] 2" in drawn) == full
