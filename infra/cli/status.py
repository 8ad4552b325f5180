"""`headrace status`: roles, versions, rates, lags and drops by reason, read from the log alone."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.bus.log import Log
from infra.cli.connect import connected
from infra.cli.peek import newest
from infra.cli.settings import load_settings
from schemas import EvalResult, PolicyEvent, Progress, topics

RECENT = 2000  # progress records looked at: minutes of a busy system
GONE_S = 15.0  # a role that has not spoken for so long is shown as gone
# Which group reads which topic; its lag is what waits to be done.
CONSUMERS = (
    (topics.TASKSET_RAW, "tasks"),
    (topics.TASKS, "explore"),
    (topics.EXPERIENCES, "verify"),
    (topics.EXPERTS, "verify"),
    (topics.VERIFIED, "collect"),
)

State = dict[str, Any]


async def run_status(config: Path, sets: list[str], as_json: bool) -> int:
    """Print the state of the system; exit code 1 if a role that spoke lately has fallen silent."""
    settings = load_settings(config, sets)
    async with connected(settings, deadline_s=10.0) as log:
        state = await read_status(log, now_s=time.time())
    if as_json:
        print(json.dumps(state))
    else:
        show(Console(highlight=False), state)
    return 0 if all(role["age_s"] < GONE_S for role in state["roles"]) else 1


async def read_status(log: Log, *, now_s: float) -> State:
    """Everything `status` shows, as plain data."""
    first: dict[str, tuple[Progress, float]] = {}
    last: dict[str, tuple[Progress, float]] = {}
    for message in await newest(log, topics.PROGRESS, RECENT):
        if isinstance(message.value, Progress):
            first.setdefault(message.value.instance, (message.value, message.timestamp_ms / 1000))
            last[message.value.instance] = (message.value, message.timestamp_ms / 1000)
    roles = [role_state(first[name], last[name], now_s) for name in sorted(last)]
    return {
        "roles": newest_of_each(roles),
        "policies": await policy_state(log),
        "lags": {topic.name: await lag(log, topic, group) for topic, group in CONSUMERS},
        "dropped": dropped([report for report, _ in last.values()]),
        "accuracy": {
            message.value.suite: {
                "version": message.value.version,
                "share": message.value.num_correct / message.value.num_tasks,
            }
            for message in await newest(log, topics.EVALS, RECENT)
            if isinstance(message.value, EvalResult)
        },
    }


def role_state(first: tuple[Progress, float], last: tuple[Progress, float], now_s: float) -> State:
    """One process: its newest report, and rates since its oldest one at hand."""
    (old, old_s), (new, new_s) = first, last
    span_s = max(new_s - old_s, 1e-9)
    rates = {
        name: (value - old.counters.get(name, 0.0)) / span_s
        for name, value in new.counters.items()
        if new is not old and "{" not in name and value > old.counters.get(name, 0.0)
    }
    return {
        "role": new.role,
        "instance": new.instance,
        "state": new.state,
        "version": new.version,
        "age_s": round(now_s - new_s, 1),
        "per_s": {name: round(rate, 2) for name, rate in sorted(rates.items())},
        "gauges": {name: value for name, value in new.gauges.items() if "{" not in name},
    }


def newest_of_each(roles: list[State]) -> list[State]:
    """Those that still speak; of a role where none does, the one that spoke last."""
    alive = [role for role in roles if role["age_s"] < GONE_S]
    gone = [role for role in roles if role["role"] not in {one["role"] for one in alive}]
    last = {role["role"]: role for role in sorted(gone, key=lambda role: -role["age_s"])}
    return sorted([*alive, *last.values()], key=lambda role: role["instance"])


def dropped(reports: list[Progress]) -> dict[str, int]:
    """Experiences dropped by the processes at hand: reason → count."""
    found: dict[str, int] = {}
    for report in reports:
        for name, value in report.counters.items():
            if name.startswith("dropped{reason="):
                reason = name.removeprefix("dropped{reason=").removesuffix("}")
                found[reason] = found.get(reason, 0) + int(value)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


async def policy_state(log: Log) -> State:
    """Newest published version, and what was refused lately."""
    events = [message.value for message in await newest(log, topics.POLICIES, RECENT)]
    published = [event for event in events if isinstance(event, PolicyEvent) and event.event == "published"]
    refused = [event for event in events if isinstance(event, PolicyEvent) and event.event == "refused"]
    return {
        "published": max((event.version for event in published), default=None),
        "refused": [f"v{event.version} by {event.owner}: {event.reason}" for event in refused[-3:]],
    }


async def lag(log: Log, topic: topics.Topic, group: str) -> int | None:
    """Records the group has yet to commit; None where it has committed nothing."""
    committed = await log.bus.committed(log.group(group), log.name(topic))
    if not committed:
        return None
    ends = await log.bus.end_offsets(log.name(topic))
    return sum(max(0, end - committed.get(partition, 0)) for partition, end in ends.items())


def show(console: Console, state: State) -> None:
    """The state as tables."""
    roles = Table("role", "state", "version", "last heard", "per second")
    for role in state["roles"]:
        silent = role["age_s"] >= GONE_S
        rates = ", ".join(f"{name} {rate:g}" for name, rate in list(role["per_s"].items())[:6])
        version = "" if role["version"] < 0 else f"v{role['version']}"
        age = f"{role['age_s']:.0f} s ago"
        roles.add_row(role["instance"], role["state"], version, age, rates, style="red" if silent else None)
    console.print(roles)
    policies = state["policies"]
    console.print(f"published  {'nothing yet' if policies['published'] is None else 'v' + str(policies['published'])}")
    for refusal in policies["refused"]:
        console.print(f"refused    {refusal}", style="red")
    for suite, found in state["accuracy"].items():
        console.print(f"accuracy   {suite} {found['share']:.1%} at v{found['version']}")
    lags = ", ".join(f"{name} {value}" for name, value in state["lags"].items() if value is not None)
    console.print(f"lag        {lags or 'no consumer has committed yet'}")
    console.print(
        f"dropped    {', '.join(f'{reason} {count:,}' for reason, count in state['dropped'].items()) or 'nothing'}"
    )
