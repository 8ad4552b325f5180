"""`headrace status`: roles, alarms, what is kept, and which roles should run."""

import asyncio
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from infra.cli.look.expected import Heard, expected_roles, missing, process_name
from infra.cli.look.kept import FOREVER, Kept, list_kept, topic_bound
from infra.cli.look.status import alarms, read_status
from infra.cli.look.status_screen import accuracy_text, show
from infra.cli.settings import Expect, load_settings
from infra.ledger.index import FILE, LogIndex
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.roles.role import instance_name
from schemas import DeadLetter, Directive, EvalResult, FeedbackWait, Fence, PolicyEvent, Progress, Tick, topics

START_MS = 1_763_715_600_000


class Clock:
    """Log-append milliseconds, set by hand."""

    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


def progress(role: str, *, state: str = "running", version: int = -1, **counters: float) -> Progress:
    return Progress(role=role, instance=f"{role}/1", state=state, version=version, counters=counters)


def state_of(
    *events: tuple[float, Progress | PolicyEvent | EvalResult | Directive], now_s: float, max_lag: int = 10
) -> dict:
    """The status of a log in which each event was stored at its second."""

    async def main() -> dict:
        clock = Clock()
        log = Log(MemoryBus(clock), "t")
        await log.create_topics(partitions=2, keep_ms=-1)
        homes = {
            Progress: topics.REPORTS, PolicyEvent: topics.POLICIES, EvalResult: topics.EVALS, Directive: topics.POLICIES
        }  # fmt: skip
        for at_s, event in events:
            clock.now_ms = START_MS + int(at_s * 1000)
            await log.publish(homes[type(event)], event)
        return await read_status(log, now_s=START_MS / 1000 + now_s, max_lag=max_lag, groups=16)

    return asyncio.run(main())


def shown(state: dict, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console, state)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_are_those_of_the_last_minute() -> None:
    state = state_of(
        (0, progress("train", steps=0.0)),
        (100, progress("train", steps=1000.0)),
        (140, progress("train", steps=1020.0)),
        (160, progress("train", steps=1030.0)),
        now_s=161,
    )
    (role,) = state["roles"]
    assert role["per_s"] == {"steps": 0.5} and role["age_s"] == 1.0 and not role["silent"]
    assert state["alarms"] == []


def test_of_a_counter_that_stands_still_the_rate_is_zero_and_of_one_that_was_told_once_there_is_none() -> None:
    told = {"answers{end=whole}": 30.0, "answers{end=broken off}": 2.0}
    state = state_of(
        (0, progress("serve", **told)), (30, progress("serve", **told | {"answers{end=whole}": 90.0})), now_s=31
    )
    assert state["roles"][0]["rates"] == {"answers{end=whole}": 2.0, "answers{end=broken off}": 0.0}
    assert state_of((0, progress("serve", **told)), now_s=1)["roles"][0]["rates"] == {}


def test_a_role_that_fell_silent_is_an_alarm_and_one_that_ended_in_order_is_not() -> None:
    state = state_of(
        (0, progress("train")), (0, progress("process", state="stopped")), (95, progress("master")), now_s=100
    )
    assert state["alarms"] == ["train/1 has been silent for 100 s"]
    assert [role["silent"] for role in state["roles"]] == [False, False, True]


def test_a_restarted_role_hides_the_process_that_died() -> None:
    old = Progress(role="train", instance="train/1", state="learning")
    state = state_of((0, old), (90, Progress(role="train", instance="train/2", state="learning")), now_s=100)
    assert [role["instance"] for role in state["roles"]] == ["train/2"] and state["alarms"] == []


def test_nobody_there_is_an_alarm() -> None:
    assert state_of(now_s=0)["alarms"] == ["no role has reported"]


@pytest.mark.parametrize("counter", ["alarms{alarm=usual/ess}", "steps_skipped", "requests_failed", "policies_refused"])
def test_a_counter_that_should_stand_still_is_an_alarm_for_a_minute_after_it_grew(counter: str) -> None:
    def at(later_s: float) -> list[str]:
        return state_of(
            (0, progress("train", **{counter: 1.0})),
            (30, progress("train", **{counter: 3.0})),
            (30 + later_s, progress("train", **{counter: 3.0})),
            now_s=31 + later_s,
        )["alarms"]

    assert at(20) == [f"train/1: {counter} +2 in the last minute"]
    assert at(70) == []


