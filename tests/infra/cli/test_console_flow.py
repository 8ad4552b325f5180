"""What the console says of a state: who waits for whom, which version is shown, how curves are drawn, what a token was."""

import math
import re
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from infra.cli.console.answers import level_of
from infra.cli.console.charts import Bins, ChartPoint, Line, area_chart, bounds, line_chart, short, spark, thin, ticks
from infra.cli.console.flow import sentence
from infra.cli.console.picture import boxes_of
from infra.cli.console.versions import MAX_PAIRED, Budget, marked
from infra.cli.look.status_screen import State
from infra.cli.run.up import console_child
from infra.cli.settings import load_settings
from infra.cli.terminal import printable
from infra.policies.channel import Stable

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)


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
        (state(), "No role has spoken yet."),
        (state(role("train", silent=True)), "Nothing runs: this is how it was 1 minute ago."),
        (
            state(role("train", per_s={"idle_seconds": 0.62}), role("explore"), role("master", issued_groups=5.0)),
            "The trainer waited 62% of the last minute: the explorers are the bottleneck.",
        ),
        (
            state(role("train", per_s={"idle_seconds": 0.7}), role("serve")),
            "The trainer waited 70% of the last minute: rated answers come no faster.",
        ),
        (
            state(role("train", per_s={"idle_seconds": 0.7}), experiences=9000),
            "The trainer waited 70% of the last minute: processing is the bottleneck, 9,000 records of experiences wait.",
        ),
        (
            state(role("train"), role("explore", idle_share=0.8), role("master", issued_groups=5.0)),
            "The explorers waited 80% of their time: the trainer is the bottleneck.",
        ),
        (state(role("train"), role("explore")), "No part waits long: they keep pace."),
        (
            state(role("train"), learning={"state": "paused", "by": "ann", "reason": "odd", "since_s": 940.0}),
            "Learning is paused by ann since 1 minute: odd.",
        ),
    ],
)
def test_who_waits_for_whom_is_one_sentence(seen: State, told: str) -> None:
    assert sentence(seen, 1000.0) == told


def test_a_part_that_does_not_run_and_one_with_an_alarm_are_told_apart() -> None:
    explorer = role("explore") | {"alarms": ["engine is odd"]}
    found = {box.name: box.state for box in boxes_of(state(explorer, role("train")), Stable(version=2))}
    assert found["Explorers"] == "alarm" and found["Trainer"] == "" and found["Gateway"] == "quiet"


def test_the_box_of_collect_says_how_many_answers_wait_for_feedback() -> None:
    (lines,) = (
        box.lines
        for box in boxes_of(state(role("process")) | {"waiting": {"answers": 1386, "first_s": 9.0}}, Stable())
        if box.name == "Collect"
    )
    assert "1,386 answers wait for feedback" in lines


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=400))
def test_every_chart_is_well_formed_and_small(pairs: list[tuple[float, float]]) -> None:
    points = [ChartPoint(x, y, "<b>v1</b>", y, y) for x, y in sorted(pairs)]
    chart = line_chart("a <title>", [Line("one", points), Line("none", [])])
    assert "nan" not in chart and "inf" not in chart and "<b>" not in chart and "style=" not in chart
    assert len(re.findall("<svg|<p ", chart)) == 1 and len(chart) < 120_000


@given(NUMBERS, NUMBERS)
def test_ticks_lie_within_what_they_measure(one: float, other: float) -> None:
    low, high = sorted((one, other))
    slack = (high - low) * 1e-6
    assert all(low - slack <= at <= high + slack for at in ticks(low, high)) and len(ticks(low, high)) <= 12
    assert bounds([low, high], zero=False)[0] < bounds([low, high], zero=False)[1]
    assert len(short(one)) < 10


def test_areas_lie_upon_each_other_and_name_themselves() -> None:
    chart = area_chart("fates", Bins(0, 1, 3), {"trained": [1, 2, 3], "<late>": [0, 1, 0]}, x_name="version")
    assert chart.count("<polygon") == 2 and "&lt;late&gt;: 1" in chart
    assert spark([1.0], "none") == Markup("")
    assert thin([ChartPoint(float(at), 0.0) for at in range(1000)], 10)[-1].x == 999.0


@given(st.text(max_size=60), st.text(max_size=60))
def test_marks_of_a_comparison_are_the_only_markup_and_nothing_is_left_out(left: str, right: str) -> None:
    for text, tag, whole in zip(marked(left, right, Budget(MAX_PAIRED)), ("del", "ins"), (left, right), strict=True):
        assert set(re.findall(r"</?(\w+)", text)) <= {tag}
        assert unescape(re.sub(r"</?(?:del|ins)>", "", text)) == printable(whole)


def test_texts_that_repeat_themselves_are_marked_as_a_whole() -> None:
    """Ten thousand equal words on both sides: a hundred million pairs, of which none is weighed."""
    budget = Budget(10 * MAX_PAIRED)
    left, right = marked("so " + "b a " * 5_000 + "end", "so " + "a b " * 5_001 + "end", budget)
    assert left.startswith("so <del>") and left.endswith("</del> end") and left.count("<del>") == 1
    assert right.count("<ins>") == 1 and budget.left == 10 * MAX_PAIRED


def test_what_is_left_for_a_page_bounds_all_of_its_comparisons() -> None:
    budget = Budget(20)
    assert marked("a b c", "a x c", budget)[0].count("<del>") == 1
    spent = budget.left
    assert marked("p q r s t u v w", "w v u t s r q p", budget)[0].count("<del>") == 1 and budget.left == spent


def test_a_token_is_as_dark_as_it_was_unlikely() -> None:
    assert [level_of(math.log(share)) for share in (1.0, 0.5, 0.25, 0.125, 1 / 16, 1e-9)] == [0, 1, 2, 3, 4, 5]


def test_up_starts_the_console_and_its_link_is_no_argument(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "t"\n[console]\nup = false\n')
    settings = load_settings(file)
    child = console_child(settings, file, ["a.b=1"], "a-secret")
    assert child.argv[3:] == ("console", "--config", str(file), "--set", "a.b=1")
    assert "a-secret" not in child.argv and child.env["HEADRACE_CONSOLE_LINK"] == "a-secret"
    assert not settings.console.up
    file.write_text('app = "t"\n')
    assert load_settings(file).console.up
