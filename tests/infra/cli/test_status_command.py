"""`headrace status`: roles, alarms, what is kept, and which roles should run."""

import asyncio
import io
import socket
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from infra.cli.look.kept import FOREVER, Kept, list_kept, topic_bound
from infra.cli.look.reader import Spoken, expected_roles, missing
from infra.cli.look.status import accuracy_text, alarms, read_status, show
from infra.cli.settings import Expect, load_settings
from infra.ledger.index import FILE, LogIndex
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import DeadLetter, Directive, EvalResult, FeedbackWait, Fence, PolicyEvent, Progress, Tick, topics
from tests.streams.deliveries import START_MS, Clock

Event = tuple[float, Progress | PolicyEvent | EvalResult | Directive]


def progress(role: str, *, state: str = "running", version: int = -1, **counters: float) -> Progress:
    return Progress(role=role, instance=f"{role}/1", state=state, version=version, counters=counters)


def published(version: int) -> PolicyEvent:
    return PolicyEvent(event="published", policy="main", version=version)


def state_of(*events: Event, now_s: float, max_lag: int = 10) -> dict:
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


def test_rates_are_those_of_the_last_minute_and_a_counter_reported_once_has_none() -> None:
    steps = ((0, 0.0), (100, 1000.0), (140, 1020.0), (160, 1030.0))
    state = state_of(*((at, progress("train", steps=count)) for at, count in steps), now_s=161)
    (role,) = state["roles"]
    assert role["per_s"] == {"steps": 0.5} and role["age_s"] == 1.0 and not role["silent"] and state["alarms"] == []
    told = {"answers{end=whole}": 30.0, "answers{end=broken off}": 2.0}
    later = (30, progress("serve", **told | {"answers{end=whole}": 90.0}))
    rates = state_of((0, progress("serve", **told)), later, now_s=31)["roles"][0]["rates"]
    assert rates == {"answers{end=whole}": 2.0, "answers{end=broken off}": 0.0}
    assert state_of((0, progress("serve", **told)), now_s=1)["roles"][0]["rates"] == {}


REFUSES = Progress(role="explore", instance="explore/7", state="serving", refused={2: "NaN in lm_head"})
TRAINER = Progress(role="train", instance="train/1", state="learning", gauges={"groups_waiting": 3.0})
ODD = Progress(role="master", instance="master/1", state="issuing", alarms=("complaints come late",))


def master(state: str = "issuing", **ends: float) -> Progress:
    counters = {f"closures_read{{outcome={end}}}".replace("__", ",reason="): number for end, number in ends.items()}
    return Progress(role="master", instance="master/1", state=state, counters=counters)


@pytest.mark.parametrize(
    ("events", "now_s", "expected"),
    [
        ((), 0, ["no role has reported"]),
        (((0, progress("train")), (0, progress("process", state="stopped")), (95, progress("master"))), 100,
         ["train/1 has been silent for 100 s"]),
        (((0, progress("train")), (90, Progress(role="train", instance="train/2", state="learning"))), 100, []),
        (((0, ODD),), 1, ["master/1: complaints come late"]),
        (((0, published(1)), (0, published(2)), (2, REFUSES)), 3,
         ["policy v2 was refused: v2 by explore/7: NaN in lm_head"]),
        (((0, published(2)), (1, REFUSES), (2, published(3))), 3, []),
    ],
    ids=["nobody", "silent", "restarted", "a role's own", "newest refused", "refused and replaced"],
)  # fmt: skip
def test_what_an_operator_should_look_at_is_an_alarm_and_what_ended_in_order_is_none(
    events: tuple[Event, ...], now_s: float, expected: list[str]
) -> None:
    assert state_of(*events, now_s=now_s)["alarms"] == expected


@pytest.mark.parametrize("counter", ["alarms{alarm=usual/ess}", "steps_skipped", "requests_failed", "policies_refused"])
def test_a_counter_that_should_stand_still_is_an_alarm_for_a_minute_after_it_grew(counter: str) -> None:
    def at(later_s: float) -> list[str]:
        grown = ((0, 1.0), (30, 3.0), (30 + later_s, 3.0))
        return state_of(*((at_s, progress("train", **{counter: count})) for at_s, count in grown), now_s=31 + later_s)[
            "alarms"
        ]

    assert at(20) == [f"train/1: {counter} +2 in the last minute"] and at(70) == []


