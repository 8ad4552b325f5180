"""The screen of `headrace status`."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.cli.look.kept import kept_lines
from infra.cli.terminal import clock, span
from infra.observe.alarms import parse_alarm

State = dict[str, Any]
RATES = (
    "steps", "experiences_trained", "episodes", "experiences", "tokens", "answers", "recorded", "experiences_out", "closures",
    "closures_read", "policy_versions", "reloads",
)  # fmt: skip
MAX_RATES = 4
WIDE = 120  # columns; below, the cells of a role are narrow


def show(console: Console, state: State) -> None:
    """Print the state: a line for each role, then what differs from nothing. A usual run fits 80 columns and 24 lines."""
    _show_roles(console, state["roles"])
    for release, instances in _releases(state["roles"]).items():
        where = "all roles" if len(instances) == len(state["roles"]) else ", ".join(instances)
        console.print(f"release    {release} at {where}", markup=False)
    if state["clock"]:
        console.print(f"clock      {state['clock']}", style="yellow")
    _show_versions(console, state)
    for stage, held in state["chains"].items():
        chains = dict.fromkeys(held.values())
        for chain in chains if len(chains) > 1 else ():  # workers are being replaced; --json has every chain
            where = ", ".join(partition for partition, other in held.items() if other == chain)
            console.print(f"chain      {stage} {where}: {chain or 'no steps'}", markup=False)
    lags = ", ".join(f"{name} {value:,}" for name, value in state["lags"].items() if value is not None)
    console.print(f"lag        {lags or 'no consumer has committed yet'}")
    drops = ", ".join(f"{reason} {count:,}" for reason, count in state["dropped"].items())
    console.print(f"dropped    {drops or 'nothing'}", markup=False)
    if state["masked"]:
        console.print(f"masked     {state['masked']:,} tokens older than pacing.max_staleness: not trained")
    for reason, count in state["cancelled"]["episodes"].items():
        tokens = state["cancelled"]["tokens"].get(reason, 0)
        console.print(f"stopped    {count:,} episodes: {reason} ({tokens:,} sampled tokens)", markup=False)
    _show_waiting(console, state)
    for line in kept_lines(state.get("kept", ())):
        console.print(f"kept       {line}", markup=False)
    for alarm in state["alarms"]:
        console.print(f"alarm      {alarm}", style="red", markup=False)
    known = [alarm for line in state["alarms"] if (alarm := parse_alarm(line)) is not None]
    for section in dict.fromkeys(alarm.section for alarm in known):
        console.print(f"runbook    {section}", markup=False)


def _show_roles(console: Console, roles: Sequence[State]) -> None:
    is_narrow = console.width < WIDE
    table = Table(box=None, pad_edge=False)
    table.add_column("role", overflow="fold", max_width=28 if is_narrow else None)
    table.add_column("state", max_width=20 if is_narrow else None)
    table.add_column("version")
    table.add_column("heard")
    table.add_column("per second", no_wrap=True, max_width=19 if is_narrow else None)
    for role in roles:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in shown_rates(role))
        version = "" if role["version"] < 0 else f"v{role['version']}"
        age = f"{max(0.0, role['age_s']):.0f} s ago"
        table.add_row(role["instance"], role["state"], version, age, rates, style="red" if role["silent"] else None)
    console.print(table)


def _show_versions(console: Console, state: State) -> None:
    policies, learning = state["policies"], state["learning"]
    console.print(f"published  {'nothing yet' if policies['published'] is None else 'v' + str(policies['published'])}")
    for refusal in policies["refused"]:
        console.print(f"refused    {refusal}", style="red", markup=False)
    if answers := state["answers"]:
        console.print(f"recorded   {answers['newest']} by v{answers['version']} at {clock(answers['at_s'] * 1000)}")
    if learning["state"] != "on":
        since, why = clock(learning["since_s"] * 1000), f": {learning['reason']}" if learning["reason"] else ""
        line = f"learning   {learning['state']} by {learning['by']} since {since}{why}"
        console.print(line, style="yellow", markup=False)
    for rollback in state["rollbacks"]:
        console.print(f"rollback   {rollback}", style="red", markup=False)
    for suite, found in state["accuracy"].items():
        console.print(f"accuracy   {suite} {accuracy_text(found)} at v{found['version']}")


def shown_rates(role: State) -> list[tuple[str, float]]:
    """The most telling rates of a role, each added up over its labels."""
    rates: dict[str, float] = {}
    for name, rate in role["rates"].items():
        base = name.partition("{")[0]
        rates[base] = rates.get(base, 0.0) + rate
    return [(name, rates[name]) for name in RATES if rates.get(name, 0.0) > 0][:MAX_RATES]


def _releases(roles: Sequence[State]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for role in roles:
        if role["release"]:
            found.setdefault(role["release"], []).append(role["instance"])
    return found


def _show_waiting(console: Console, state: State) -> None:
    if waiting := state["waiting"]:
        first = span(waiting["first_s"])
        console.print(f"waiting    {waiting['answers']:,} answers for feedback; the first window closes in {first}")
    for role in state["roles"]:
        if held := role["gauges"].get("held_back", 0.0):
            why = "tenant_share or subject_share of the last step is used up"
            console.print(f"held back  {held:,.0f} experiences: {why}", markup=False)
        if turns := role["gauges"].get("turns_held", 0.0):
            console.print(f"sessions   {turns:,.0f} turns wait for later turns at {role['instance']}", markup=False)


def accuracy_text(found: State) -> str:
    """Accuracy of an evaluation with its confidence interval and, with several samples a task, pass@k."""
    interval = found["interval"]
    within = f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
    passes = ", ".join(f"pass@{k} {share:.1%}" for k, share in found["pass_at"].items() if k != "1")
    return f"{found['share']:.1%}{within}{', ' + passes if passes else ''}"
