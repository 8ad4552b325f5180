"""The demo's report: report.json, a table and a plot, of figures that the log, the roles and the audit give."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from infra.cli.demo.record import RunRecord
from infra.cli.demo.settings import DemoOptions, task_of
from infra.cli.demo.traffic import USERS_FILE
from infra.cli.demo.users import Seen
from infra.cli.settings import Settings
from infra.ledger.audit import audit
from infra.local.supervisor import ChildState
from infra.log.log import Log
from schemas import Batch, topics
from schemas.journal import JournalRecord, effective

ENDS = 500  # answers at each end of the run over which users' accuracy is reported
WINDOW = 200  # answers that a point of the users' curve averages over
ROLLOUTS_ALONE = {"staleness", "engine against trainer", "sampling"}
Values = Mapping[str, Any]


async def finish_report(
    log: Log, settings: Settings, run: RunRecord, options: DemoOptions, children: Sequence[ChildState]
) -> dict[str, Any]:
    """Write report.json and report.png; returns the figures. run: read to the end of the log."""
    name, task = settings.run or settings.app, task_of(options.task)
    account = await audit(log, name)
    journal = [message.value async for message in log.read_all(topics.BATCHES)]
    entries, _ = effective([record for record in journal if isinstance(record, JournalRecord)], name)
    phases = [entry.phase for entry in entries if isinstance(entry, Batch)]
    values: dict[str, Any] = {
        **accuracies(run, task.suite),
        "wall_s": round(run.elapsed_s(), 1),
        "startup_s": await startup_s(log, run.started_s),
        "task": options.task,
        "measure": task.measure,
        "engine": options.engine,
        "reload_kv": settings.reload.kv,
        "control": options.control,
        "seed": options.seed,
        "policy_versions": len(run.published),
        "steps": phases.count("train"),
        "warmup_steps": phases.count("warmup"),
        "experiences_published": account.published,
        "experiences_trained": account.trained,
        "dropped": account.dropped,
        "pending": account.pending,
        "audit_clean": account.is_clean,
        **staleness(run),
        **measured(run),
        "delta_bytes_over_full": delta_share(run),
        "peak_rss_mb": {
            state.name: round(state.peak_rss_bytes / 2**20, 1)
            for state in children
            if not state.name.startswith("load-")
        },
        "restarts": {state.name: state.restarts for state in children if state.restarts},
        "accuracy": {suite: sorted(found.items()) for suite, found in run.accuracy.items()},
    }
    draw = draw_plot
    if options.traffic:
        values |= await asyncio.to_thread(traffic_values, run, settings.folder / USERS_FILE, task.suite)
        draw = draw_traffic
    (settings.folder / "report.json").write_text(json.dumps(values, indent=2) + "\n")
    await asyncio.to_thread(draw, run, values, settings.folder / "report.png")
    return values


async def startup_s(log: Log, started_s: float) -> float | None:
    """Seconds from the start to the first experience in the log; None if an earlier start did that."""
    begins, ends = await log.bounds(topics.EXPERIENCES)
    first = [
        record.timestamp_ms
        for index, begin in begins.items()
        if begin < ends[index]
        for record in (await log.at(topics.EXPERIENCES, index, [begin])).values()
    ]
    after_s = min(first, default=0) / 1000 - started_s
    return round(after_s, 1) if after_s > 0 else None


def accuracies(run: RunRecord, suite: str) -> dict[str, object]:
    """Accuracy in `suite` of the first policy, of the one after the warm-up, and of the last one evaluated."""
    found = run.accuracy.get(suite, {})
    return {
        "accuracy_start": found.get(0),
        "accuracy_after_sft": found.get(1),
        "accuracy_final": found[max(found)] if found else None,
        "accuracy_final_version": max(found, default=None),
    }


def staleness(run: RunRecord) -> dict[str, object]:
    """Versions between sampling and training, weighted by tokens."""
    ages = Counter[int]()
    for report in run.reports.values():
        for name, count in report.counters.items():
            if name.startswith("staleness_tokens{versions="):
                ages[int(name[26:-1])] += count  # type: ignore[assignment]
    total = sum(ages.values())
    if not total:
        return {"staleness_mean": None, "staleness_p95": None, "staleness_max": None}
    seen, p95 = 0.0, max(ages)
    for age in sorted(ages):
        seen += ages[age]
        if seen >= 0.95 * total:
            p95 = age
            break
    mean = sum(age * count for age, count in ages.items()) / total
    return {"staleness_mean": round(mean, 3), "staleness_p95": p95, "staleness_max": max(ages)}


def measured(run: RunRecord) -> dict[str, object]:
    """The figures that the roles report."""
    idle = run.counter("train", "idle_seconds")
    spent = {
        name: run.counter("train", f"{name}_seconds") for name in ("learner", "publish_wait", "snapshot", "journal")
    }
    busy = sum(spent.values())
    mismatches = {
        name: max(
            (report.gauges.get(f"{name}_run", 0.0) for report in run.reports.values() if report.role == "train"),
            default=None,
        )
        for name in ("mismatch_abs_max", "mismatch_k3")
    }
    names = ("reload_pause_ms_p50", "reload_pause_ms_p95", "publish_to_serving_ms_p50", "publish_to_serving_ms_p95")
    return {
        **mismatches,
        **{name: run.gauge("explore", name) for name in names},
        "requests_failed": int(run.counter("explore", "requests_failed")),
        "rollout_tokens_per_s": run.gauge("explore", "tokens_per_s"),
        "trainer_idle_share": round(idle / (idle + busy), 3) if idle + busy else None,
        "bookkeeping_share": share(spent["journal"] + run.counter("train", "checkpoint_seconds"), spent["learner"]),
        "explorer_idle_share": run.gauge("explore", "idle_share"),
    }


def share(part: float, whole: float) -> float | None:
    """A part of a whole; None where the whole is 0."""
    return round(part / whole, 4) if whole else None


def delta_share(run: RunRecord) -> float | None:
    """Bytes a follower reads per version over the bytes of all weights, on average over the versions after the first."""
    sizes = [event.stats for version, event in run.published.items() if version > 0 and event.parent >= 0]
    shares = [size["bytes"] / size["full_bytes"] for size in sizes if size.get("full_bytes")]
    return round(sum(shares) / len(shares), 5) if shares else None


def read_seen(path: Path) -> list[Seen]:
    """The answers that users got, in the order of time; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return sorted((msgspec.json.decode(line, type=Seen) for line in lines), key=lambda seen: seen.at_s)


