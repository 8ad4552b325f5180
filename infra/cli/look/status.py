"""`headrace status`: roles, versions, rates, lags, drops and alarms, read from the log alone."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from infra.cli.connect import reading
from infra.cli.look.kept import kept_lines, list_kept
from infra.cli.look.reader import GONE_S, OVER, READS, LastHour, expected_roles, missing, newest
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.terminal import Screen, clock, print_json, span
from infra.log.log import Log, LogMessage
from infra.observe.alarms import MAX_LAG, NO_VERSION_S, STILL, parse_alarm
from schemas import Block, Directive, EvalResult, PolicyEvent, Progress, Rollback, topics
from schemas.fields import CANARY_MISSING
from schemas.ids import answer_id
from schemas.records import together

RECENT = 2000  # records looked at in each topic: minutes of a busy system
NEWEST = 64  # records of experiences looked at for the newest answer
FAILED_SHARE = 0.05  # of a stage's experiences in that time: a step that fails more often is an alarm
OUTSTANDING = "outstanding_groups"  # gauge of the master

_TOPIC_MISSING = re.compile(r"feedback_topic_missing\{source=(?P<source>[^,]*),topic=(?P<topic>.*)\}")
_GROUP_ENDED = re.compile(r"closures_read\{outcome=(?P<outcome>[^,]*),reason=(?P<reason>.*)\}")
_STEP_FAILED = re.compile(r"step_failed\{stage=(?P<stage>[^,]*),step=(?P<step>.*)\}")

RATES = (
    "steps", "experiences_trained", "episodes", "experiences", "tokens", "answers", "recorded", "experiences_out", "closures",
    "closures_read", "policy_versions", "reloads",
)  # fmt: skip
MAX_RATES = 4

State = dict[str, Any]
Policies = Sequence[tuple[int, object]]
"""Records of `policies`, each with its time in ms."""


@command
async def status(
    chosen: SettingsFile,
    as_json: JsonOption = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if there is an alarm.")] = False,
    max_lag: Annotated[int, typer.Option(help="Unread records of a stage above which its lag is an alarm.")] = MAX_LAG,
    kept: Annotated[
        bool, typer.Option("--kept", help="Also print the size and the limit of each topic, folder and file.")
    ] = False,
) -> int:
    """Roles, versions, rates, lags, drops by reason, and alarms.

    The command reads only the log, so it works from any machine that reaches the broker. Rates cover the last minute.
    Alarms are, for example, a role that does not report, a stage that lags, a refused version, an unhealthy diagnostic.

    Example: [cyan]headrace status --check --json[/]
    """
    settings = chosen.load()
    async with reading(settings) as log:
        wanted = expected_roles(settings.expect, serves=settings.gateway is not None)
        state = await read_status(
            log, now_s=time.time(), max_lag=max_lag, wanted=wanted, groups=settings.groups_awaited
        )
        state["alarms"] = [line.replace("-c FILE", f"-c {chosen.config}") for line in state["alarms"]]
        if kept:
            state["kept"] = msgspec.to_builtins(await list_kept(log, settings, state["roles"]))
    if as_json:
        print_json(state)
    else:
        show(Screen(), state)
    return 1 if check and state["alarms"] else 0


async def read_status(
    log: Log,
    *,
    now_s: float,
    max_lag: int,
    wanted: Mapping[str, int] = MappingProxyType({}),
    groups: int = 0,
    policies: Policies | None = None,
    hour: LastHour | None = None,
) -> State:
    """Everything `status` shows, as plain data.

    now_s: by this machine's clock; ages are by the log's, which is at least at its newest report. wanted: see `expected_roles`.
    groups: that a step waits for, 0 where that is not known. policies, hour: of a caller that asks again and again;
    it has the newest of `policies` itself, and shows no answers, rollbacks and suites.
    """
    spoken = await (hour or LastHour(log)).spoken()
    newest_s = max((process.last_s for process in spoken.values()), default=0.0)
    now_s = max(newest_s, now_s)
    roles = newest_of_each([role_state(process.reports, now_s) for process in spoken.values()])
    last = {name: process.last for name, process in spoken.items()}
    reports = list(last.values())

    async def look(topic: topics.Topic, last: int, kind: str = "") -> list[LogMessage]:
        return await newest(log, topic, last, kind) if policies is None else []

    recent = policies or [(item.timestamp_ms, item.value) for item in await look(topics.POLICIES, RECENT)]
    state: State = {
        "roles": roles,
        "missing": missing(wanted, [*spoken.values()], now_s),
        "policies": policy_state(recent, [last[name] for name in speaking(roles)], now_s),
        "learning": learning_state(recent),
        "answers": answers_state(await look(topics.EXPERIENCES, NEWEST)),
        "rollbacks": rollbacks(await look(topics.BATCHES, RECENT, "rollback")),
        "chains": chains([last[role["instance"]] for role in roles]),
        "lags": await read_lags(log),
        "dropped": drops(reports),
        "waiting": waiting([last[name] for name in speaking(roles)], now_s),
        "accuracy": {
            message.value.suite: {
                "version": message.value.version,
                "share": message.value.accuracy,
                "interval": message.value.interval,
                "pass_at": message.value.pass_at,
            }
            for message in await look(topics.EVALS, RECENT)
            if isinstance(message.value, EvalResult)
        },
    }
    for role in roles:
        if role["role"] == "train" and role["state"] == "learning" and not role["silent"]:
            role["state"] = trainer_words(role, groups, all_dropped(reports))
    return {**state, "alarms": alarms(state, max_lag)}


def all_dropped(reports: Iterable[Progress]) -> str:
    """The line of an app whose groups so far were all dropped, by the counters of masters; "" of another."""
    dropped = Counter[str]()
    for report in reports:
        for name, value in report.counters.items():
            match = _GROUP_ENDED.fullmatch(name)
            if match and match["outcome"] == "buffered" and value:
                return ""
            if match and match["outcome"] == "dropped":
                dropped[match["reason"]] += int(value)
    if not dropped:
        return ""
    return f"all {dropped.total():,} groups so far were dropped: {dropped.most_common(1)[0][0]}"


def trainer_words(role: State, groups: int, why: str) -> str:
    """State of a trainer between two steps. groups: number that a step waits for. why: reason for no groups."""
    if role["rates"].get("steps", 0.0) > 0 or "groups_waiting" not in role["gauges"]:
        return "learning"
    there = f"{role['gauges']['groups_waiting']:.0f}" + (f" of {groups}" if groups else "")
    return f"waiting for groups ({there})" + (f"; {why}" if why else "")


def role_state(reports: Sequence[tuple[Progress, float]], now_s: float) -> State:
    """One process: its newest report, and the growth of its counters in the minute before it.

    rates: of every counter, a second, by its whole name; none after its first report. per_s: those without labels that grew.
    """
    (old, old_s), (new, new_s) = reports[0], reports[-1]
    grown = {name: value - old.counters.get(name, 0.0) for name, value in new.counters.items() if new is not old}
    rates = {name: round(more / max(new_s - old_s, 1e-9), 2) for name, more in sorted(grown.items())}
    age_s = round(now_s - new_s, 1)
    still = {name: more for name, more in sorted(grown.items()) if more > 0 and name.partition("{")[0] in STILL}
    return {
        "role": new.role,
        "instance": new.instance,
        "state": new.state,
        "reason": new.reason,
        "alarms": new.alarms,
        "version": new.version,
        "release": new.release,
        "age_s": age_s,
        "silent": age_s >= GONE_S and new.state not in OVER,
        "per_s": {name: rate for name, rate in rates.items() if grown[name] > 0 and "{" not in name},
        "rates": rates,
        "grown": still,
        "failing": failing(grown),
        "unread": unread(new.gauges),
        "gauges": {name: value for name, value in new.gauges.items() if "{" not in name},
        "stored_bytes": sum(value for name, value in new.gauges.items() if name.startswith("snapshot_bytes{")),
    }


def failing(grown: Mapping[str, float]) -> list[str]:
    """Steps of chains that failed at more than FAILED_SHARE, by the growth of their stage's counters: a line each."""
    found = []
    for name, failed in sorted(grown.items()):
        match = _STEP_FAILED.fullmatch(name)
        if match is None or failed <= 0:
            continue
        of = failed + grown.get(f"experiences_out{{stage={match['stage']}}}", 0.0)
        if failed > FAILED_SHARE * of:
            found.append(
                f"{match['stage']}: step {match['step']} failed on {failed:g} of {of:g} in the last minute; "
                "the first error of each kind is in the log of process, as step_failed"
            )
    return found


