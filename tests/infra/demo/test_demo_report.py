"""Report of the demo: folded from records, over restarts of the roles."""

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from actors.master.evaluation import eval_group
from infra.cli.demo.demo import failed, print_result, service_children, until_done, users_child, write_settings
from infra.cli.demo.record import RunRecord
from infra.cli.demo.report import (
    WINDOW,
    accuracies,
    changes,
    draw_plot,
    examples_table,
    measured,
    nats_from,
    read_answers,
    read_seen,
    result_table,
    staleness,
    traffic_rows,
    traffic_values,
    windows,
)
from infra.cli.demo.settings import DemoOptions
from infra.cli.demo.users import TENANTS, USERS_FILE, Seen
from infra.cli.main import COMMANDS
from infra.cli.settings import Settings, load_settings
from infra.local.supervisor import ChildState
from infra.log.bus import Record
from infra.log.log import Log, LogMessage
from infra.log.memory import MemoryBus
from schemas import (
    Block,
    Control,
    EvalResult,
    Experience,
    MasterState,
    Message,
    PolicyEvent,
    Progress,
    Span,
    encode,
    make_experience,
    topics,
)
from tests.schemas.record_samples import group_block
from tests.tiny_models import build_tiny_model
from trainer.learners.forward import PackedModel

START_S = 1_763_715_600.0
TRAFFIC: dict[str, Any] = {"traffic": True}


def run_of(*events: tuple[float, Control | Block]) -> RunRecord:
    run = RunRecord(started_s=START_S)
    for at_s, record in events:
        run.take(LogMessage(Record("t", 0, 0, int((START_S + at_s) * 1000), b"", encode(record)), value=record))
    return run


def progress(role: str, number: int = 1, state: str = "running", **counters: float) -> Progress:
    return Progress(role=role, instance=f"{role}/{number}", state=state, counters=counters)


def evaluated(version: int, correct: int, suite: str = "held-out") -> EvalResult:
    return EvalResult(policy="main", version=version, suite=suite, num_tasks=10, num_correct=correct)


@pytest.mark.virtual
async def test_a_line_of_progress_comes_with_news_and_else_twice_a_minute() -> None:
    run, printed = run_of(), io.StringIO()
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    waiting = asyncio.create_task(until_done(log, run, Settings(app="t"), [], Console(file=printed, width=200)))
    await asyncio.sleep(42)
    await log.publish(topics.REPORTS, progress("train", steps=3))
    await asyncio.sleep(4)
    waiting.cancel()
    lines = [line.partition(" s  ")[2].partition(",")[0] for line in printed.getvalue().splitlines()]
    assert lines == ["starting: 0 steps", "starting: 0 steps", "starting: 3 steps"]


def test_only_a_master_that_is_done_in_this_run_ends_it() -> None:
    done = Progress(role="master", instance="master/1", master=MasterState(state="done"))
    assert not run_of((-5, done)).done, "that was an earlier process"
    assert run_of((5, done)).done and not run_of((5, progress("master", state="done"))).done


async def test_a_log_that_is_read_on_is_read_once() -> None:
    log = Log(MemoryBus(lambda: int(START_S * 1000) + 31_500), "t")
    await log.create_topics(partitions=2, keep_ms=-1)
    run = RunRecord(started_s=START_S)
    for steps in (1.0, 2.0):
        await log.publish(topics.REPORTS, progress("train", steps=steps))
        await log.publish(topics.EXPERIENCES, group_block())
        await run.read_on(log)
    assert len(run.history) == 2 and run.counter("train", "steps") == 2.0
    assert ": 2 steps, 0 experiences trained, no version yet" in run.line()


def test_the_line_of_progress_says_why_no_engine_takes_the_newest_version() -> None:
    published = [(at_s, PolicyEvent(event="published", policy="main", version=at_s)) for at_s in (1, 2)]
    explorer = Progress(role="explore", instance="explore/1", refused={1: "older", 2: "wrong logprobs"})
    assert "trained, v2, refused: wrong logprobs" in run_of(*published, (3, explorer)).line()
    assert "refused" not in run_of(*published, (3, progress("explore"))).line()