def traffic_values(run: RunRecord, users: Path, suite: str) -> dict[str, object]:
    """The traffic demo's part of report.json. `requests_failed` is what users saw fail, not what the engine counted."""
    seen = read_seen(users)
    answered = [answer for answer in seen if answer.version >= 0]
    accuracy = run.accuracy.get(suite, {})
    ages = [row["live/staleness_mean"] for row in run.history if "live/staleness_mean" in row]
    return {
        "requests_failed": sum(answer.failed for answer in seen),
        "errors_seen": sorted({answer.error for answer in seen if answer.error})[:5],
        "answers": len(answered),
        "habits": dict(Counter(answer.habit for answer in answered).most_common()),
        "users_right_first": share_right(answered[:ENDS]),
        "users_right_last": share_right(answered[-ENDS:]),
        "stable": [[round(at_s, 1), version, accuracy.get(version)] for at_s, version in run.stable],
        "stable_first": next((accuracy[version] for _, version in run.stable if version in accuracy), None),
        "stable_last": next((accuracy[version] for _, version in run.stable[::-1] if version in accuracy), None),
        "held": run.num_held,
        "live_staleness_mean": round(sum(ages) / len(ages), 1) if ages else None,
    }


def share_right(seen: Sequence[Seen]) -> float | None:
    """Share of right answers; None where there are no answers."""
    return round(sum(answer.right for answer in seen) / len(seen), 4) if seen else None


def windows(seen: Sequence[Seen], started_s: float) -> list[tuple[float, float]]:
    """Seconds since the start and the share of right answers, of consecutive windows of answers."""
    parts = [seen[start : start + WINDOW] for start in range(0, len(seen) - WINDOW + 1, WINDOW)]
    return [(part[-1].at_s - started_s, sum(answer.right for answer in part) / WINDOW) for part in parts]