def test_what_a_role_says_somebody_should_look_at_is_an_alarm() -> None:
    said = Progress(role="master", instance="master/1", state="issuing", alarms=("complaints come late",))
    assert "master/1: complaints come late" in state_of((0, said), now_s=1)["alarms"]


def test_the_newest_policy_being_refused_is_an_alarm_and_an_older_one_is_history() -> None:
    published = [(0.0, PolicyEvent(event="published", policy="main", version=version)) for version in (1, 2)]
    refused = PolicyEvent(event="refused", policy="main", version=2, owner="explore/7", reason="NaN in lm_head")
    state = state_of(*published, (1, refused), (2, progress("explore")), now_s=3)
    assert state["policies"]["published"] == 2
    assert state["alarms"] == ["policy v2 was refused: v2 by explore/7: NaN in lm_head"]
    later = (2, PolicyEvent(event="published", policy="main", version=3))
    assert state_of(*published, (1, refused), later, (2, progress("explore")), now_s=3)["alarms"] == []


def test_a_pause_is_shown_with_who_asked_for_it_until_somebody_resumes() -> None:
    paused = (1.0, Directive(order="pause", owner="ann@ops-1", reason="odd feedback"))
    state = state_of(paused, (1.5, Directive(order="forget", about="9f")), (2, progress("train")), now_s=3)
    assert state["learning"]["state"] == "paused" and state["alarms"] == []
    assert "paused by ann@ops-1" in shown(state) and "odd feedback" in shown(state)
    resumed = state_of(paused, (2.0, Directive(order="continue")), (2, progress("train")), now_s=3)
    assert resumed["learning"] == {"state": "on"} and "paused" not in shown(resumed)


def test_drops_are_added_up_over_roles_by_reason() -> None:
    name = "dropped{reason=too short}"
    state = state_of(
        (0, progress("process", **{name: 3.0})),
        (1, progress("train", **{name: 2.0, "dropped{reason=stale}": 9.0})),
        now_s=2,
    )
    assert state["dropped"] == {"stale": 9, "too short": 5}


def test_accuracy_is_the_newest_of_each_suite() -> None:
    results = [
        (0.0, EvalResult(policy="main", version=version, suite=suite, num_tasks=10, num_correct=version))
        for version, suite in ((1, "dev"), (3, "dev"), (2, "held-out"))
    ]
    state = state_of(*results, now_s=1)
    found = {suite: (item["version"], item["share"]) for suite, item in state["accuracy"].items()}
    assert found == {"dev": (3, 0.3), "held-out": (2, 0.2)}


def test_accuracy_is_told_with_its_interval_and_pass_at_k() -> None:
    result = EvalResult(
        policy="main", version=3, suite="dev", num_tasks=10, num_correct=12, num_samples=4,
        pass_at={"1": 0.3, "4": 0.8}, interval=(0.2, 0.4),
    )  # fmt: skip
    state = state_of((0.0, result), now_s=1)
    assert accuracy_text(state["accuracy"]["dev"]) == "30.0% (20.0% to 40.0%), pass@4 80.0%"


def test_lag_is_what_a_group_has_yet_to_commit_and_too_much_is_an_alarm() -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t")
        await log.create_topics(partitions=2, keep_ms=-1)
        reader = await log.subscribed(topics.VERIFIED, group="collect")
        for index in (0, 1, 1):
            await log.publish(topics.VERIFIED, Tick(partition=index, due_ms=0))
        await log.publish(topics.REPORTS, progress("process"))
        state = await read_status(log, now_s=time.time(), max_lag=2)
        assert state["lags"]["verified"] == 3 and state["lags"]["tasks"] is None
        assert state["alarms"] == ["verified: 3 records wait, expected at most 2"]
        assert alarms(state, 3) == []
        await reader.close()

    asyncio.run(main())