def unread(gauges: Mapping[str, float]) -> list[str]:
    """Sources whose topic is not there: a line each."""
    return [
        f'feedback "{found["source"]}" waits for topic {found["topic"]} to be made: headrace check --create -c FILE'
        for name, value in gauges.items()
        if value > 0 and (found := _TOPIC_MISSING.fullmatch(name))
    ]


def newest_of_each(roles: list[State]) -> list[State]:
    """Roles that still report; for a role without any, its last process."""
    alive = [role for role in roles if role["age_s"] < GONE_S]
    gone = [role for role in roles if role["role"] not in {other["role"] for other in alive}]
    last = {role["role"]: role for role in sorted(gone, key=lambda role: -role["age_s"])}
    return sorted([*alive, *last.values()], key=lambda role: role["instance"])


def chains(reports: Sequence[Progress]) -> dict[str, dict[str, str]]:
    """The steps in force with their versions: stage → partition → chain, of the workers that report and hold partitions."""
    found: dict[str, dict[str, str]] = {}
    for report in reports:
        for stage, chain in report.chains.items():
            for partition in report.partitions.get(stage, ()):
                found.setdefault(stage, {})[str(partition)] = chain
    return found


def speaking(roles: Sequence[State]) -> set[str]:
    """Instances of the roles that have neither fallen silent nor said that they are over."""
    return {role["instance"] for role in roles if not role["silent"] and role["state"] not in OVER}


