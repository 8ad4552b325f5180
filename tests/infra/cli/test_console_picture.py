"""The picture of the flow page: each box says how fast, how far behind, with which version and what waits; each arrow, what."""

import pytest

from infra.cli.console.picture import ARROWS, HIGH, WIDE, Arrow, Box, boxes_of
from infra.cli.look.status_screen import State
from infra.policies.channel import Stable
from tests.infra.cli.test_console_flow import role, state

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


def boxes(seen: State) -> dict[str, Box]:
    return {box.name: box for box in boxes_of(seen, Stable(version=2))}


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("Tasks", ("0.5 tasks/s", "4 wait", "12 known")), ("Your agent", ("3 requests/s",)),
        ("People", ("0.5 events/s",)), ("Master", ("2 tasks issued/s", "40 groups outstanding")),
        ("Explorers", ("2.73k tokens/s", "7 tasks wait", "16 episodes in flight")),
        ("Gateway", ("2.25 answers/s", "5 running", "6 wait for the log")),
        ("Verify and score", ("80 answers/s", "31 wait")),
        ("Collect", ("10 groups/s", "9 wait, 21 groups open", "1,386 answers wait for feedback")),
        ("Trainer", ("0.29 steps/s", "75 answers/s", "64 groups wait")),
        ("Versions", ("v3 published", "v2 stable")),
    ],
)  # fmt: skip
def test_each_box_says_its_rate_what_waits_and_how_much(name: str, lines: tuple[str, ...]) -> None:
    assert boxes(ALL)[name].lines == lines


def test_the_box_of_versions_names_the_one_that_was_held_back_last() -> None:
    found = {box.name: box for box in boxes_of(ALL, Stable(version=2), held=3)}
    assert found["Versions"].lines == ("v3 published", "v2 stable", "v3 held back")
    found = {box.name: box for box in boxes_of(ALL, Stable(version=2, trial=3), held=1)}
    assert found["Versions"].lines == ("v3 published", "v2 stable", "v3 on trial"), "a box has three lines"


def test_what_a_role_does_not_report_is_missing_and_never_zero() -> None:
    mute = state(*(role(name) for name in ("master", "explore", "serve", "process", "train")))
    found = boxes(mute)
    for name in (
        "Tasks",
        "Your agent",
        "People",
        "Master",
        "Explorers",
        "Gateway",
        "Verify and score",
        "Collect",
        "Trainer",
    ):
        assert found[name].lines and all("missing" in line for line in found[name].lines), name
    still = boxes(state(role("train", rates={"steps": 0.0, "experiences_trained": 0.0}, groups_waiting=0.0)))["Trainer"]
    assert still.lines == ("0 steps/s", "0 answers/s", "0 groups wait"), "what stands still was reported, and is zero"


def test_a_role_that_was_never_heard_of_is_missing_as_a_whole() -> None:
    found = boxes(state(role("train")))
    assert (
        found["Gateway"].lines == ("missing",) and found["Gateway"].state == "quiet" and found["Gateway"].version == ""
    )


def test_a_box_names_the_versions_of_all_its_processes() -> None:
    two = [role("explore") | {"instance": f"explore/{at}", "version": at} for at in (3, 5)]
    found = boxes(state(*two, role("train"), role("serve") | {"version": -1}))
    assert found["Explorers"].version == "v3 to v5" and found["Explorers"].title == "Explorers × 2"
    assert found["Trainer"].version == "v3" and found["Gateway"].version == "no version"


def test_what_a_silent_role_did_a_second_is_missing() -> None:
    seen = state(role("train", silent=True, rates={"steps": 3.0}), role("master"))
    assert boxes(seen)["Trainer"].lines[0] == "steps/s: missing"


@pytest.mark.parametrize("arrow", ARROWS, ids=lambda one: f"{one.source} to {one.target}")
def test_each_arrow_runs_from_the_edge_of_one_box_to_the_edge_of_another_through_none_and_says_what_flows(
    arrow: Arrow,
) -> None:
    found = boxes(ALL)
    assert arrow.label
    assert on_edge(found[arrow.source], arrow.points[0]) and on_edge(found[arrow.target], arrow.points[-1])
    for (ax, ay), (bx, by) in zip(arrow.points, arrow.points[1:], strict=False):
        assert ax == bx or ay == by, "turns are square"
        middle = ((ax + bx) / 2, (ay + by) / 2)
        assert not [name for name, box in found.items() if inside(box, middle)]
    assert not [name for name, box in found.items() if inside(box, arrow.at)], "what it says lies beside the boxes"


def test_what_ends_with_the_master_and_what_engines_load_is_drawn() -> None:
    drawn = {(one.source, one.target): one.label for one in ARROWS}
    assert drawn["Collect", "Master"] == "how groups ended" and drawn["Trainer", "Master"] == "groups drawn"
    assert drawn["Versions", "Explorers"] == drawn["Versions", "Gateway"] == "hot reload"
    assert set(sum(drawn, ())) == set(boxes(ALL)), "no box stands alone"


def on_edge(box: Box, point: tuple[float, float]) -> bool:
    x, y = point
    within_x, within_y = box.x <= x <= box.x + WIDE, box.y <= y <= box.y + HIGH
    return (x in (box.x, box.x + WIDE) and within_y) or (y in (box.y, box.y + HIGH) and within_x)


def inside(box: Box, point: tuple[float, float]) -> bool:
    return box.x < point[0] < box.x + WIDE and box.y < point[1] < box.y + HIGH