@pytest.mark.parametrize(("failed", "out", "alarms"), [(3, 37, 1), (40, 0, 1), (2, 38, 0)])
def test_a_step_that_fails_more_often_than_it_may_is_an_alarm_that_names_it(
    failed: float, out: float, alarms: int
) -> None:
    counters = {"experiences_out{stage=verify}": out, "step_failed{stage=verify,step=raises@1}": failed}
    found = state_of((0.0, progress("process")), (30.0, progress("process", **counters)), now_s=31.0)["alarms"]
    said = f"process/1: verify: step raises@1 failed on {failed} of {failed + out} in the last minute; "
    assert len(found) == alarms and all(line.startswith(said) for line in found)


def test_accuracy_is_the_newest_of_each_suite_with_its_interval_and_pass_at_k() -> None:
    results = [
        (0.0, EvalResult(policy="main", version=version, suite=suite, num_tasks=10, num_correct=version))
        for version, suite in ((1, "dev"), (3, "dev"), (2, "held-out"))
    ]
    state = state_of(*results, now_s=1)
    found = {suite: (item["version"], item["share"]) for suite, item in state["accuracy"].items()}
    assert found == {"dev": (3, 0.3), "held-out": (2, 0.2)}
    sampled = EvalResult(
        policy="main", version=3, suite="dev", num_tasks=10, num_correct=12, num_samples=4,
        pass_at={"1": 0.3, "4": 0.8}, interval=(0.2, 0.4),
    )  # fmt: skip
    accuracy = state_of((0.0, sampled), now_s=1)["accuracy"]["dev"]
    assert accuracy_text(accuracy) == "30.0% (20.0% to 40.0%), pass@4 80.0%"


async def test_lag_is_what_a_group_has_yet_to_commit_and_too_much_is_an_alarm() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=2, keep_ms=-1)
    reader = await log.subscribed(topics.VERIFIED, group="collect")
    for index in (0, 1, 1):
        await log.publish(topics.VERIFIED, Tick(partition=index, due_ms=0))
    await log.publish(topics.REPORTS, progress("process"))
    state = await read_status(log, now_s=time.time(), max_lag=2)
    assert state["lags"]["verified"] == 3 and state["lags"]["tasks"] is None
    assert state["alarms"] == ["verified: 3 records wait, expected at most 2"] and alarms(state, 3) == []
    await reader.close()


def worker(number: int, waits: FeedbackWait | None, state: str = "running") -> Progress:
    return Progress(role="process", instance=f"process/vm/{number}", state=state, waits=waits)


def test_the_steps_in_force_are_told_by_stage_and_partition() -> None:
    first, second = (
        Progress(role="process", instance=name, chains={"verify": chain}, partitions={"verify": held})
        for name, chain, held in (("process-0/1", "dedupe@1", (0, 2)), ("process-1/2", "dedupe@2", (1,)))
    )
    state = state_of((0, first), (1, second), now_s=2)
    assert state["chains"] == {"verify": {"0": "dedupe@1", "1": "dedupe@2", "2": "dedupe@1"}}


DROPS = {"dropped{reason=[odd]}": 1234.0}
FIRST_MS = START_MS + 23 * 3_600_000