def test_the_screen_shows_roles_policies_drops_and_alarms() -> None:
    drop = {"dropped{reason=[odd]}": 1234.0}
    events: list[tuple[float, Progress | PolicyEvent | EvalResult]] = [
        (0, PolicyEvent(event="published", policy="main", version=7)),
        (1, PolicyEvent(event="refused", policy="main", version=7, owner="e", reason="[NaN]")),
        (0, progress("train", version=6, steps=10.0, **drop)),
        (10, progress("train", version=7, steps=30.0, **drop)),
        (10, EvalResult(policy="main", version=7, suite="dev", num_tasks=10, num_correct=9)),
    ]
    lines = shown(state_of(*events, now_s=12)).splitlines()
    has: Callable[..., bool] = lambda *words: any(all(word in line for word in words) for line in lines)  # noqa: E731
    assert has("train/1", "running", "v7", "2 s ago", "steps 2")
    assert has("published", "v7") and has("accuracy", "dev 90.0% at v7")
    assert has("dropped", "[odd] 1,234") and has("alarm", "policy v7 was refused", "[NaN]")
    assert has("lag", "no consumer has committed yet")


def test_what_was_stopped_is_shown_with_the_reason_and_what_it_had_sampled() -> None:
    counters = {"episodes_cancelled{reason=enough others}": 12.0, "tokens_cancelled{reason=enough others}": 3400.0}
    state = state_of((0, progress("explore", **counters)), (1, progress("explore", **counters)), now_s=1)
    assert state["cancelled"] == {"episodes": {"enough others": 12}, "tokens": {"enough others": 3400}}
    assert "stopped    12 episodes: enough others (3,400 sampled tokens)" in shown(state)


def test_tokens_that_were_too_old_are_shown() -> None:
    state = state_of((0, progress("train", tokens_masked=1200.0)), now_s=1)
    assert state["masked"] == 1200 and "masked     1,200 tokens older than" in shown(state)
    assert "masked" not in shown(state_of((0, progress("train")), now_s=1))


def test_what_waits_for_the_share_of_a_tenant_is_shown() -> None:
    report = Progress(role="train", instance="train/1", state="learning", gauges={"held_back": 1234.0})
    assert "held back  1,234 experiences" in shown(state_of((0, report), now_s=1))


def test_the_cache_of_a_machine_is_that_of_its_newest_report() -> None:
    report = lambda name, held: Progress(  # noqa: E731
        role="explore",
        instance=f"explore/{name}",
        state="running",
        gauges={"host_cache_bytes": held, "host_cache_max_bytes": 20e9},
    )
    state = state_of((0, report("a/2", 3e9)), (1, report("a/1", 5e9)), (1, report("b/1", 0.0)), now_s=2)
    assert state["caches"] == {
        "a": {"bytes": 5e9, "max_bytes": 20e9},
        "b": {"bytes": 0.0, "max_bytes": 20e9},
    }


def test_a_role_whose_clock_is_ahead_was_heard_just_now() -> None:
    assert "0 s ago" in (said := shown(state_of((1.2, progress("explore")), now_s=1))) and "-0 s" not in said


def test_the_chain_in_force_on_each_partition_is_listed_while_workers_are_replaced_one_by_one() -> None:
    def worker(name: str, chain: str, *held: int, state: str = "running") -> Progress:
        return Progress(
            role="process", instance=name, state=state, chains={"verify": chain}, partitions={"verify": held}
        )

    state = state_of(
        (0, worker("process-0/1", "validate@1 dedupe@1", 0, 1, 2)),
        (40, worker("process-0/1", "validate@1 dedupe@1", 0, 2)),
        (40, worker("process-1/2", "validate@1 dedupe@2", 1)),
        now_s=41,
    )
    old, new = "validate@1 dedupe@1", "validate@1 dedupe@2"
    assert state["chains"] == {"verify": {"0": old, "1": new, "2": old}}
    lines = shown(state).splitlines()
    assert f"chain      verify 0, 2: {old}" in lines and f"chain      verify 1: {new}" in lines


def failures(failed: float, out: float) -> list[str]:
    counters = {"experiences_out{stage=verify}": out, "step_failed{stage=verify,step=raises@1}": failed}
    began, now = progress("process"), progress("process", **counters)
    found: list[str] = state_of((0.0, began), (30.0, now), now_s=31.0)["alarms"]
    return found


def test_a_step_that_fails_more_often_than_it_may_is_an_alarm_that_names_it() -> None:
    (alarm,) = failures(3, 37)
    assert alarm.startswith("process/1: verify: step raises@1 failed on 3 of 40 in the last minute; ")
    assert failures(40, 0)
    assert failures(2, 38) == []


