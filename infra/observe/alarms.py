"""Every alarm in one table: its words in `status --check`, its rule in Prometheus, and its section of the runbook.

`infra/deploy/alerts.yml` is written from it (`python -m infra.cli.docs`). Each line of `status` belongs to one alarm; the
master reports the alarms that it alone sees in the gauge `alarm_raised`.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

RUNBOOK = "infra/docs/howto/runbook.md"
MAX_LAG = 10_000  # records waiting for a stage
NO_VERSION_S = 3600.0  # while groups wait for the trainer
RUNS = "headrace_build_info"
SERVES = '{role="serve"}'


class Alarm(NamedTuple):
    """One alarm. title: of its section. says: found in the lines that `status` prints. rule: PromQL, true for as long as
    `wait` before it is raised. summary: text of the alert, with labels of the rule. counter: a counter that should stand still.

    name: in Prometheus. wait: for how long the rule has to be true. severity: "page" for an alarm that cannot wait.
    """

    name: str
    title: str
    says: str
    rule: str
    summary: str
    wait: str = "0m"
    severity: Literal["page", "ticket"] = "page"
    counter: str = ""

    @property
    def section(self) -> str:
        return f"{RUNBOOK}#{anchor(self.title)}"

    @property
    def alert(self) -> str:
        return "Headrace" + "".join(word.capitalize() for word in self.name.split("-"))


def anchor(heading: str) -> str:
    """The fragment that Markdown renderers give a heading.

    >>> anchor("[trainer.lanes.<name>]")
    'trainerlanesname'
    """
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def grown(metric: str) -> str:
    """PromQL: a counter that grew in the last five minutes, or came into being then (it does so at its first increment)."""
    return f"increase({metric}[5m]) > 0 or ({metric} > 0 unless {metric} offset 5m)"


def _still(counter: str, title: str, severity: Literal["page", "ticket"] = "ticket") -> Alarm:
    return Alarm(
        counter.replace("_", "-"), title, rf"\b{counter}(\{{.*\}})? \+", grown(f"headrace_{counter}_total"),
        f"{title}: {{{{ $labels.instance }}}}", severity=severity, counter=counter,
    )  # fmt: skip


def _silent() -> str:
    """PromQL: targets of the last day that do not answer, and silent targets of jobs named after headrace."""
    seen = f"max by (app, role, job, instance) (last_over_time({RUNS}[1d]))"
    return f'{seen} and on (job, instance) up == 0 or on (job, instance) (up{{job=~".*headrace.*"}} == 0)'


def _roles(names: Iterable[str]) -> str:
    """PromQL: roles that do not run, of each app seen within a day; gateways only if the app had any. Without any app, `role`
    is "role".
    """

    def named(rule: str, role: str) -> str:
        return f'label_replace({rule}, "role", "{role}", "", "")'

    def seen(of: str) -> str:
        return f"group by (app) (last_over_time({RUNS}{of}[1d]))"

    lacking = [
        named(f'{seen(SERVES if name == "serve" else "")} unless on (app) {RUNS}{{role="{name}"}}', name)
        for name in names
    ]
    return " or ".join((*lacking, named(f"absent_over_time({RUNS}[1d])", "role")))


ALARMS = (
    Alarm(
        "role-missing", "A role does not run", r"^no \w+ runs:|^\d+ of \d+ \w+ run:|^no role has reported",
        _roles(("master", "train", "process", "explore", "serve")), "No {{ $labels.role }} runs: {{ $labels.app }}",
        wait="2m",
    ),
    Alarm(
        "role-silent", "A role is silent", r"has been silent for", _silent(),
        "{{ $labels.instance }} does not answer", wait="1m",
    ),
    Alarm(
        "lag", "A stage falls behind", r"records wait, expected at most",
        f"sum by (app, topic) (headrace_lag) > {MAX_LAG}", "{{ $value }} records of {{ $labels.topic }} wait", wait="10m",
    ),
    Alarm(
        "step-failing", "A step of a chain fails", r": step .* failed on",
        "sum by (app, stage, step) (rate(headrace_step_failed_total[5m])) > on (app, stage) group_left () 0.05 * ("
        "sum by (app, stage) (rate(headrace_step_failed_total[5m])) + ("
        "sum by (app, stage) (rate(headrace_experiences_out_total[5m])) "
        "or 0 * sum by (app, stage) (rate(headrace_step_failed_total[5m]))))",
        "{{ $labels.step }} of {{ $labels.stage }} fails", wait="2m",
    ),
    Alarm(
        "policy-refused", "The newest version is refused", r"^policy v\d+ was refused|\bpolicies_refused(\{.*\})? \+",
        grown("headrace_policies_refused_total"), "{{ $labels.instance }} refused a version",
        counter="policies_refused",
    ),
    _still("policy_fetch_failed", "A version cannot be fetched"),
    _still("policy_fetch_slow", "A version comes slowly"),
    Alarm(
        "no-version", "No version comes", r"^no version for",
        f"time() - max by (app) (max_over_time(headrace_last_version_timestamp_seconds[1d])) > {NO_VERSION_S:.0f} "
        "and on (app) max by (app) (headrace_outstanding_groups) > 0",
        "No version of {{ $labels.app }} for an hour, and groups wait", wait="5m", severity="ticket",
    ),
    _still("publication_waits", "A version waits for room", "page"),
    _still("rollbacks", "The trainer went back", "page"),
    _still("steps_skipped", "Steps change nothing"),
    _still("alarms", "A value of a step is unhealthy"),
    _still("requests_failed", "Episodes fail"),
    _still("feedback_polls_failed", "A feedback system does not answer"),
    _still("feedback_unread", "Feedback is posted and no source reads it"),
    Alarm(
        "feedback-topic-missing", "A source's topic is not there", r"waits for topic .* to be made",
        "headrace_feedback_topic_missing > 0", "{{ $labels.source }} waits for topic {{ $labels.topic }}",
        wait="1m", severity="ticket",
    ),
    Alarm(
        "records-on-disk", "Answers wait on disk", r"records wait on disk", "headrace_spool_records > 0",
        "{{ $labels.instance }} cannot write to the log", wait="5m",
    ),
    _still("shed", "Answers are given up", "page"),
    Alarm(
        "canary-missing", "No canary answers", r"no canary has been heard of", "headrace_canary_missing_seconds > 0",
        "{{ $labels.instance }} waits for a canary", wait="1m", severity="ticket",
    ),
    Alarm(
        "customers-stay", "Complaints rose with a promotion", r"Customers stay with it",
        'headrace_alarm_raised{alarm="customers-stay"} > 0',
        "Complaints rose with a promotion: headrace status says how many", wait="5m", severity="ticket",
    ),
)  # fmt: skip

STILL = tuple(alarm.counter for alarm in ALARMS if alarm.counter)
OF_MASTER = tuple(alarm for alarm in ALARMS if "alarm_raised" in alarm.rule)


def parse_alarm(line: str) -> Alarm | None:
    """Alarm of a line of `status`; None for a line of a plugin or of a later release."""
    return next((alarm for alarm in ALARMS if re.search(alarm.says, line)), None)


def raised(lines: Iterable[str]) -> dict[str, float]:
    """For `alarm_raised`: each of the master's own, 1 where a line is of it."""
    found = {alarm.name for line in lines if (alarm := parse_alarm(line)) is not None}
    return {alarm.name: float(alarm.name in found) for alarm in OF_MASTER}


def rules() -> str:
    """The rules, as the YAML that Prometheus reads."""
    written = [
        f"      - alert: {alarm.alert}\n"
        f"        expr: {_quoted(alarm.rule)}\n"
        f"        for: {alarm.wait}\n"
        f"        labels:\n          severity: {alarm.severity}\n"
        f"        annotations:\n          summary: {_quoted(alarm.summary)}\n"
        f"          runbook: {alarm.section}\n"
        for alarm in ALARMS
    ]
    return (
        "# Written by `python -m infra.cli.docs` from infra/observe/alarms.py; change it there.\n"
        "groups:\n  - name: headrace\n    rules:\n" + "".join(written)
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