def waiting(reports: Sequence[Progress], now_s: float) -> State:
    """Answers that wait for feedback, and seconds until the first window ends, as stream workers report."""
    waits = together(report.waits for report in reports if report.waits is not None)
    if not waits.answers:
        return {}
    return {"answers": waits.answers, "first_s": round(max(0.0, waits.first_ms / 1000 - now_s), 1)}


def drops(reports: Sequence[Progress]) -> dict[str, int]:
    """Dropped experiences by reason, the most frequent first."""
    found = Counter[str]()
    for report in reports:
        for name, value in report.counters.items():
            if name.startswith("dropped{reason="):
                found[name.removeprefix("dropped{reason=").removesuffix("}")] += int(value)
    return dict(found.most_common())


def policy_state(policies: Policies, reports: Sequence[Progress], now_s: float) -> State:
    events = [(time_ms, event) for time_ms, event in policies if isinstance(event, PolicyEvent)]
    published = {event.version: time_ms for time_ms, event in events if event.event == "published"}
    refused = sorted((version, by.instance, why) for by in reports for version, why in by.refused.items())
    version = max(published, default=None)
    return {
        "published": version,
        "age_s": now_s - max(published.values()) / 1000 if published else 0.0,
        "refused": [f"v{version} by {instance}: {why}" for version, instance, why in refused[-3:]],
        # One that was refused and replaced since is history; the newest being refused means that no engine serves it.
        "newest_refused": any(refusal[0] == version for refusal in refused),
    }


def learning_state(policies: Policies) -> State:
    state: State = {"state": "on"}
    for time_ms, directive in policies:
        if isinstance(directive, Directive) and directive.order == "continue":
            state = {"state": "on"}
        elif isinstance(directive, Directive) and directive.is_of_learning:
            word = {"pause": "paused", "drain": "draining"}[directive.order]
            state = {"state": word, "by": directive.owner, "reason": directive.reason, "since_s": time_ms / 1000}
    return state


def answers_state(experiences: Sequence[LogMessage]) -> State:
    """The newest recorded answer of the gateway, among the newest experiences; empty where there is none."""
    for message in reversed(experiences):
        if isinstance(message.value, Block) and (
            live := [member for member in message.value.experiences if member.lane == "live"]
        ):
            version = live[-1].spans[-1].version if live[-1].spans else -1
            return {"newest": answer_id(live[-1].id), "at_s": message.timestamp_ms / 1000, "version": version}
    return {}


def rollbacks(journaled: Sequence[LogMessage]) -> list[str]:
    """The last times the trainer went back, and why, from the journal: it stays true after a restart."""
    records = [message.value for message in journaled]
    return [
        f"steps {record.from_step} to {record.to_step} taken back, v{record.version} is v{record.restored_version} again: "
        f"{record.reason}"
        for record in records
        if isinstance(record, Rollback)
    ][-3:]


async def read_lags(log: Log) -> dict[str, int | None]:
    """Records that the group of each stage has yet to commit, by topic; None where it has committed nothing."""

    async def lag(topic: topics.Topic, group: str) -> int | None:
        committed = await log.bus.committed(log.group(group), log.name(topic))
        ends = await log.bus.end_offsets(log.name(topic)) if committed else {}
        return sum(max(0, end - committed.get(part, 0)) for part, end in ends.items()) if committed else None

    asked = [(topic, group) for group, read in READS.items() for topic in read]
    found = await asyncio.gather(*(lag(topic, group) for topic, group in asked))
    return {topic.name: waiting for (topic, _), waiting in zip(asked, found, strict=True)}