def test_the_release_of_each_role_is_shown_as_the_command_says_its_own() -> None:
    def told(*releases: str) -> str:
        reports = (
            Progress(role="explore", instance=f"explore/vm/{at}", state="exploring", release=release)
            for at, release in enumerate(releases)
        )
        return shown(state_of(*((0.0, report) for report in reports), now_s=1.0))

    assert "release    0.1.0 (9f00a1b2c3d4) at all roles" in told("0.1.0 (9f00a1b2c3d4)", "0.1.0 (9f00a1b2c3d4)")
    lines = told("0.1.0", "0.2.0", "").splitlines()
    assert "release    0.1.0 at explore/vm/0" in lines and "release    0.2.0 at explore/vm/1" in lines
    assert "release" not in told("", "")


def worker(number: int, waits: FeedbackWait | None, state: str = "running") -> Progress:
    return Progress(role="process", instance=f"process/vm/{number}", state=state, waits=waits)


def test_how_many_answers_wait_for_feedback_and_when_the_first_closes() -> None:
    first_ms = START_MS + 23 * 3_600_000
    state = state_of(
        (0, worker(1, FeedbackWait(answers=380, first_ms=first_ms + 1000))),
        (0, worker(2, FeedbackWait(answers=6, first_ms=first_ms))),
        (0, worker(3, FeedbackWait())),
        (0, worker(4, FeedbackWait(answers=9, first_ms=1), "stopped")),
        (0, worker(5, None)),
        now_s=0,
    )
    assert state["waiting"] == {"answers": 386, "first_s": 23 * 3600.0}
    assert "waiting    386 answers for feedback; the first window closes in 23 h" in shown(state)


def test_what_a_silent_worker_held_is_not_counted_twice_and_where_nothing_waits_no_line_says_so() -> None:
    state = state_of(
        (0, worker(1, FeedbackWait(answers=380, first_ms=START_MS))),
        (100, worker(2, FeedbackWait(answers=380, first_ms=START_MS))),
        now_s=101,
    )
    assert state["waiting"] == {"answers": 380, "first_s": 0.0}, "its window has passed: it closes with the next record"
    state = state_of((0, worker(1, FeedbackWait())), now_s=1)
    assert state["waiting"] == {} and "waiting" not in shown(state)


TRAINER = Progress(role="train", instance="train/1", state="learning", gauges={"groups_waiting": 3.0})


def master(state: str = "issuing", **ends: float) -> Progress:
    counters = {f"closures_read{{outcome={end}}}".replace("__", ",reason="): number for end, number in ends.items()}
    return Progress(role="master", instance="master/1", state=state, counters=counters)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ((TRAINER, master()), "waiting for groups (3 of 16)"),
        ((TRAINER, master(dropped__equal=384, dropped__stale=2)),
         "waiting for groups (3 of 16); all 386 groups so far were dropped: equal"),
        ((TRAINER, master(dropped__equal=384, buffered__=1)), "waiting for groups (3 of 16)"),
        ((progress("train", state="supervised warm-up"),), "supervised warm-up"),
    ],
)  # fmt: skip
def test_a_trainer_without_a_step_says_what_it_waits_for_and_why(reports: tuple[Progress, ...], said: str) -> None:
    state = state_of(*((0.0, report) for report in reports), now_s=1)
    assert {role["role"]: role["state"] for role in state["roles"]}["train"] == said


def test_a_trainer_that_makes_steps_is_learning() -> None:
    later = msgspec.structs.replace(TRAINER, counters={"steps": 1.0})
    state = state_of((0, msgspec.structs.replace(TRAINER, counters={"steps": 0.0})), (5, later), now_s=6)
    assert state["roles"][0]["state"] == "learning"


def test_a_master_that_waits_for_a_version_and_a_trainer_that_waits_for_groups_are_an_alarm() -> None:
    (alarm,) = state_of((0, TRAINER), (0, master("warming up")), now_s=1)["alarms"]
    assert "this run began without a warm-up" in alarm
    assert (
        state_of((0, progress("train", state="supervised warm-up")), (0, master("warming up")), now_s=1)["alarms"] == []
    )


@pytest.mark.parametrize(
    ("now_s", "clock", "silent"),
    [
        (12, "", False),
        (-3600, "this machine's clock is 60 min behind the log's: ages are since the newest report", False),
        (7230, "the newest report is 2 h old: no role runs, or this machine's clock is ahead of the log's", True),
    ],
)
def test_ages_are_by_the_log_s_clock_which_is_at_its_newest_report_at_least(
    now_s: float, clock: str, silent: bool
) -> None:
    state = state_of((9, progress("explore")), (10, progress("train")), now_s=now_s)
    assert state["clock"] == clock and [role["silent"] for role in state["roles"]] == [silent, silent]
    assert state["roles"][0]["age_s"] - state["roles"][1]["age_s"] == pytest.approx(1.0)


