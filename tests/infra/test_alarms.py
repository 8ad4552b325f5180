"""Alarms: what `status` says, the rules of Prometheus and the runbook are one table, and stay so."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.cli.look.reader import Spoken, missing
from infra.cli.look.status import alarms, failing, unread
from infra.observe.alarms import ALARMS, OF_MASTER, RUNBOOK, STILL, Alarm, parse_alarm, raised, rules
from infra.observe.measures import MEASURES
from infra.observe.metrics import Metrics
from schemas import Progress
from tests.actors.rig import crowd
from tests.actors.test_gate import MANY, alarms_after
from tests.own_sources import ROOT

PROMTOOL = shutil.which("promtool")
DEPLOY = ROOT / "infra" / "deploy"
LATE = {"outstanding_groups": 1280.0}


def role(**fields: Any) -> dict[str, Any]:
    return {
        "role": "train", "instance": "train/1", "silent": False, "age_s": 1.0, "grown": {}, "alarms": [], "failing": [],
        "unread": [], "gauges": {}, "state": "running", "reason": "", **fields,
    }  # fmt: skip


def lines(*roles: dict[str, Any], **state: Any) -> list[str]:
    base = {
        "roles": list(roles), "missing": [], "lags": {}, "policies": {"newest_refused": False, "age_s": 0.0},
        "learning": {"state": "on"},
    }  # fmt: skip
    return alarms({**base, **state}, max_lag=10)


def of_status() -> dict[str, list[str]]:
    """Lines that `status` itself makes, by the name of their alarm."""
    failed = failing({"step_failed{stage=verify,step=judge@1}": 30.0, "experiences_out{stage=verify}": 70.0})
    canary = {"canary_missing_s": 40.0, "trial_version": 5.0}
    found = {
        "role-missing": [
            *lines(), *missing({"train": 1}, [], 100.0),
            *missing({"train": 2}, [Spoken(0.0, [(Progress(role="train", instance="train/vm/1"), 99.0)])], 100.0),
        ],
        "role-silent": lines(role(silent=True, age_s=40.0)),
        "lag": lines(role(), lags={"verified": 11}),
        "step-failing": lines(role(failing=failed)),
        "feedback-topic-missing": lines(
            role(unread=unread({"feedback_topic_missing{source=csat,topic=zendesk.closed}": 1.0}))
        ),
        "records-on-disk": lines(role(role="serve", gauges={"spool_records": 1200.0})),
        "canary-missing": [*lines(role(role="master", gauges=canary)), *lines(role(role="serve", gauges=canary))],
        "no-version": lines(role(role="master", gauges=LATE), policies={"newest_refused": False, "age_s": 4000.0}),
        "policy-refused": lines(
            role(), policies={"newest_refused": True, "age_s": 0.0, "published": 4, "refused": ["v4 by explore/1: sha256"]}
        ),
    }  # fmt: skip
    for counter in STILL:
        grown = {counter: 1.0, f"{counter}{{reason=it is odd}}": 2.0}
        name = counter.replace("_", "-") if counter != "policies_refused" else "policy-refused"
        found[name] = [*found.get(name, []), *lines(role(grown=grown))]
    return found


def of_master() -> dict[str, list[str]]:
    """Lines that the master says."""
    named = {"customers-stay": [*crowd("a", 3, MANY, 0), *crowd("b", 5, MANY, MANY)]}
    return {name: alarms_after(said, promoted=name == "customers-stay") for name, said in named.items()}


SAID = {**of_status(), **of_master()}


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda one: one.name)
def test_every_alarm_is_said_by_the_code_and_each_of_its_lines_is_of_it_alone(alarm: Alarm) -> None:
    assert SAID[alarm.name]
    for line in SAID[alarm.name]:
        assert [one.name for one in ALARMS if re.search(one.says, line)] == [alarm.name], line


@pytest.mark.parametrize(
    ("age_s", "waiting", "learning", "says"),
    [
        (4000.0, 1280.0, "on", ["no version for 67 min, and 1,280 groups wait for the trainer"]),
        (3000.0, 1280.0, "on", []),
        (4000.0, 0.0, "on", []),
        (4000.0, 1280.0, "paused", []),
    ],
)
def test_no_version_is_an_alarm_while_groups_wait_and_nobody_has_paused_learning(
    age_s: float, waiting: float, learning: str, says: list[str]
) -> None:
    policies = {"newest_refused": False, "age_s": age_s}
    master = role(role="master", gauges={"outstanding_groups": waiting})
    assert lines(master, policies=policies, learning={"state": learning}) == says


def test_every_line_that_status_can_make_is_of_some_alarm() -> None:
    assert set(SAID) == {one.name for one in ALARMS}
    assert parse_alarm("train/1: something that a plugin says") is None


def test_the_master_tells_prometheus_of_the_alarms_that_it_alone_sees() -> None:
    told = raised([SAID["customers-stay"][0], SAID["lag"][0]])
    assert told == {one.name: float(one.name == "customers-stay") for one in OF_MASTER}
    assert {one.name for one in OF_MASTER} == set(of_master())


def test_the_runbook_has_a_section_for_every_alarm_and_no_other() -> None:
    text = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [one.title for one in ALARMS]
    for title, section in sections.items():
        assert [word for word in ("**Means**", "**Look**", "**Do**") if word not in section] == [], title


def test_the_rules_on_disk_are_those_of_the_table() -> None:
    """`python -m infra.cli.docs` writes them."""
    assert (DEPLOY / "alerts.yml").read_text(encoding="utf-8") == rules()
    (group,) = yaml.safe_load(rules())["groups"]
    assert [one["alert"] for one in group["rules"]] == [one.alert for one in ALARMS]
    assert len({one["alert"] for one in group["rules"]}) == len(ALARMS)


def test_every_metric_of_a_rule_is_one_that_a_role_has() -> None:
    known = {one.shown for one in MEASURES} | {"headrace_build_info"}
    for one in ALARMS:
        assert set(re.findall(r"headrace_\w+", one.rule)) <= known, one.name


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH: apt-get install prometheus")
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_takes_the_rules_and_they_fire_when_they_should(command: tuple[str, ...], tmp_path: Path) -> None:
    assert PROMTOOL is not None
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    shutil.copy(ROOT / "tests" / "infra" / "alerts_test.yml", tmp_path)
    done = subprocess.run([PROMTOOL, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH: apt-get install prometheus")
def test_promtool_finds_nothing_to_say_of_a_scrape_with_every_metric() -> None:
    assert PROMTOOL is not None
    metrics = Metrics("all")
    for one in MEASURES:
        labels = dict.fromkeys(one.labels, "x")
        if one.kind == "counter":
            metrics.counter(one.name, **labels).inc()
        elif one.kind == "gauge":
            metrics.gauge(one.name, **labels).set(1)
        else:
            metrics.histogram(one.name, **labels).observe(1)
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=metrics.exposition(), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