def result_table(values: Values) -> Table:
    """The figures of the report, as a table."""
    table = Table(title="headrace demo", show_header=False)
    rows = {
        values["measure"]: " → ".join(
            percent(values[name]) for name in ("accuracy_start", "accuracy_after_sft", "accuracy_final")
        )
        + "  (start, after the warm-up, final)",
        "wall time": f"{values['wall_s']:.0f} s, first experience after {number(values['startup_s'], 0)} s",
        "optimizer steps": f"{values['steps']} and {values['warmup_steps']} of warm-up, {values['policy_versions']} versions",
        "experiences": f"{values['experiences_published']:,} published, {values['experiences_trained']:,} trained, "
        f"{sum(values['dropped'].values()):,} dropped, {values['pending']:,} pending",
        "dropped": ", ".join(f"{reason} {count:,}" for reason, count in values["dropped"].items()) or "none",
        "staleness": f"{number(values['staleness_mean'])} mean, {values['staleness_p95']} p95, {values['staleness_max']} max",
        "engine against trainer": f"{number(values['mismatch_abs_max'], 7)} largest logprob difference",
        "hot reload": f"pause {number(values['reload_pause_ms_p50'], 0)} ms p50, "
        f"{number(values['reload_pause_ms_p95'], 0)} p95 with {values['reload_kv']}, "
        f"published to serving {number(values['publish_to_serving_ms_p95'], 0)} ms p95",
        "requests failed": str(values["requests_failed"]),
        "sampling": f"{number(values['rollout_tokens_per_s'], 0)} tokens/s; idle: explorer "
        f"{number(values['explorer_idle_share'])}, trainer {number(values['trainer_idle_share'])}",
        "peak memory": ", ".join(f"{name} {value:,.0f}" for name, value in values["peak_rss_mb"].items()) + " MB",
    }
    if "stable" in values:
        rows = traffic_rows(values) | {name: text for name, text in rows.items() if name not in ROLLOUTS_ALONE}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def traffic_rows(values: Values) -> dict[str, str]:
    """The rows of the traffic demo, which come first."""
    right = " → ".join(percent(values[name]) for name in ("users_right_first", "users_right_last"))
    stable = " → ".join(percent(values[name]) for name in ("stable_first", "stable_last"))
    habits = ", ".join(f"{count:,} {habit}" for habit, count in values["habits"].items())
    return {
        "stable channel": f"{stable} of the held-out tasks; {len(values['stable'])} versions let pass, {values['held']} held",
        "what users saw": f"{right} right, of {values['answers']:,} answers",
        "what they said": habits,
        "staleness": f"{number(values['live_staleness_mean'], 0)} versions on average, which the lane does not bound",
    }


def percent(share: float | None) -> str:
    """A share in percent; a dash for none."""
    return "–" if share is None else f"{share:.1%}"


def number(value: float | None, digits: int = 2) -> str:
    """A number; a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def begin_of(rows: Sequence[Mapping[str, float]]) -> float:
    """When the run began, in seconds after this start; below 0 for a run that was continued."""
    return min([0.0, *(row["elapsed_s"] for row in rows)])


def draw_plot(run: RunRecord, values: Mapping[str, object], path: Path) -> None:
    """Accuracy over versions; reward and staleness beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for suite, found in sorted(run.accuracy.items()):
        versions = sorted(found)
        left.plot(versions, [found[version] for version in versions], marker="o", markersize=3, label=suite)
    left.set(xlabel="policy version", ylabel="greedy accuracy", ylim=(0, 1), title=f"control: {values['control']}")
    left.axhline(0.9, color="grey", linewidth=0.8, linestyle="--")
    left.grid(alpha=0.3)
    if run.accuracy:
        left.legend(loc="lower right")
    rows = [row for row in run.history if "reward_mean" in row]
    begin_s = begin_of(rows)
    right.plot(
        [row["elapsed_s"] - begin_s for row in rows],
        [row["reward_mean"] for row in rows],
        label="reward of trained groups",
    )
    highest = max([1.0, *(row["reward_mean"] for row in rows)])
    right.set(xlabel="seconds since the start", ylabel="reward", ylim=(0, highest), title="what was trained on")
    stale = [row for row in rows if "usual/staleness_mean" in row]
    twin = right.twinx()
    twin.plot(
        [row["elapsed_s"] - begin_s for row in stale],
        [row["usual/staleness_mean"] for row in stale],
        color="tab:orange",
        linewidth=0.8,
    )
    twin.set_ylabel("staleness, versions (orange)")
    twin.set_ylim(bottom=0)
    right.grid(alpha=0.3)
    right.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_traffic(run: RunRecord, values: Mapping[str, object], path: Path) -> None:
    """Left: what was served and what users saw, over time. Right: every evaluated version, and those that were promoted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    suite = str(values["measure"]).removesuffix(" accuracy")
    accuracy = run.accuracy.get(suite, {})
    moves = [(at_s, accuracy[version]) for at_s, version in run.stable if version in accuracy]
    if moves:
        moves.append((run.history[-1]["elapsed_s"] if run.history else moves[-1][0], moves[-1][1]))
        left.step(*zip(*moves, strict=True), where="post", label=f"stable version, {suite}, greedy")
    points = windows([one for one in read_seen(path.with_name(USERS_FILE)) if one.version >= 0], run.started_s)
    if points:
        label = f"answers users got, right of {WINDOW}"
        left.plot(*zip(*points, strict=True), marker=".", linewidth=0.6, label=label)
    left.set(xlabel="seconds since the start", ylabel="accuracy", ylim=(0, 1), title="what customers got")
    versions = sorted(accuracy)
    right.plot(
        versions, [accuracy[one] for one in versions], color="grey", marker="o", markersize=3, label="candidates"
    )
    promoted = [version for _, version in run.stable if version in accuracy]
    right.plot(promoted, [accuracy[one] for one in promoted], "o", markersize=6, label="let pass by the gate")
    right.set(xlabel="policy version", ylim=(0, 1), title=f"{suite}, every version that was evaluated")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