def test_status_of_a_usual_run_fits_80_columns_and_24_lines() -> None:
    counters = dict.fromkeys(("steps", "experiences_trained", "tokens", "policy_versions", "tokens_masked"), 123_456.0)
    drops = {"dropped{reason=equal}": 4012.0, "dropped{reason=stale}": 300.0, "episodes_cancelled{reason=enough}": 9.0}
    gauges = {"host_cache_bytes": 3e9, "host_cache_max_bytes": 20e9, "snapshot_bytes{partition=0}": 5e6}
    chains = {"verify": "validate@1 dedupe@1 filter@1 exact@1", "collect": "synthesize@1 usual@1 balance@1"}
    first = [
        Progress(
            role=role, instance=f"{role}/{at}.gpu-node-17/40{at}", state="learning", version=123, release="0.1.0 (9f00)",
            gauges=gauges, chains=chains, partitions={"verify": (0, 1), "collect": (0, 1)},
            counters=dict.fromkeys(counters, 0.0),
        )
        for at, role in enumerate(("master", "explore", "explore", "serve", "process", "train"))
    ]  # fmt: skip
    later = [msgspec.structs.replace(report, counters=counters | drops) for report in first]
    results = [
        EvalResult(policy="main", version=7, suite=suite, num_tasks=10, num_correct=9, interval=(0.8, 0.95))
        for suite in ("held-out", "production")
    ]
    events = [PolicyEvent(event="published", policy="main", version=123), *results]
    reports = [*((0.0, report) for report in first), *((30.0, report) for report in later)]
    state = state_of(*((0.0, event) for event in events), *reports, now_s=31)
    lines = shown(state | {"alarms": []}, width=80).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, "\n".join(lines)
    for hidden in ("cache", "chain", "snapshots", "kept"):
        assert not any(line.startswith(hidden) for line in lines), hidden


SETTINGS = 'app = "t"\n[keep]\nreplay = "9d"\n[trainer]\nkeep_checkpoints = 5\n[gateway]\nspool_mb = 64\n'
GAUGES = {
    "spool_bytes": 2e6, "uses_remembered": 42.0, "host_cache_bytes": 3e9, "host_cache_max_bytes": 20e9,
    "snapshot_bytes{partition=0}": 5e6,
}  # fmt: skip


def look(folder: Path) -> tuple[dict[str, Kept], str]:
    async def main() -> tuple[dict[str, Kept], str]:
        (folder / "headrace.toml").write_text(SETTINGS)
        settings, log = load_settings(folder / "headrace.toml", []), Log(MemoryBus(), "t")
        await log.create_topics(partitions=2, keep_ms=-1)
        for number in range(5):
            letter = DeadLetter(stage="verify", reason="odd", topic="t", partition=0, offset=number)
            await log.publish(topics.DEAD_LETTERS, letter, partition=number % 2)
            await log.publish(topics.BATCHES, Fence(run="t", token=number))
        await log.bus.delete_records(Partition(log.name(topics.DEAD_LETTERS), 0), 2)
        await log.publish(topics.POLICIES, PolicyEvent(event="published", policy="main", version=1))
        await log.publish(topics.REPORTS, Progress(role="serve", instance="serve/vm/1", gauges=GAUGES))
        state = await read_status(log, now_s=0.0, max_lag=10)
        kept = await list_kept(log, settings, state["roles"])
        return {item.what: item for item in kept}, shown({**state, "kept": msgspec.to_builtins(kept)})

    return asyncio.run(main())


def test_every_topic_has_a_bound_or_says_what_it_grows_by() -> None:
    bounds = {topic.name: topic_bound(topic, "9d") for topic in topics.ALL}
    endless = {name for name, bound in bounds.items() if bound.startswith("for ever: ")}
    assert endless == set(FOREVER) == {
        topic.name for topic in topics.ALL if topic.retention == "forever"
    }  # fmt: skip
    assert bounds["buffer"] == "the oldest checkpoint that is kept"
    assert (
        bounds["batches"] == "9d (keep.replay), and back to the checkpoint before it" and bounds["reports"] == "a day"
    )


