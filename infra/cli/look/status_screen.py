"""What `headrace status` prints: its state as tables and lines."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.cli.look.kept import kept_lines
from infra.cli.terminal import clock, span
from infra.observe.alarms import alarm_of

State = dict[str, Any]
RATES = (
    "steps", "experiences_trained", "episodes", "experiences", "tokens", "answers", "recorded", "experiences_out", "closures",
    "closures_read", "policy_versions", "reloads",
)  # fmt: skip
MAX_RATES = 4


def show(console: Console, state: State) -> None:
    """The state as tables."""
    roles = Table("role", "state", "version", "last heard", "per second")
    for role in state["roles"]:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in rates_of(role))
        version = "" if role["version"] < 0 else f"v{role['version']}"
        age = f"{max(0.0, role['age_s']):.0f} s ago"
        style = "red" if role["silent"] else None
        roles.add_row(role["instance"], role["state"], version, age, rates, style=style)
    console.print(roles)
    for release, instances in releases_of(state["roles"]).items():
        where = "all roles" if len(instances) == len(state["roles"]) else ", ".join(instances)
        console.print(f"release    {release} at {where}", markup=False)
    if state["clock"]:
        console.print(f"clock      {state['clock']}", style="yellow")
    policies = state["policies"]
    console.print(f"published  {'nothing yet' if policies['published'] is None else 'v' + str(policies['published'])}")
    for refusal in policies["refused"]:
        console.print(f"refused    {refusal}", style="red", markup=False)
    if answers := state["answers"]:
        console.print(f"recorded   {answers['newest']} by v{answers['version']} at {clock(answers['at_s'] * 1000)}")
    learning = state["learning"]
    if learning["state"] != "on":
        since = clock(learning["since_s"] * 1000)
        why = f": {learning['reason']}" if learning["reason"] else ""
        console.print(
            f"learning   {learning['state']} by {learning['by']} since {since}{why}", style="yellow", markup=False
        )
    for rollback in state["rollbacks"]:
        console.print(f"rollback   {rollback}", style="red", markup=False)
    for suite, found in state["accuracy"].items():
        console.print(f"accuracy   {suite} {accuracy_text(found)} at v{found['version']}")
    for stage, held in state["chains"].items():
        for chain in dict.fromkeys(held.values()):
            where = ", ".join(partition for partition, other in held.items() if other == chain)
            console.print(f"chain      {stage} {where}: {chain or 'no steps'}", markup=False)
    lags = ", ".join(f"{name} {value}" for name, value in state["lags"].items() if value is not None)
    console.print(f"lag        {lags or 'no consumer has committed yet'}")
    drops = ", ".join(f"{reason} {count:,}" for reason, count in state["dropped"].items())
    console.print(f"dropped    {drops or 'nothing'}", markup=False)
    for host, held in state["caches"].items():
        of = f"{held['bytes'] / 1e9:.1f} of {held['max_bytes'] / 1e9:g} GB"
        console.print(f"cache      {of} of weights at {host} (store.cache_gb)", markup=False)
    if state["masked"]:
        console.print(
            f"masked     {state['masked']:,} sampled tokens were older than pacing.max_staleness: not trained"
        )
    for reason, count in state["cancelled"]["episodes"].items():
        tokens = state["cancelled"]["tokens"].get(reason, 0)
        console.print(
            f"stopped    {count:,} episodes: {reason} ({tokens:,} sampled tokens went no further)", markup=False
        )
    _show_waiting(console, state)
    for line in kept_lines(state.get("kept", ())):
        console.print(f"kept       {line}", markup=False)
    for alarm in state["alarms"]:
        console.print(f"alarm      {alarm}", style="red", markup=False)
    for section in dict.fromkeys(one.section for line in state["alarms"] if (one := alarm_of(line)) is not None):
        console.print(f"runbook    {section}", markup=False)


def rates_of(role: State) -> list[tuple[str, float]]:
    """The rates that tell most about a role, each over all of its labels."""
    rates: dict[str, float] = {}
    for name, rate in role["rates"].items():
        base = name.partition("{")[0]
        rates[base] = rates.get(base, 0.0) + rate
    return [(name, rates[name]) for name in RATES if rates.get(name, 0.0) > 0][:MAX_RATES]


def releases_of(roles: Sequence[State]) -> dict[str, list[str]]:
    """Which headrace runs where: release → instances; of those that report it."""
    found: dict[str, list[str]] = {}
    for role in roles:
        if role["release"]:
            found.setdefault(role["release"], []).append(role["instance"])
    return found


def _show_waiting(console: Console, state: State) -> None:
    """What waits at the roles, and what of it is stored."""
    if waiting := state["waiting"]:
        console.print(
            f"waiting    {waiting['answers']:,} answers wait for feedback, the first closes in {span(waiting['first_s'])}"
        )
    for role in state["roles"]:
        if held := role["gauges"].get("held_back", 0.0):
            why = "tenants or users had their share of the last step (tenant_share, subject_share)"
            console.print(f"held back  {held:,.0f} experiences wait since their {why}", markup=False)
        if turns := role["gauges"].get("turns_held", 0.0):
            console.print(
                f"sessions   {turns:,.0f} turns wait for the rest of theirs at {role['instance']}", markup=False
            )
        if stored := role["stored_bytes"]:
            console.print(
                f"snapshots  {stored / 1e6:,.1f} MB of waiting answers stored by {role['instance']}", markup=False
            )


def accuracy_text(found: State) -> str:
    """The share of right answers with its confidence interval and, where there were several samples, pass@k."""
    interval = found["interval"]
    within = f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
    passes = ", ".join(f"pass@{k} {share:.1%}" for k, share in found["pass_at"].items() if k != "1")
    return f"{found['share']:.1%}{within}{', ' + passes if passes else ''}"