def test_figures_are_of_held_out_versions_of_tokens_and_of_all_processes_that_a_role_has_had() -> None:
    results = [evaluated(0, 0), evaluated(1, 3), evaluated(40, 9), evaluated(41, 10, "dev")]
    assert accuracies(run_of(*enumerate(results)), "held-out") == {
        "accuracy_start": 0.0, "accuracy_after_sft": 0.3, "accuracy_final": 0.9, "accuracy_final_version": 40,
    }  # fmt: skip
    assert accuracies(run_of(), "held-out")["accuracy_final"] is None
    aged = {f"staleness_tokens{{versions={age}}}": count for age, count in ((0, 90.0), (1, 6.0), (2, 4.0))}
    assert staleness(run_of((0, progress("train", **aged)))) == {"staleness_mean": 0.14, "staleness_max": 2}
    assert staleness(run_of())["staleness_max"] is None
    busy = {"idle_seconds": 1.0, "learner_seconds": 2.0, "publish_wait_seconds": 0.5, "snapshot_seconds": 0.5}
    run = run_of(
        (0, progress("train", **busy)), (1, progress("train", 2)), (2, progress("explore", requests_failed=3.0))
    )
    assert measured(run)["trainer_idle_share"] == 0.25 and measured(run)["requests_failed"] == 3


def test_a_child_that_cannot_go_on_is_named() -> None:
    states = [
        ChildState(name="train", exit_code=2), ChildState(name="explore", given_up=True),
        ChildState(name="serve", pid=7, failures=3), ChildState(name="load-tasks", exit_code=0),
        ChildState(name="master", pid=8, exit_code=1, failures=1),
    ]  # fmt: skip
    assert failed([{state.name: state for state in states}]) == ["train", "explore", "serve"]


VALUES = {
    "measure": "held-out accuracy", "accuracy_start": 0.0, "accuracy_after_sft": 0.284, "accuracy_final": 0.956,
    "accuracy_final_version": 144, "wall_s": 217.0, "tokens_sampled": 9000, "steps": 143, "warmup_steps": 275,
    "policy_versions": 145, "experiences_published": 80_188, "experiences_trained": 75_184,
    "dropped": {"all rewards equal": 4704}, "pending": 0, "staleness_mean": 1.5, "staleness_max": 2, "mismatch_abs_max": 1e-5,
    "reload_pause_ms_p50": 85.0, "reload_pause_ms_p95": 179.0, "publish_to_serving_ms_p95": 581.0, "requests_failed": 0,
    "rollout_tokens_per_s": 2733.0, "explorer_idle_share": 0.09, "trainer_idle_share": 0.28, "peak_rss_mb": {"kafka": 350.0},
}  # fmt: skip


def test_a_demo_ends_with_the_table_and_a_console_command_that_there_is(tmp_path: Path) -> None:
    printed = io.StringIO()
    print_result(Console(file=printed, width=400, soft_wrap=True), Settings(app="demo", folder=tmp_path), VALUES)
    *_, named, why = (text := printed.getvalue()).strip().splitlines()
    assert "0.0% → 28.4% → 95.6%" in text
    assert named.strip() == f"headrace console -c {tmp_path / 'headrace.toml'}" and "in the browser" in why
    assert any("console" in commands for commands in COMMANDS.values())


def answered(version: int, number: int, response: str) -> Experience:
    """An answer to the held-out task of that number; tasks from 1 on have a pair of kinds that was never trained on."""
    return make_experience(
        id=f"{eval_group('held-out', version, number)}-0-0", group=eval_group("held-out", version, number), episode=0,
        group_size=1, tokens=[1, 2], logprobs=[-1.0], spans=(Span(start=1, stop=2, version=version),), suite="held-out",
        task=f"{'unseen' if number else 'held'}-{number}",
        messages=(Message(role="user", content=f"Prompt {number}"), Message(role="assistant", content=response)),
    )  # fmt: skip


