"""The flow: what each role does now, who waits for whom in one sentence, and what deserves a look. From `status` alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from infra.cli.console.charts import short
from infra.cli.status_screen import State
from infra.observe.alarms import alarm_of, anchor
from infra.policies.channel import Stable

WAITS = 0.4  # share of a minute above which a wait is worth a word
BEHIND = 1000  # records that wait for a stage


class Box(msgspec.Struct, frozen=True):
    """One box of the picture: where it lies on a grid of 12 by 4, what it is, three lines about it, and how it does.

    Example: Box(name="Trainer", x=5, y=3, lines=("0.29 steps a second",), link="/learning")
    """

    name: str
    x: float
    y: float
    lines: tuple[str, ...] = ()
    link: str = "/"
    state: str = ""  # "", "quiet" (not there) or "alarm"


class Arrow(msgspec.Struct, frozen=True):
    """From one box to another, by points of the grid. label: what runs along it.

    Example: Arrow(points=((1.5, 1.0), (1.5, 2.0)), label="tasks")
    """

    points: tuple[tuple[float, float], ...]
    label: str = ""


def boxes_of(state: State, stable: Stable) -> list[Box]:
    """The picture of the README with what each part does now."""
    lags: Mapping[str, int | None] = state["lags"]
    published = state["policies"]["published"]
    pending = sum(_gauge(state, "process", "groups_pending"))
    return [
        Box("Tasks", 0, 0, _lines(_number(state, "master", "tasks", "tasks")), "/data"),
        Box("Your agent", 4.5, 0, _lines(_rate(state, "serve", ("answers", "requests"), "answers/s")), "/answers?lane=live"),
        Box("People", 9, 0, ("feedback",), "/answers?said=yes"),
        _role(state, "Master", "master", 0, 1, _number(state, "master", "outstanding_groups", "groups outstanding")),
        _role(
            state, "Explorers", "explore", 3, 1, _rate(state, "explore", ("tokens",), "tokens/s"),
            _number(state, "explore", "episodes_in_flight", "in flight"),
        ),
        _role(state, "Gateway", "serve", 6, 1, _number(state, "serve", "answers_running", "running")),
        _role(
            state, "Verify and score", "process", 3, 2, _wait([lags.get("experiences"), lags.get("experts")]),
            _rate(state, "process", ("experiences_in",), "in/s"), link="/data",
        ),
        Box(
            "Collect", 6, 2,
            _lines(
                _wait([lags.get("verified")]), f"{pending:,.0f} open groups",
                f"{state['waiting']['answers']:,} answers wait for feedback" if state["waiting"] else "",
            ),
            "/answers?fate=pending", _state(state, "process"),
        ),
        _role(
            state, "Trainer", "train", 3, 3, _rate(state, "train", ("steps",), "steps/s"),
            _rate(state, "train", ("experiences_trained",), "answers/s"), link="/learning",
        ),
        Box(
            "Versions", 9, 2.5,
            _lines(
                f"v{published} published" if published is not None else "none yet",
                f"v{stable.version} {'pinned' if stable.pinned else 'stable'}" if stable.version >= 0 else "none stable",
                f"v{stable.trial} on trial" if stable.trial >= 0 else "",
            ),
            "/versions", "alarm" if state["policies"]["newest_refused"] else "",
        ),
    ]  # fmt: skip


ARROWS = (
    Arrow(((1.2, 0.62), (1.2, 1.0))),
    Arrow(((5.7, 0.62), (5.7, 0.81), (7.2, 0.81), (7.2, 1.0)), ""),
    Arrow(((10.2, 0.62), (10.2, 2.08), (8.4, 2.08)), "feedback"),
    Arrow(((2.4, 1.31), (3.0, 1.31)), "groups"),
    Arrow(((4.2, 1.62), (4.2, 2.0)), "episodes"),
    Arrow(((6.9, 1.62), (6.9, 1.81), (4.9, 1.81), (4.9, 2.0)), "answers"),
    Arrow(((5.4, 2.31), (6.0, 2.31)), "scored"),
    Arrow(((7.2, 2.62), (7.2, 3.31), (5.4, 3.31)), "groups with rewards"),
    Arrow(((4.2, 3.62), (4.2, 3.85), (10.2, 3.85), (10.2, 3.12)), "weights"),
    Arrow(((9.0, 2.75), (8.7, 2.75), (8.7, 1.31), (8.4, 1.31)), "hot reload"),
)


def sentence(state: State, now_s: float) -> str:
    """Who waits for whom, as one sentence."""
    alive = [
        role for role in state["roles"] if not role["silent"] and role["state"] not in ("stopped", "done", "failed")
    ]
    if not state["roles"]:
        return "No role has spoken yet."
    if not alive:
        age_s = min(role["age_s"] for role in state["roles"])
        return f"Nothing runs: this is how it was {since(age_s)} ago."
    learning = state["learning"]
    if learning["state"] != "on":
        why = f": {learning['reason']}" if learning["reason"] else ""
        return f"Learning is {learning['state']} by {learning['by']} since {since(now_s - learning['since_s'])}{why}."
    behind = max(((count or 0, name) for name, count in state["lags"].items() if name != "tasks"), default=(0, ""))
    trainer = max((role["per_s"].get("idle_seconds", 0.0) for role in alive if role["role"] == "train"), default=0.0)
    explorer = max((role["gauges"].get("idle_share", 0.0) for role in alive if role["role"] == "explore"), default=0.0)
    if trainer >= WAITS:
        if behind[0] > BEHIND:
            who = f"processing is the bottleneck, {behind[0]:,} records of {behind[1]} wait"
        elif any(role["role"] == "serve" for role in alive) and not _issues(state):
            who = "rated answers come no faster"
        else:
            who = "the explorers are the bottleneck"
        return f"The trainer waited {min(trainer, 1.0):.0%} of the last minute: {who}."
    if explorer >= WAITS and _issues(state):
        return f"The explorers waited {min(explorer, 1.0):.0%} of their time: the trainer is the bottleneck."
    if behind[0] > BEHIND:
        return f"{behind[0]:,} records of {behind[1]} wait: processing is the bottleneck."
    return "Nobody waits long: the parts keep pace."


def since(seconds: float) -> str:
    """A span in words.

    >>> since(75)
    '1 minute'
    """
    for size, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' if count > 1 else ''}"
    return f"{max(0, int(seconds))} seconds"


def alarms_of(state: State) -> list[tuple[str, str]]:
    """Every alarm with the page of help it has, and its section there."""
    return [
        (line, "runbook" if (alarm := alarm_of(line)) is None else f"runbook#{anchor(alarm.title)}")
        for line in state["alarms"]
    ]


def _issues(state: State) -> bool:
    return any(value > 0 for value in _gauge(state, "master", "issued_groups"))


def _role(state: State, name: str, role: str, x: float, y: float, *lines: str, link: str = "/answers") -> Box:
    versions = {one["version"] for one in _alive(state, role) if one["version"] >= 0}
    serves = f"v{max(versions)}" if versions and role in ("explore", "serve", "train") else ""
    count = len(_alive(state, role))
    title = f"{name} × {count}" if count > 1 else name
    return Box(title, x, y, _lines(*lines, serves), link, _state(state, role))


def _alive(state: State, role: str) -> Sequence[Mapping[str, Any]]:
    return [one for one in state["roles"] if one["role"] == role and not one["silent"]]


def _state(state: State, role: str) -> str:
    here = [one for one in state["roles"] if one["role"] == role]
    if any(one["alarms"] or one["grown"] or one["failing"] or one["unread"] for one in _alive(state, role)):
        return "alarm"
    return (
        "" if any(not one["silent"] and one["state"] not in ("stopped", "done", "failed") for one in here) else "quiet"
    )


def _gauge(state: State, role: str, name: str) -> list[float]:
    return [one["gauges"][name] for one in state["roles"] if one["role"] == role and name in one["gauges"]]


def _number(state: State, role: str, name: str, word: str) -> str:
    found = _gauge(state, role, name)
    return f"{sum(found):,.0f} {word}" if found else ""


def _rate(state: State, role: str, names: Sequence[str], word: str) -> str:
    """The first of these rates that the role tells."""
    for name in names:
        if found := [one["per_s"][name] for one in _alive(state, role) if name in one["per_s"]]:
            return f"{short(sum(found))} {word}"
    return ""


def _wait(lags: Sequence[int | None]) -> str:
    known = [lag for lag in lags if lag is not None]
    return f"{sum(known):,} wait" if known else ""


def _lines(*lines: str) -> tuple[str, ...]:
    return tuple(line for line in lines if line)[:3]