def test_what_is_kept_is_shown_with_its_size_and_its_bound(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "index.sqlite").write_bytes(bytes(1_500_000))
    kept, screen = look(tmp_path)
    assert kept["topic dead-letters"] == Kept("topic dead-letters", "9d (keep.replay)", 3), "two were removed"
    assert kept["topic batches"].num == 5 and kept["topic batches"].bound.startswith("9d (keep.replay)")
    assert kept["spool of serve/vm/1"] == Kept("spool of serve/vm/1", "64 MB (gateway.spool_mb)", 2_000_000, "bytes")
    assert kept["uses at serve/vm/1"].num == 42
    assert kept["cache at serve/vm/1"].bound == "20 GB (store.cache_gb)"
    assert kept["store snapshots/, each"].num == 5_000_000
    assert "the newest 5 (trainer.keep_checkpoints)" in kept["store checkpoints/"].bound
    assert kept["file state/index.sqlite"].num == 1_500_000
    lines = " ".join(screen.split())
    assert "kept 9d (keep.replay), and back to the checkpoint before it: topic batches 5 records" in lines
    assert "kept 64 MB (gateway.spool_mb): spool of serve/vm/1 2.0 MB" in lines


def test_tables_of_the_index_are_shown_with_their_rows_and_bounds_and_without_rows_where_the_file_is_broken(
    tmp_path: Path,
) -> None:
    index = LogIndex(tmp_path / "state" / FILE, run="t", policy="main")
    with index.database as database:
        database.executemany("INSERT INTO curves VALUES ('loss', ?, 0, 0, 1)", [(n,) for n in range(7)])
    index.close()
    kept, screen = look(tmp_path)
    assert kept["index curves"] == Kept("index curves", "the newest 50,000 versions", 7, "rows")
    assert kept["index answers"] == Kept("index answers", "9d (keep.replay)", 0, "rows")
    assert "kept the newest 50,000 versions: index policies 0 rows, index curves 7 rows" in " ".join(screen.split())
    (tmp_path / "state" / FILE).write_bytes(b"no index at all" * 1000)
    kept, _ = look(tmp_path)
    assert kept["index curves"] == Kept("index curves", "the newest 50,000 versions", None, "rows")


def test_looking_at_what_is_kept_loads_no_torch() -> None:
    said = "import sys, infra.cli.look.status; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True).stdout == "False\n"


NOW_S = 1_763_715_600.0
GONE_S = 15.0
ALL = expected_roles(Expect(), serves=False)
SERVED = expected_roles(Expect(), serves=True)
VM = socket.gethostname()


def named(role: str, pid: int, host: str = VM, epoch: str = "") -> str:
    """As `instance_name` names a process, and a gateway itself."""
    assert instance_name(role) == f"{role}/{VM}/{os.getpid()}"
    return f"{role}/{host}/{pid}" + (f"/{epoch}" if epoch else "")


def heard(
    instance: str, *, ago_s: float = 1.0, began_s: float = 7200.0, state: str = "running", reason: str = ""
) -> Heard:
    role = instance.split("/")[0]
    return Heard(role, instance, state, NOW_S - max(began_s, ago_s), NOW_S - ago_s, reason)


def said(*roles: Heard, wanted: dict[str, int] = ALL) -> list[str]:
    return missing(wanted, roles, NOW_S, GONE_S)


OTHERS = (heard(named("master", 1)), heard(named("process", 3)), heard(named("train", 4)))
ALIVE = (heard(named("master", 1)), heard(named("process", 3)), heard(named("explore", 11)))


def test_a_trainer_that_stopped_and_was_not_started_again_is_an_alarm() -> None:
    stopped = heard(named("train", 4608), ago_s=753.0, state="stopped")
    assert said(*ALIVE, stopped) == [f"no train runs: train/{VM}/4608 stopped 753 s ago"]


def test_a_role_that_failed_says_why() -> None:
    failed = heard(named("train", 9), ago_s=20.0, state="failed", reason="checkpoint of step 4 does not fit")
    assert said(*ALIVE, failed) == [f"no train runs: train/{VM}/9 ended 20 s ago: checkpoint of step 4 does not fit"]


def test_a_role_that_never_came_up_is_an_alarm() -> None:
    (line,) = said(*ALIVE, heard(named("train", 9)), wanted=SERVED)
    assert line == "no serve runs: none has ever reported; see its log"