@pytest.mark.parametrize(
    ("events", "now_s", "lines"),
    [
        (
            ((0, published(7)), (9, Progress(role="e", instance="e", state="serving", refused={7: "[NaN]"})),
             (0, progress("train", version=6, steps=10.0, **DROPS)), (10, progress("train", version=7, steps=30.0, **DROPS)),
             (10, EvalResult(policy="main", version=7, suite="dev", num_tasks=10, num_correct=9))), 12,
            ["train/1 running v7 2 s ago steps 2", "published v7", "accuracy dev 90.0% at v7", "dropped [odd] 1,234",
             "alarm policy v7 was refused: v7 by e: [NaN]", "lag no consumer has committed yet"],
        ),
        (
            ((0, progress("process", **{"dropped{reason=too short}": 3.0})),
             (1, progress("train", **{"dropped{reason=too short}": 2.0, "dropped{reason=stale}": 9.0}))), 2,
            ["dropped stale 9, too short 5"],
        ),
        (((0, Progress(role="train", instance="train/1", state="learning", gauges={"held_back": 1234.0})),), 1,
         ["held back 1,234 experiences: tenant_share or subject_share of the last step is used up"]),
        (
            ((0, worker(1, FeedbackWait(answers=380, first_ms=FIRST_MS + 1000))), (0, worker(2, FeedbackWait(6, FIRST_MS))),
             (0, worker(3, FeedbackWait())), (0, worker(4, FeedbackWait(9, 1), "stopped")), (0, worker(5, None))), 0,
            ["waiting 386 answers for feedback; the first window closes in 23 h"],
        ),
        (((0, worker(1, FeedbackWait(380, START_MS))), (100, worker(2, FeedbackWait(380, START_MS)))), 101,
         ["waiting 380 answers for feedback; the first window closes in 0 s"]),
    ],
    ids=["usual", "drops", "held back", "waits", "silent"],
)  # fmt: skip
def test_the_screen_has_a_line_for_what_differs_from_nothing(
    events: tuple[Event, ...], now_s: float, lines: list[str]
) -> None:
    found = [" ".join(line.split()) for line in shown(state_of(*events, now_s=now_s)).splitlines()]
    assert [line for line in lines if line not in found] == [], found
    nothing = shown(state_of((0, progress("train")), (0, worker(1, FeedbackWait())), now_s=1))
    assert not [word for word in ("waiting", "held back") if word in nothing]


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ((TRAINER, master()), "waiting for groups (3 of 16)"),
        ((TRAINER, master(dropped__equal=384, dropped__stale=2)),
         "waiting for groups (3 of 16); all 386 groups so far were dropped: equal"),
        ((TRAINER, master(dropped__equal=384, buffered__=1)), "waiting for groups (3 of 16)"),
        ((progress("train", state="supervised warm-up"),), "supervised warm-up"),
        ((msgspec.structs.replace(TRAINER, counters={"steps": 0.0}), msgspec.structs.replace(TRAINER, counters={"steps": 1.0})),
         "learning"),
    ],
)  # fmt: skip
def test_a_trainer_without_a_step_says_what_it_waits_for_and_why(reports: tuple[Progress, ...], said: str) -> None:
    state = state_of(*((5.0 * at, report) for at, report in enumerate(reports)), now_s=6)
    assert {role["role"]: role["state"] for role in state["roles"]}["train"] == said


