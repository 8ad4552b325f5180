"""The Flow and Learning pages: figures, rates, alarms and charts."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from infra.cli.console.flow import MAX_ALARMS, figures, sentence
from infra.cli.console.learning import CURVES
from infra.cli.look.status import State
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.fold import Stable
from infra.store.memory import MemoryStore
from schemas import Block, DropMarker, PolicyEvent, Progress, topics
from schemas.fields import KEPT_FIGURES
from tests.infra.cli.console_rig import live, look, looking, page_text


def role(
    name: str,
    *,
    state: str = "running",
    silent: bool = False,
    per_s: dict[str, float] | None = None,
    rates: dict[str, float] | None = None,
    **gauges: float,
) -> State:
    return {
        "role": name, "instance": f"{name}/1", "state": state, "reason": "", "alarms": [], "version": 3,
        "age_s": 90.0 if silent else 1.0,
        "silent": silent, "per_s": per_s or {}, "rates": rates or {}, "grown": {},
        "failing": [], "unread": [], "gauges": gauges,
    }  # fmt: skip


def state(*roles: State, learning: State | None = None, **lags: int) -> State:
    return {
        "roles": list(roles), "learning": learning or {"state": "on"}, "lags": lags, "dropped": {}, "waiting": {}, "alarms": [],
        "policies": {"published": 3, "refused": [], "newest_refused": False},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (state(), "No role has reported yet."),
        (state(role("train", silent=True)), "No role is running; these values are 1 minute old."),
        (
            state(role("train", per_s={"idle_seconds": 0.62}), role("explore"), role("master", issued_groups=5.0)),
            "The trainer waited 62% of the last minute: the explorers are the bottleneck.",
        ),
        (
            state(role("train", per_s={"idle_seconds": 0.7}), role("serve")),
            "The trainer waited 70% of the last minute: rated answers are the bottleneck.",
        ),
        (
            state(role("train", per_s={"idle_seconds": 0.7}), experiences=9000),
            "The trainer waited 70% of the last minute: processing is the bottleneck, 9,000 records of experiences wait.",
        ),
        (
            state(role("train"), role("explore", idle_share=0.8), role("master", issued_groups=5.0)),
            "The explorers waited 80% of their time: the trainer is the bottleneck.",
        ),
        (state(role("train"), role("explore")), "No role is a bottleneck."),
        (
            state(role("train"), learning={"state": "paused", "by": "ann", "reason": "odd", "since_s": 940.0}),
            "Learning is paused by ann since 1 minute: odd.",
        ),
    ],
)
def test_who_waits_for_whom_is_one_sentence(seen: State, told: str) -> None:
    assert sentence(seen, 1000.0) == told


LAGS = {"taskset.raw": 4, "tasks": 7, "experiences": 30, "experts": 1, "verified": 9}
ALL = state(
    role("master", rates={"issued{kind=groups}": 1.5, "issued{kind=evals}": 0.5}, outstanding_groups=40.0, tasks=12.0),
    role("explore", rates={"tokens": 2733.0}, episodes_in_flight=16.0),
    role("serve", rates={"answers{end=whole}": 2.0, "answers{end=broken off}": 0.25, "requests{route=/v1}": 3.0},
         answers_running=5.0, outbox_waiting=6.0),
    role("process", rates={"experiences_in{stage=verify}": 80.0, "experiences_in{stage=tasks}": 0.5,
                           "closures{outcome=buffered}": 8.0, "closures{outcome=dropped}": 2.0,
                           "feedback_events{source=gateway,outcome=kept}": 0.5}, groups_pending=21.0),
    role("train", rates={"steps": 0.29, "experiences_trained": 75.0}, groups_waiting=64.0),
    **LAGS,
) | {"waiting": {"answers": 1386, "first_s": 9.0}}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("tasks", ["0.5 tasks/s", "4 wait", "12 known"]), ("agent", ["3 requests/s"]), ("people", ["0.5 events/s"]),
        ("master", ["2 tasks issued/s", "40 groups outstanding"]),
        ("explorers", ["2.73k tokens/s", "7 tasks wait", "16 episodes in flight"]),
        ("gateway", ["2.25 answers/s", "5 running", "6 wait for the log"]), ("verify", ["80 answers/s", "31 wait"]),
        ("collect", ["10 groups/s", "9 wait, 21 groups open", "1,386 answers wait for feedback"]),
        ("trainer", ["0.29 steps/s", "75 answers/s", "64 groups wait"]), ("versions", ["v3 published", "v2 stable"]),
    ],
)  # fmt: skip
def test_each_box_says_its_rate_what_waits_and_how_much(name: str, lines: list[str]) -> None:
    assert figures(ALL, Stable(version=2))[name]["lines"] == lines


def test_what_is_not_reported_is_missing_and_what_stands_still_is_zero() -> None:
    mute = figures(state(*(role(name) for name in ("master", "explore", "serve", "process", "train"))), Stable())
    for name in mute.keys() - {"versions"}:
        assert mute[name]["lines"] and all("missing" in line for line in mute[name]["lines"]), name
    still = state(role("train", rates={"steps": 0.0, "experiences_trained": 0.0}, groups_waiting=0.0))
    assert figures(still, Stable())["trainer"]["lines"] == ["0 steps/s", "0 answers/s", "0 groups wait"]
    gone = figures(state(role("train", silent=True, rates={"steps": 3.0}), role("master")), Stable())
    assert gone["trainer"]["lines"][0] == "steps/s: missing" and gone["trainer"]["state"] == "quiet"
    assert gone["gateway"] == {"lines": ["missing"], "version": "", "state": "quiet", "count": 0}


async def test_the_flow_page_says_every_alarm_with_its_section_of_the_runbook_and_how_many_more_there_are(
    tmp_path: Path,
) -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    await log.create_topics(partitions=1, keep_ms=-1)
    said = ("complaints come late", *(f"a plugin says {at}" for at in "abcdefghijklmnopqrstuvwxyz" * 2))
    report = Progress(role="train", instance="train/1", state="learning", alarms=said, counters={"steps_skipped": 1.0})
    await log.publish(topics.REPORTS, msgspec.structs.replace(report, counters={}))
    await log.publish(topics.REPORTS, report)
    async with looking(tmp_path, log) as (client, _):
        text = page_text(await client.get("/"))
        assert "train/1: a plugin says a" in text and ": train/1: steps_skipped +1 in the last minute" in text
        assert f"{len(said) + 1} alarms" in text and f"and {len(said) + 1 - MAX_ALARMS} more" in text


LANES = ("live", "usual")


async def measure(log: Log) -> None:
    """Versions of which each figure was measured, in two lanes; and answers that were dropped for two reasons."""
    await log.create_topics(partitions=1, keep_ms=-1)
    for version in range(4):
        of_lanes = [f"{lane}{name}" for lane in LANES for name in KEPT_FIGURES if name.startswith("/")]
        names = [*of_lanes, *(name for name in KEPT_FIGURES if not name.startswith("/"))]
        stats = {name: 0.125 * (version + 1) for name in names}
        event = PolicyEvent(
            event="published", policy="main", version=version, parent=version - 1, step=version, stats=stats
        )
        await log.publish(topics.POLICIES, event)
    for number, reason in enumerate(("too short", "too old", "too old")):
        answer = live(2 * number + 1, "asked", "said", version=number)
        await log.publish(topics.EXPERIENCES, Block((answer,)))
        marker = DropMarker(
            id=answer.id, group=answer.group, episode=0, group_size=1, reason=reason, stage="verify", processor="mine@1"
        )
        await log.publish(topics.VERIFIED, marker)


def charts_in(page: httpx.Response) -> dict[str, dict[str, Any]]:
    """Data that a page gives to its script, by title."""
    found = [json.loads(unescape(text)) for text in re.findall("data-chart='([^']*)'", page.text)]
    return {chart["title"]: chart for chart in found}


def test_what_is_drawn_of_a_step_is_what_the_event_of_its_version_keeps() -> None:
    assert {end for _, ends, _ in CURVES for end in ends} == set(KEPT_FIGURES)


def test_each_measure_of_learning_is_drawn_for_each_lane_and_every_value_has_its_version(tmp_path: Path) -> None:
    log = Log(MemoryBus(), "t", store=MemoryStore())
    (page,) = look(tmp_path, "/learning", log=log, more=measure)
    charts = charts_in(page)
    for title, ends, zero in CURVES:
        chart = charts[title]
        names = {f"{lane}{end}" if end.startswith("/") else end for end in ends for lane in LANES}
        assert names == {line["name"] for line in chart["series"]} and chart["zero"] is zero, title
        assert chart["labels"] == [f"v{version}" for version in range(4)] and len(chart["x"]) == 4
        assert all(line["values"] == [0.125, 0.25, 0.375, 0.5] for line in chart["series"])
    areas = {line["name"]: line["values"] for line in charts["Outcomes of answers"]["series"]}
    assert areas == {"too old": [0, 1, 1], "too short": [1, 0, 0]}


def test_every_chart_is_also_a_table_that_a_keyboard_opens(tmp_path: Path) -> None:
    (page,) = look(tmp_path, "/learning")
    figures = re.findall("<figure>.*?</figure>", page.text, re.DOTALL)
    assert len(figures) > 4
    for figure in figures:
        table = figure.partition("<details")[2]
        assert "<summary>" in table and table.count('<th scope="row">') >= 1 and 'tabindex="0"' in table
    (suite,) = [figure for figure in figures if "<figcaption>Suite dev" in figure]
    assert "v5</th><td>0.6667, 0.2 to 0.9</td>" in suite
    assert charts_in(page)["Suite dev"]["series"][0]["low"] == [0.2] * 8
    assert "outcomes of answers as a table" in page_text(page).lower()
