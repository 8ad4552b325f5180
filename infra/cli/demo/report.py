"""The demo's report: figures read back from the log, from the roles' own reports and from the audit; a table and a plot."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.cli.demo.settings import DemoOptions, task_of
from infra.cli.demo.traffic import USERS_FILE
from infra.cli.demo.traffic_report import draw_traffic, traffic_values
from infra.cli.demo.watch import Watch, follow_log
from infra.cli.settings import Settings
from infra.ledger.account import Account
from infra.ledger.audit import audit
from infra.log.log import Log
from schemas import Batch, topics
from schemas.journal import JournalRecord, effective


class DemoReport(msgspec.Struct, frozen=True):
    """values: what report.json holds."""

    values: dict[str, Any]

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(self.values)


async def finish_report(log: Log, settings: Settings, watch: Watch, options: DemoOptions) -> DemoReport:
    """Read the log to its end, and write report.json and report.png."""
    await catch_up(log, watch)
    account = await audit(log, settings.run or settings.app)
    journal = [message.value async for message in log.read_all(topics.BATCHES)]
    records = [one for one in journal if isinstance(one, JournalRecord)]
    entries, _ = effective(records, settings.run or settings.app)
    phases = [entry.phase for entry in entries if isinstance(entry, Batch)]
    values: dict[str, Any] = {
        **accuracies(watch, task_of(options.task).suite),
        **times(watch),
        "task": options.task,
        "measure": task_of(options.task).measure,
        "engine": options.engine,
        "reload_kv": settings.reload.kv,
        "control": options.control,
        "seed": options.seed,
        "policy_versions": len(watch.published),
        "steps": phases.count("train"),
        "warmup_steps": phases.count("warmup"),
        **accounted(account),
        **staleness(watch),
        **measured(watch),
        "delta_bytes_over_full": delta_share(watch),
        "peak_rss_mb": {
            name: round(state.peak_rss_bytes / 2**20, 1)
            for states in watch.children
            for name, state in states.items()
            if not name.startswith("load-")
        },
        "restarts": {name: count for name, count in watch.restarts.items() if count},
        "accuracy": {suite: sorted(found.items()) for suite, found in watch.accuracy.items()},
    }
    draw = draw_plot
    if options.traffic:
        values |= await asyncio.to_thread(
            traffic_values, watch, settings.folder / USERS_FILE, task_of(options.task).suite
        )
        draw = draw_traffic
    report = DemoReport(values)
    (settings.folder / "report.json").write_text(json.dumps(values, indent=2) + "\n")
    await asyncio.to_thread(draw, watch, values, settings.folder / "report.png")
    return report


async def catch_up(log: Log, watch: Watch) -> None:
    """Read the small topics to their end: the last results came while the roles were stopping."""
    whole = Watch(started_s=watch.started_s)
    follower = asyncio.create_task(follow_log(log, whole, until_end=True))
    await follower
    watch.accuracy, watch.reports, watch.published = whole.accuracy, whole.reports, whole.published
    watch.newest, watch.history = whole.newest, whole.history
    watch.stable, watch.num_held = whole.stable, whole.num_held
    watch.first_experience_s = whole.first_experience_s


def accuracies(watch: Watch, suite: str) -> dict[str, object]:
    """Accuracy in `suite` of the first policy, of the one after the warm-up, and of the last one evaluated."""
    found = watch.accuracy.get(suite, {})
    return {
        "accuracy_start": found.get(0),
        "accuracy_after_sft": found.get(1),
        "accuracy_final": found[max(found)] if found else None,
        "accuracy_final_version": max(found, default=None),
    }


def times(watch: Watch) -> dict[str, object]:
    """wall_s until now; startup_s until the first experience was in the topic, None if another process did that."""
    first = watch.first_experience_s
    return {"wall_s": round(watch.elapsed_s(), 1), "startup_s": round(first, 1) if first and first > 0 else None}


def accounted(account: Account) -> dict[str, object]:
    """The figures of the audit."""
    return {
        "experiences_published": account.published,
        "experiences_trained": account.trained,
        "dropped": account.dropped,
        "pending": account.pending,
        "audit_clean": account.is_clean,
    }


def staleness(watch: Watch) -> dict[str, object]:
    """Versions between sampling and training, weighted by tokens."""
    ages = {int(labels.split("=")[1].strip('"')): count for labels, count in watch.counters("staleness_tokens").items()}
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


def measured(watch: Watch) -> dict[str, object]:
    """The figures that the roles report."""
    idle = watch.counter("train", "idle_seconds")
    spent = {
        name: watch.counter("train", f"{name}_seconds") for name in ("learner", "publish_wait", "snapshot", "journal")
    }
    busy = sum(spent.values())
    mismatches = {
        name: max(
            (one.gauges.get(f"{name}_run", 0.0) for one in watch.reports.values() if one.role == "train"), default=None
        )
        for name in ("mismatch_abs_max", "mismatch_k3")
    }
    names = ("reload_pause_ms_p50", "reload_pause_ms_p95", "publish_to_serving_ms_p50", "publish_to_serving_ms_p95")
    return {
        **mismatches,
        **{name: watch.gauge("explore", name) for name in names},
        "requests_failed": int(watch.counter("explore", "requests_failed")),
        "rollout_tokens_per_s": watch.gauge("explore", "tokens_per_s"),
        "trainer_idle_share": round(idle / (idle + busy), 3) if idle + busy else None,
        "bookkeeping_share": share(spent["journal"] + watch.counter("train", "checkpoint_seconds"), spent["learner"]),
        "explorer_idle_share": watch.gauge("explore", "idle_share"),
    }


def share(part: float, whole: float) -> float | None:
    """A part of a whole; None where the whole is 0."""
    return round(part / whole, 4) if whole else None


def delta_share(watch: Watch) -> float | None:
    """Bytes a follower reads per version over the bytes of all weights, on average over the versions after the first."""
    sizes = [event.stats for version, event in watch.published.items() if version > 0 and event.parent >= 0]
    shares = [one["bytes"] / one["full_bytes"] for one in sizes if one.get("full_bytes")]
    return round(sum(shares) / len(shares), 5) if shares else None


def begin_of(rows: Sequence[Mapping[str, float]]) -> float:
    """When the run began, in seconds after this start; below 0 for a run that was continued."""
    return min([0.0, *(row["elapsed_s"] for row in rows)])


def draw_plot(watch: Watch, values: Mapping[str, object], path: Path) -> None:
    """Accuracy over versions; reward and staleness beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for suite, found in sorted(watch.accuracy.items()):
        versions = sorted(found)
        left.plot(versions, [found[version] for version in versions], marker="o", markersize=3, label=suite)
    left.set(xlabel="policy version", ylabel="greedy accuracy", ylim=(0, 1), title=f"control: {values['control']}")
    left.axhline(0.9, color="grey", linewidth=0.8, linestyle="--")
    left.grid(alpha=0.3)
    if watch.accuracy:
        left.legend(loc="lower right")
    rows = [row for row in watch.history if "reward_mean" in row]
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