SETTINGS = 'app = "t"\n[keep]\nreplay = "9d"\n[trainer]\nkeep_checkpoints = 5\n[gateway]\nspool_mb = 64\n'
GAUGES = {
    "spool_bytes": 2e6, "uses_remembered": 42.0,
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
        await log.publish(topics.POLICIES, published(1))
        await log.publish(topics.REPORTS, Progress(role="serve", instance="serve/vm/1", gauges=GAUGES))
        state = await read_status(log, now_s=0.0, max_lag=10)
        kept = await list_kept(log, settings, state["roles"])
        return {item.what: item for item in kept}, shown({**state, "kept": msgspec.to_builtins(kept)})

    return asyncio.run(main())


def test_every_topic_has_a_bound_or_says_what_it_grows_by() -> None:
    bounds = {topic.name: topic_bound(topic, "9d") for topic in topics.ALL}
    endless = {name for name, bound in bounds.items() if bound.startswith("no limit: ")}
    assert endless == set(FOREVER) == {topic.name for topic in topics.ALL if topic.retention == "forever"}
    assert bounds["buffer"] == "records after the oldest checkpoint" and bounds["reports"] == "a day"


def test_what_is_kept_is_shown_with_its_size_and_its_bound_and_without_rows_where_the_index_is_broken(
    tmp_path: Path,
) -> None:
    index = LogIndex(tmp_path / "state" / FILE, run="t", policy="main")
    with index.database as database:
        database.executemany("INSERT INTO curves VALUES ('loss', ?, 0, 0, 1)", [(n,) for n in range(7)])
    index.close()
    kept, screen = look(tmp_path)
    for what, bound, num, unit in (
        ("topic dead-letters", "9d (keep.replay)", 3, "records"),  # two were removed
        ("topic batches", "9d (keep.replay), extended to the checkpoint before", 5, "records"),
        ("spool of serve/vm/1", "64 MB (gateway.spool_mb)", 2_000_000, "bytes"),
        ("uses at serve/vm/1", "9d (keep.replay)", 42, "groups"),
        ("index curves", "the newest 50,000 versions", 7, "rows"),
        ("index answers", "9d (keep.replay)", 0, "rows"),
    ):
        assert kept[what] == Kept(what, bound, num, unit)
    assert kept["store snapshots/, each"].num == 5_000_000 and kept[f"file state/{FILE}"].num
    assert "newest 5 (trainer.keep_checkpoints)" in kept["store checkpoints/"].bound
    lines = " ".join(screen.split())
    assert "kept 9d (keep.replay), extended to the checkpoint before: topic batches 5 records" in lines
    assert "kept 64 MB (gateway.spool_mb): spool of serve/vm/1 2.0 MB" in lines
    assert "kept the newest 50,000 versions: index policies 0 rows, index curves 7 rows" in lines
    (tmp_path / "state" / FILE).write_bytes(b"no index at all" * 1000)
    assert look(tmp_path)[0]["index curves"] == Kept("index curves", "the newest 50,000 versions", None, "rows")


NOW_S = 1_763_715_600.0
VM = socket.gethostname()


def heard(
    name: str, *, ago_s: float = 1.0, began_s: float = 7200.0, state: str = "running", reason: str = ""
) -> Spoken:
    """A process, by its role, machine (this one by default) and number, as in "explore pod-2 11"."""
    role, *host, pid = name.split()
    instance = f"{role}/{(host or [VM])[0]}/{pid}"
    report = Progress(role=role, instance=instance, state=state, reason=reason)
    return Spoken(NOW_S - max(began_s, ago_s), [(report, NOW_S - ago_s)])


OTHERS = (heard("master 1"), heard("process 3"), heard("train 4"))
ALIVE = (heard("master 1"), heard("process 3"), heard("explore 11"))
ONE = (*OTHERS, heard("explore 11"))
BEGUN = (heard("master 1", began_s=9.0), heard("process 3", began_s=4.0))
KILLED = heard("serve 5/0badcafe", ago_s=60.0)


@pytest.mark.parametrize(
    ("roles", "expect", "line"),
    [
        ((*ALIVE, heard("train 46", ago_s=753.0, state="stopped")), Expect(),
         f"no train runs: train/{VM}/46 stopped 753 s ago"),
        ((*ALIVE, heard("train 9", ago_s=20.0, state="failed", reason="no fit")), Expect(),
         f"no train runs: train/{VM}/9 ended 20 s ago: no fit"),
        ((*ONE, heard("explore 12", ago_s=60.0)), Expect(), ""),  # one is expected
        ((*ONE, heard("explore 12", ago_s=60.0)), Expect(explore=2),
         f"1 of 2 explore run: explore/{VM}/12 last reported 60 s ago"),
        ((*OTHERS, heard("explore pod-1 11", ago_s=30.0, state="stopped")), Expect(),
         "no explore runs: explore/pod-1/11 stopped 30 s ago"),
        (ONE, Expect(explore=3), "1 of 3 explore run: no report was received; see its log"),
        (BEGUN, Expect(), ""),  # models load
        ((*BEGUN, heard("train 9", ago_s=1.0, began_s=2.0, state="failed", reason="no fit")), Expect(),
         f"no train runs: train/{VM}/9 ended 1 s ago: no fit"),
    ],
)  # fmt: skip
def test_a_role_of_which_too_few_run_is_missing(roles: tuple[Spoken, ...], expect: Expect, line: str) -> None:
    assert missing(expected_roles(expect, serves=False), roles, NOW_S) == ([line] if line else [])


def test_a_gateway_is_expected_where_the_file_has_one() -> None:
    def said(*gateways: Spoken) -> list[str]:
        return missing(expected_roles(Expect(), serves=True), (*ONE, *gateways), NOW_S)

    assert said() == ["no serve runs: no report was received; see its log"]
    assert said(KILLED, heard("serve 6/9f00a1b2", began_s=40.0)) == []
    canary = Progress(role="serve", instance="serve/c/1", state="serving", is_canary=True)
    asked_of_canary = said(KILLED, Spoken(NOW_S - 7200, [(canary, NOW_S)]))
    assert asked_of_canary == [f"no serve runs: serve/{VM}/5/0badcafe last reported 60 s ago"], "it serves no customers"
    failed = heard("serve 5", ago_s=3.0, state="failed", reason="the engine is gone")
    assert said(KILLED, failed) == [f"no serve runs: serve/{VM}/5 ended 3 s ago: the engine is gone"]


def test_a_run_that_came_to_its_end_misses_nobody() -> None:
    over = [heard(f"{role} 1", ago_s=900.0, state="stopped") for role in ("process", "explore")]
    wanted = expected_roles(Expect(), serves=False)
    assert missing(wanted, [heard("master 1", ago_s=900.0, state="done"), *over], NOW_S) == []
    assert len(missing(wanted, over, NOW_S)) == 4, "what was stopped by hand is not running"