def test_one_of_two_explorers_of_a_machine_is_missing_until_one_is_started_in_its_place() -> None:
    roles = (*OTHERS, heard(named("explore", 11)), heard(named("explore", 12), ago_s=60.0))
    assert said(*roles) == [f"1 of 2 explore run: explore/{VM}/12 last reported 60 s ago"]
    assert said(*roles, heard(named("explore", 13), began_s=30.0)) == []
    elsewhere = heard(named("explore", 11, "pod-2"), began_s=30.0)
    assert said(*roles, elsewhere) == [], "on whatever machine"


def test_who_was_there_before_takes_no_place() -> None:
    here = heard(named("explore", 11, "pod-2"), began_s=600.0)
    (line,) = said(*OTHERS, here, heard(named("explore", 12), ago_s=60.0))
    assert line.startswith("1 of 2 explore run")


def test_one_process_takes_the_place_of_one() -> None:
    lost = [heard(named("explore", 20 + at), ago_s=60.0 + at) for at in range(3)]
    (line,) = said(*OTHERS, heard(named("explore", 11), began_s=10.0), *lost)
    assert line.startswith("1 of 3 explore run: ")


def test_what_crashes_again_and_again_is_missing_once() -> None:
    crashes = [
        heard(named("explore", 20 + at), ago_s=100.0 - at, began_s=100.5 - at, state="failed", reason="no such model")
        for at in range(0, 60, 2)
    ]
    (line,) = said(*OTHERS, heard(named("explore", 11)), *crashes)
    assert line == f"1 of 2 explore run: explore/{VM}/78 ended 42 s ago: no such model"


def test_a_gateway_that_was_killed_and_started_again_misses_nobody() -> None:
    killed = heard(named("serve", 5, epoch="0badcafe"), ago_s=60.0)
    again = heard(named("serve", 6, epoch="9f00a1b2"), began_s=40.0)
    roles = (*OTHERS, heard(named("explore", 11)))
    assert said(*roles, killed, again, wanted=SERVED) == []
    in_a_container = heard(named("serve", 5, epoch="9f00a1b2"), began_s=40.0)
    assert process_name(killed.instance) == process_name(in_a_container.instance)
    assert said(*roles, killed, in_a_container, wanted=SERVED) == []


def test_why_a_gateway_ended_is_told_though_its_last_word_lacks_its_start() -> None:
    failed = heard(named("serve", 5), ago_s=3.0, state="failed", reason="the engine is gone")
    roles = (*OTHERS, heard(named("explore", 11)), heard(named("serve", 5, epoch="0badcafe"), ago_s=4.0))
    assert said(*roles, failed, wanted=SERVED) == [f"no serve runs: serve/{VM}/5 ended 3 s ago: the engine is gone"]


def test_what_was_stopped_in_order_is_not_missing_where_another_took_over() -> None:
    old = heard(named("explore", 11, "pod-1"), ago_s=30.0, state="stopped")
    new = heard(named("explore", 11, "pod-2"), began_s=120.0)
    assert said(*OTHERS, old, new) == [], "they ran side by side, then the old one was stopped"
    (line,) = said(*OTHERS, old)
    assert line == "no explore runs: explore/pod-1/11 stopped 30 s ago"


def test_who_died_over_an_hour_ago_is_not_missed() -> None:
    roles = (*OTHERS, heard(named("explore", 11)))
    assert said(*roles, heard(named("explore", 12), ago_s=3590.0))
    assert said(*roles, heard(named("explore", 12), ago_s=3610.0)) == []


def test_the_file_may_say_how_many_there_should_be() -> None:
    wanted = expected_roles(Expect(explore=3), serves=False)
    (line,) = said(*OTHERS, heard(named("explore", 11)), wanted=wanted)
    assert line.startswith("1 of 3 explore run")
    lost = heard(named("explore", 12), ago_s=60.0)
    wanted = expected_roles(Expect(explore=1), serves=False)
    assert said(*OTHERS, heard(named("explore", 11)), lost, wanted=wanted) == [], "the file comes first"


def test_a_run_that_came_to_its_end_misses_nobody() -> None:
    over = [heard(item.instance, ago_s=900.0, state="stopped") for item in ALIVE[1:]]
    done = heard(named("master", 1), ago_s=900.0, state="done")
    assert said(done, *over) == []
    assert len(said(*over)) == 4, "what was stopped by hand is not running"
