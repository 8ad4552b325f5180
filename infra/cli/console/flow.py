"""The Flow page in figures and words, from the state of `headrace status`.

A figure that no role reports is "missing"; zero is shown only where a role said zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from infra.cli.look.reader import OVER
from infra.cli.look.status import State
from infra.observe.alarms import parse_alarm
from infra.policies.fold import Stable

MISSING = "missing"
WAITS = 0.4  # share of a minute above which a wait is worth a word
BEHIND = 1000  # records that wait for a stage
MAX_ALARMS = 30


def figures(state: State, stable: Stable, held: int = -1) -> dict[str, dict[str, Any]]:
    """Each box of the picture: `lines` (up to three), `version`, `state` ("", "quiet" or "alarm") and `count` of processes.
    held: version that the newest decision held back, -1 for none.
    """
    lags: Mapping[str, int | None] = state["lags"]
    published = state["policies"]["published"]
    versions = [
        f"v{published} published" if published is not None else "none published",
        f"v{stable.version} {'pinned' if stable.pinned else 'stable'}" if stable.version >= 0 else "none stable",
        f"v{stable.trial} on trial" if stable.trial >= 0 else f"v{held} held back" if held >= 0 else "",
    ]
    waiting = f"{state['waiting']['answers']:,} answers wait for feedback" if state["waiting"] else ""
    verified = f"{_lag(lags, 'verified')}, {_gauge(state, 'process', 'groups_pending', 'groups open')}"
    return {
        "tasks": _box(
            _rate(state, "process", "experiences_in{stage=tasks}", "tasks/s"), _lag(lags, "taskset.raw"),
            _gauge(state, "master", "tasks", "known"),
        ),
        "agent": _box(_rate(state, "serve", "requests", "requests/s")),
        "people": _box(_rate(state, "process", "feedback_events", "events/s")),
        "master": _role(
            state, "master", _rate(state, "master", "issued", "tasks issued/s"),
            _gauge(state, "master", "outstanding_groups", "groups outstanding"),
        ),
        "explorers": _role(
            state, "explore", _rate(state, "explore", "tokens", "tokens/s"), _lag(lags, "tasks", unit="tasks wait"),
            _gauge(state, "explore", "episodes_in_flight", "episodes in flight"),
        ),
        "gateway": _role(
            state, "serve", _rate(state, "serve", "answers", "answers/s"), _gauge(state, "serve", "answers_running", "running"),
            _gauge(state, "serve", "outbox_waiting", "wait for the log"),
        ),
        "verify": _role(
            state, "process", _rate(state, "process", "experiences_in{stage=verify}", "answers/s"),
            _lag(lags, "experiences", "experts"), has_version=False,
        ),
        "collect": _role(
            state, "process", _rate(state, "process", "closures", "groups/s"), verified, waiting, has_version=False
        ),
        "trainer": _role(
            state, "train", _rate(state, "train", "steps", "steps/s"),
            _rate(state, "train", "experiences_trained", "answers/s"), _gauge(state, "train", "groups_waiting", "groups wait"),
        ),
        "versions": _box(*versions, state="alarm" if state["policies"]["newest_refused"] else ""),
    }  # fmt: skip


def _rate(state: State, role: str, name: str, unit: str) -> str:
    found = [
        rate
        for report in _alive(state, role)
        for counter, rate in report["rates"].items()
        if counter == name or counter.startswith(f"{name}{{")
    ]
    return f"{short(sum(found))} {unit}" if found else f"{unit}: {MISSING}"


def _gauge(state: State, role: str, name: str, unit: str) -> str:
    found = [report["gauges"][name] for report in _reports(state, role) if name in report["gauges"]]
    return f"{sum(found):,.0f} {unit}" if found else f"{unit}: {MISSING}"


def _lag(lags: Mapping[str, int | None], *names: str, unit: str = "wait") -> str:
    known = [count for name in names if (count := lags.get(name)) is not None]
    return f"{sum(known):,} {unit}" if known else f"lag: {MISSING}"


def _role(state: State, name: str, *lines: str, has_version: bool = True) -> dict[str, Any]:
    alive = _alive(state, name)
    has_alarm = any(each["alarms"] or each["grown"] or each["failing"] or each["unread"] for each in alive)
    is_quiet = not any(each["state"] not in OVER for each in alive)
    is_heard = bool(_reports(state, name))
    return _box(
        *(lines if is_heard else (MISSING,)),
        version=_versions(alive) if has_version and is_heard else "",
        state="alarm" if has_alarm else "quiet" if is_quiet else "",
        count=len(alive),
    )


def _box(*lines: str, version: str = "", state: str = "", count: int = 1) -> dict[str, Any]:
    return {"lines": [line for line in lines if line], "version": version, "state": state, "count": count}


def _reports(state: State, role: str) -> list[State]:
    return [report for report in state["roles"] if report["role"] == role]


def _alive(state: State, role: str) -> list[State]:
    return [report for report in _reports(state, role) if not report["silent"]]


def _versions(alive: Sequence[State]) -> str:
    found = sorted({report["version"] for report in alive if report["version"] >= 0})
    if not found:
        return "no version"
    return f"v{found[0]}" if len(found) == 1 else f"v{found[0]} to v{found[-1]}"


def sentence(state: State, now_s: float) -> str:
    """The bottleneck, as one sentence."""
    alive = [report for report in state["roles"] if not report["silent"] and report["state"] not in OVER]
    if not state["roles"]:
        return "No role has reported yet."
    if not alive:
        age_s = min(report["age_s"] for report in state["roles"])
        return f"No role is running; these values are {since(age_s)} old."
    learning = state["learning"]
    if learning["state"] != "on":
        why = f": {learning['reason']}" if learning["reason"] else ""
        return f"Learning is {learning['state']} by {learning['by']} since {since(now_s - learning['since_s'])}{why}."
    behind = max(((count or 0, name) for name, count in state["lags"].items() if name != "tasks"), default=(0, ""))
    trainer = max(
        (report["per_s"].get("idle_seconds", 0.0) for report in alive if report["role"] == "train"), default=0.0
    )
    explorer = max(
        (report["gauges"].get("idle_share", 0.0) for report in alive if report["role"] == "explore"), default=0.0
    )
    issues = any(report["gauges"].get("issued_groups", 0.0) > 0 for report in _reports(state, "master"))
    if trainer >= WAITS:
        if behind[0] > BEHIND:
            why = f"processing is the bottleneck, {behind[0]:,} records of {behind[1]} wait"
        elif any(report["role"] == "serve" for report in alive) and not issues:
            why = "rated answers are the bottleneck"
        else:
            why = "the explorers are the bottleneck"
        return f"The trainer waited {min(trainer, 1.0):.0%} of the last minute: {why}."
    if explorer >= WAITS and issues:
        return f"The explorers waited {min(explorer, 1.0):.0%} of their time: the trainer is the bottleneck."
    if behind[0] > BEHIND:
        return f"{behind[0]:,} records of {behind[1]} wait: processing is the bottleneck."
    return "No role is a bottleneck."


def since(seconds: float) -> str:
    """A time span in words. It changes at most once a minute, since a screen reader reads each change aloud."""
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' if count > 1 else ''}"
    return "less than a minute"


def alarms(state: State) -> list[tuple[str, str]]:
    """Every alarm of `status`, in its order, behind the title of its section of the runbook, "" for none."""
    found = [(parse_alarm(line), line) for line in state["alarms"]]
    return [(known.title if known else "", line) for known, line in found]


def short(value: float) -> str:
    """A number in few characters.

    >>> short(12500.0), short(0.25), short(3.0)
    ('12.5k', '0.25', '3')
    """
    size = abs(value)
    if size >= 1e12:
        return f"{value:.0e}"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}" if size >= 1e-4 or not size else f"{value:.0e}"