async def test_a_chat_models_report_shows_answers_before_and_after_and_the_pairs_never_trained() -> None:
    log = Log(MemoryBus(lambda: int(START_S * 1000)), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    for version, responses in ((0, ["Hm.", "Hm.", "Hm."]), (9, ["Yes.", "no", "So."])):
        for number, response in enumerate(responses):
            await log.publish(topics.EXPERIENCES, Block(experiences=(answered(version, number, response),)))
    results = [
        EvalResult(policy="main", version=version, suite="held-out", num_tasks=3, num_correct=sum(right), right=right)
        for version, right in ((0, (0, 0, 0)), (9, (1, 0, 1)))
    ]
    found = changes(run_of(*enumerate(results)), (await read_answers(log, "held-out"))[0], "held-out")
    assert found["unseen_pairs"] == {0: 0.0, 9: 0.5} and found["distinct_answers"] == [1, 3]
    assert found["examples"] == [(f"Prompt {n}", "Hm.", said) for n, said in enumerate(["Yes.", "no", "So."])]
    values = VALUES | found | {"nats_from_start": 0.412}
    console = Console(file=io.StringIO(), width=200)
    console.print(result_table(values), examples_table(values))
    assert isinstance(console.file, io.StringIO) and "0.0% → 50.0%" in console.file.getvalue()


def test_the_distance_from_the_start_is_the_mean_of_what_answers_gained_per_sampled_token(tmp_path: Path) -> None:
    folder = str(build_tiny_model(tmp_path, "llama"))
    under = PackedModel(folder, dtype="float32", device="cpu").sequence_logprobs((1, 2, 3, 4))
    answer = make_experience(
        id="t-0.0.0-0-0", group="t-0.0", episode=0, group_size=1, tokens=[1, 2, 3, 4], messages=(),
        logprobs=[under[1] / 2, under[2] / 2], spans=(Span(start=2, stop=4, version=1),),
    )  # fmt: skip
    assert nats_from(folder, [answer]) == pytest.approx(-(under[1] + under[2]) / 4, abs=1e-3)
    assert nats_from(folder, []) is None


def move(event: str, version: int) -> PolicyEvent:
    return PolicyEvent(event=event, policy="main", version=version, channel="stable")  # type: ignore[arg-type]


def moved() -> RunRecord:
    return run_of(
        (1, evaluated(1, 3)), (2, move("promoted", 1)), (3, evaluated(16, 2)), (4, move("held", 16)), (5, evaluated(32, 8)),
        (6, move("promoted", 32)), (7, move("rolled_back", 1)), (8, move("promoted", 32)),
    )  # fmt: skip


def seen(folder: Path, count: int) -> Path:
    """Users' notes, the last of them first: wrong answers of version 1, right ones of version 32, one failure."""
    notes = [Seen(at_s=START_S + n, version=32 if n > count // 2 else 1, liked=n > count // 2) for n in range(count)]
    notes += [Seen(at_s=START_S + count, error="Timeout: no"), Seen(at_s=START_S + count, version=32, habit="spams")]
    path = folder / USERS_FILE
    path.write_bytes(b"".join(msgspec.json.encode(note) + b"\n" for note in reversed(notes)))
    return path


def test_the_traffic_report_tells_the_stable_channel_by_its_moves_and_what_users_saw(tmp_path: Path) -> None:
    found = traffic_values(moved(), seen(tmp_path, 1200), "held-out")
    assert found["stable"] == [[2.0, 1, 0.3], [6.0, 32, 0.8], [7.0, 1, 0.3], [8.0, 32, 0.8]]
    assert (found["stable_first"], found["stable_last"], found["held"]) == (0.3, 0.8, 1)
    assert (found["requests_failed"], found["errors_seen"], found["answers"]) == (1, ["Timeout: no"], 1200)
    rows = dict(traffic_rows(found))
    assert rows["a spammer"] == "liked 1 more answers, 0.0% of them good"
    assert (found["users_liked_first"], found["users_liked_last"]) == (0.0, 1.0)
    assert rows["liked by users"] == "0.0% (0.0% to 0.8%) → 100.0% (99.2% to 100.0%), of 1,200 answers"
    reports = [Progress(role="train", instance="train/1", gauges={"live/staleness_mean": age}) for age in (10.0, 30.0)]
    nobody = traffic_values(run_of(*enumerate(reports)), tmp_path / "none", "held-out")
    assert (nobody["users_liked_last"], nobody["live_staleness_mean"]) == (None, 20.0)
    points = windows(read_seen(seen(tmp_path, 2 * WINDOW)), START_S)
    assert [at_s for at_s, _ in points] == [WINDOW - 1.0, 2 * WINDOW - 1.0], "in the order of time"


@pytest.mark.parametrize("full", [False, True])
def test_the_pictures_can_be_drawn_of_any_run(tmp_path: Path, full: bool) -> None:
    run = moved() if full else run_of()
    if full:
        seen(tmp_path, 600)
    for name, more in (("plot", {}), ("traffic", {"stable": []})):
        draw_plot(run, {"measure": "accuracy", "suite": "held-out", **more}, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_the_users_keys_are_in_their_environment_and_in_no_argument(tmp_path: Path) -> None:
    options = DemoOptions(directory=tmp_path, **TRAFFIC, services=["judge --port 1 'a b'"])
    settings = load_settings(write_settings(options), ("gateway.listen=127.0.0.1:9000",))
    child = users_child(settings, options)
    (service,) = service_children(settings, options.services)
    assert service.argv == ("judge", "--port", "1", "a b")
    keys = child.env["HEADRACE_KEYS"].split(",")
    assert [key[:3] for key in keys] == ["hr-"] * len(TENANTS)
    assert not any(key in argument for key in keys for argument in child.argv)
    assert "http://127.0.0.1:9000/v1" in child.argv