def alarms(state: State, max_lag: int) -> list[str]:
    """A line for each problem that an operator should look at."""
    found = list(state["missing"]) if state["roles"] else ["no role has reported"]
    for role in state["roles"]:
        if role["silent"] and not any(role["instance"] in line for line in state["missing"]):
            found.append(f"{role['instance']} has been silent for {role['age_s']:.0f} s")
        elif not role["silent"]:
            found += [
                f"{role['instance']}: {name} +{more:g} in the last minute" for name, more in role["grown"].items()
            ]
            found += [f"{role['instance']}: {alarm}" for alarm in role["alarms"]]
            found += [f"{role['instance']}: {line}" for line in (*role["failing"], *role["unread"])]
            found += canary_alarm(role)
            if spooled := role["gauges"].get("spool_records"):
                found.append(f"{role['instance']}: {spooled:,.0f} records wait on disk for the log; its log says why")
    lags: Mapping[str, int | None] = state["lags"]
    for name, waiting in lags.items():
        if waiting is not None and waiting > max_lag:
            found.append(f"{name}: {waiting:,} records wait, expected at most {max_lag:,}")
    if state["policies"]["newest_refused"]:
        found.append(f"policy v{state['policies']['published']} was refused: {state['policies']['refused'][-1]}")
    return found + no_version(state)


def no_version(state: State) -> list[str]:
    """The line of an app whose groups wait while no version comes; none where learning was stopped by an operator."""
    age_s = state["policies"]["age_s"]
    waiting = max((role["gauges"].get(OUTSTANDING, 0.0) for role in state["roles"]), default=0.0)
    if age_s <= NO_VERSION_S or not waiting or state["learning"]["state"] != "on":
        return []
    return [f"no version for {age_s / 60:.0f} min, and {waiting:,.0f} groups wait for the trainer"]


def canary_alarm(role: State) -> list[str]:
    """The line of a role that waits for a canary, with the remedy; none where the role has a canary or needs none."""
    if not (missing_s := role["gauges"].get(CANARY_MISSING, 0.0)):
        return []
    why, end = "a share of sessions is meant for one", "gateway.canary.share = 0"
    if role["role"] == "master":
        why, end = (
            f"version {role['gauges'].get('trial_version', -1.0):.0f} is on trial",
            "headrace promote STABLE --canary",
        )
    return [
        f"{role['instance']}: {why} and no canary has been heard of for {missing_s:.0f} s: "
        f"start headrace serve --channel canary (or see its log), or end it with {end}"
    ]


def show(console: Console, state: State) -> None:
    """Print the state: a line for each role, then version, lags, drops and alarms. A usual run fits 80 columns and 24 lines."""
    _show_roles(console, state["roles"])
    _show_versions(console, state)
    lags = ", ".join(f"{name} {value:,}" for name, value in state["lags"].items() if value is not None)
    console.print(f"lag        {lags or 'no consumer has committed yet'}")
    dropped = ", ".join(f"{reason} {count:,}" for reason, count in state["dropped"].items())
    console.print(f"dropped    {dropped or 'nothing'}", markup=False)
    _show_waiting(console, state)
    for line in kept_lines(state.get("kept", ())):
        console.print(f"kept       {line}", markup=False)
    for alarm in state["alarms"]:
        console.print(f"alarm      {alarm}", style="red", markup=False)
    known = [alarm for line in state["alarms"] if (alarm := parse_alarm(line)) is not None]
    for section in dict.fromkeys(alarm.section for alarm in known):
        console.print(f"runbook    {section}", markup=False)


def _show_roles(console: Console, roles: Sequence[State]) -> None:
    table = Table("role", "state", "version", "heard", "per second", box=None, pad_edge=False)
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


def _show_waiting(console: Console, state: State) -> None:
    if waiting := state["waiting"]:
        first = span(waiting["first_s"])
        console.print(f"waiting    {waiting['answers']:,} answers for feedback; the first window closes in {first}")
    for role in state["roles"]:
        if held := role["gauges"].get("held_back", 0.0):
            why = "tenant_share or subject_share of the last step is used up"
            console.print(f"held back  {held:,.0f} experiences: {why}", markup=False)


def accuracy_text(found: State) -> str:
    """Accuracy of an evaluation with its confidence interval and, with several samples a task, pass@k."""
    interval = found["interval"]
    within = f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
    passes = ", ".join(f"pass@{k} {share:.1%}" for k, share in found["pass_at"].items() if k != "1")
    return f"{found['share']:.1%}{within}{', ' + passes if passes else ''}"
