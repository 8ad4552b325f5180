"""The demo's report: report.json, a table and a plot, of figures that the log, the roles and the audit give."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from actors.master.evaluation import parse_eval_group, wilson
from infra.cli.demo.record import RunRecord
from infra.cli.demo.settings import TRAFFIC, DemoOptions
from infra.cli.demo.users import USERS_FILE, Seen
from infra.cli.settings import Settings
from infra.ledger.account import audit
from infra.local.supervisor import ChildState
from infra.log.log import Log
from schemas import Batch, Block, Experience, topics
from schemas.journal import JournalRecord, effective

ENDS = 500  # answers at each end of the run over which users' accuracy is reported
WINDOW = 200  # answers that a point of the users' curve averages over
Values = Mapping[str, Any]


async def finish_report(
    log: Log, settings: Settings, run: RunRecord, options: DemoOptions, children: Sequence[ChildState]
) -> dict[str, Any]:
    """Write report.json and report.png; returns the figures. run: read to the end of the log."""
    name, task = settings.run or settings.app, options.chosen
    account = await audit(log, name)
    held, newest = await read_answers(log, task.suite)
    journal = [message.value async for message in log.scan(topics.BATCHES)]
    entries, _ = effective([record for record in journal if isinstance(record, JournalRecord)], name)
    phases = [entry.phase for entry in entries if isinstance(entry, Batch)]
    values: dict[str, Any] = {
        **accuracies(run, task.suite),
        **({} if task.is_toy else changes(run, held, task.suite)),
        "nats_from_start": None if task.is_toy else await asyncio.to_thread(nats_from, settings.model_path, newest),
        "wall_s": round(run.elapsed_s(), 1),
        "task": task.name,
        "measure": task.measure,
        "suite": task.suite,
        "engine": options.engine or task.engines[0],
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
        "peak_rss_mb": {
            state.name: round(state.peak_rss_bytes / 2**20, 1)
            for state in children
            if not state.name.startswith("load-")
        },
        "restarts": {state.name: state.restarts for state in children if state.restarts},
        "accuracy": {suite: list(run.accuracy(suite).items()) for suite in run.results},
    }
    if task is TRAFFIC:
        values |= await asyncio.to_thread(traffic_values, run, settings.folder / USERS_FILE, task.suite)
    (settings.folder / "report.json").write_text(json.dumps(values, indent=2) + "\n")
    await asyncio.to_thread(draw_plot, run, values, settings.folder / "report.png")
    return values


Answer = tuple[str, str, str]  # the task's id, its prompt, the answer
NUM_SHOWN = 5
NUM_COMPARED = 64  # newest answers whose distance from the untrained model is averaged


async def read_answers(log: Log, suite: str) -> tuple[dict[int, dict[int, Answer]], deque[Experience]]:
    """The answers to a suite, version → number of the task → answer; and the newest answers that may be trained."""
    found: dict[int, dict[int, Answer]] = {}
    newest = deque[Experience](maxlen=NUM_COMPARED)
    async for message in log.scan(topics.EXPERIENCES):
        for experience in message.value.experiences if isinstance(message.value, Block) else ():
            asked = parse_eval_group(experience.group) if experience.suite == suite else None
            if asked is not None and experience.messages:
                prompt = experience.messages[0].content
                found.setdefault(asked[1], {})[asked[2]] = (experience.task, prompt, experience.response)
            elif not experience.suite and experience.spans:
                newest.append(experience)
    return found, newest


def nats_from(model: str, answers: Iterable[Experience]) -> float | None:
    """Mean of log μ - log π of the model over the sampled tokens: an estimate of KL(μ ‖ π) per token, at temperature 1."""
    from trainer.learners.forward import PackedModel

    policy, gains = PackedModel(model, dtype="float32", device="cpu"), list[float]()
    for answer in answers:
        under = policy.sequence_logprobs(tuple(map(int, answer.tokens)))  # of every token but the first
        sampled = [under[place - 1] for span in answer.spans for place in range(span.start, span.stop)]
        gains += [float(mu) - pi for mu, pi in zip(answer.logprobs, sampled, strict=True)]
    return round(sum(gains) / len(gains), 3) if gains else None


def changes(run: RunRecord, held: Mapping[int, Mapping[int, Answer]], suite: str) -> dict[str, object]:
    """The changes by training: intervals, the share of prompts with unseen pairs of kinds, answers side by side."""
    results = run.results.get(suite, {})
    if not results or not held:
        return {}
    first, last = min(results), max(results)
    before, after = held.get(first, {}), held.get(last, {})
    unseen = [number for number, (task, _, _) in sorted(after.items()) if task.startswith("unseen")]
    both = sorted(before.keys() & after.keys())
    # as many prompts with known pairs as with unseen ones, spread over the suite
    shown = [both[len(both) * place // NUM_SHOWN] for place in range(NUM_SHOWN)] if len(both) >= NUM_SHOWN else both
    return {
        "intervals": {version: result.interval for version, result in sorted(results.items())},
        "unseen_pairs": {
            version: round(sum(result.right[number] > 0 for number in unseen) / len(unseen), 4)
            for version, result in sorted(results.items())
            if unseen and len(result.right) > unseen[-1]
        },
        "distinct_answers": [len({answer for _, _, answer in found.values()}) for found in (before, after)],
        "examples": [(before[number][1], before[number][2], after[number][2]) for number in shown],
    }


def accuracies(run: RunRecord, suite: str) -> dict[str, object]:
    """Accuracy in `suite` of the first policy, of the one after the warm-up, and of the last one evaluated."""
    found = run.accuracy(suite)
    return {
        "accuracy_start": found.get(0),
        "accuracy_after_sft": found.get(1),
        "accuracy_final": found[max(found)] if found else None,
        "accuracy_final_version": max(found, default=None),
    }


def staleness(run: RunRecord) -> dict[str, object]:
    """Versions between sampling and training: their mean over the trained tokens, and their maximum."""
    ages = Counter[int]()
    for report in run.reports.values():
        for name, count in report.counters.items():
            if name.startswith("staleness_tokens{versions="):
                ages[int(name[26:-1])] += int(count)
    mean = sum(age * count for age, count in ages.items()) / ages.total() if ages.total() else None
    return {"staleness_mean": None if mean is None else round(mean, 3), "staleness_max": max(ages, default=None)}


def measured(run: RunRecord) -> dict[str, object]:
    """The figures that the roles report."""
    idle = run.counter("train", "idle_seconds")
    busy = sum(run.counter("train", f"{name}_seconds") for name in ("learner", "publish_wait", "snapshot", "journal"))
    trainers = [report.gauges for report in run.reports.values() if report.role == "train"]
    names = ("reload_pause_ms_p50", "reload_pause_ms_p95", "publish_to_serving_ms_p95")
    return {
        "mismatch_abs_max": max((gauges.get("mismatch_abs_max_run", 0.0) for gauges in trainers), default=None),
        **{name: run.gauge("explore", name) for name in names},
        "requests_failed": int(run.counter("explore", "requests_failed")),
        "tokens_sampled": int(run.counter("explore", "tokens")),
        "rollout_tokens_per_s": run.gauge("explore", "tokens_per_s"),
        "trainer_idle_share": round(idle / (idle + busy), 3) if idle + busy else None,
        "explorer_idle_share": run.gauge("explore", "idle_share"),
    }


def read_seen(path: Path) -> list[Seen]:
    """The answers that users saw, in the order of time; none if there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return sorted((msgspec.json.decode(line, type=Seen) for line in lines), key=lambda seen: seen.at_s)


def traffic_values(run: RunRecord, users: Path, suite: str) -> dict[str, object]:
    """The traffic demo's part of report.json. `requests_failed` counts failures that users saw, not the engine's."""
    seen = read_seen(users)
    spammed = [answer for answer in seen if answer.habit == "spams"]
    answered = users_answers(seen)
    parts = {"first": answered[:ENDS], "last": answered[-ENDS:], "spammed": spammed}
    counts = {name: (sum(answer.liked for answer in part), len(part)) for name, part in parts.items()}
    accuracy = run.accuracy(suite)
    ages = [row["live/staleness_mean"] for row in run.history if "live/staleness_mean" in row]
    return {
        "requests_failed": sum(bool(answer.error) for answer in seen),
        "errors_seen": sorted({answer.error for answer in seen if answer.error})[:5],
        "answers": len(answered),
        "habits": dict(Counter(answer.habit for answer in answered).most_common()),
        **{
            f"users_liked_{name}": round(liked / max(1, asked), 4) if asked else None
            for name, (liked, asked) in counts.items()
        },
        "users_liked_intervals": [wilson(liked, max(1, asked)) for liked, asked in counts.values()][:2],
        "spammed": len(spammed),
        "stable": [[round(at_s, 1), version, accuracy.get(version)] for at_s, version in run.stable],
        "stable_first": next((accuracy[version] for _, version in run.stable if version in accuracy), None),
        "stable_last": next((accuracy[version] for _, version in run.stable[::-1] if version in accuracy), None),
        "held": run.num_held,
        "live_staleness_mean": round(sum(ages) / len(ages), 1) if ages else None,
    }


def users_answers(seen: Sequence[Seen]) -> list[Seen]:
    """The answers to users other than the spammer."""
    return [answer for answer in seen if answer.version >= 0 and answer.habit != "spams"]


def windows(seen: Sequence[Seen], started_s: float) -> list[tuple[float, float]]:
    """Seconds since the start and the share of liked answers, of consecutive windows of answers."""
    answered = users_answers(seen)
    parts = [answered[start : start + WINDOW] for start in range(0, len(answered) - WINDOW + 1, WINDOW)]
    return [(part[-1].at_s - started_s, sum(answer.liked for answer in part) / WINDOW) for part in parts]


def result_table(values: Values) -> Table:
    """The figures of the report, as a table."""
    table = Table(title="headrace demo", show_header=False)
    for name, value in result_rows(values):
        table.add_row(name, value)
    return table


def result_rows(values: Values) -> Iterator[tuple[str, str]]:
    if "stable" in values:
        yield from traffic_rows(values)
    steps = shares(values, "accuracy_start", "accuracy_after_sft", "accuracy_final")
    yield values["measure"], f"{steps}  (start, after the warm-up, version {values['accuracy_final_version']})"
    if "examples" in values:
        if pairs := list(values["unseen_pairs"].values()):
            yield "pairs of kinds never trained", f"{percent(pairs[0])} → {percent(pairs[-1])}"
        yield "distinct held-out answers", " → ".join(map(str, values["distinct_answers"]))
        yield "distance from the start", f"{number(values['nats_from_start'])} nats per token of the newest answers"
    cost = f"{values['wall_s'] / 60:.1f} minutes, {values['tokens_sampled']:,} tokens sampled"
    yield "cost", f"{cost}, {sum(values['peak_rss_mb'].values()) / 1000:.1f} GB of memory"
    warmup = f"{values['warmup_steps']} of warm-up, {values['policy_versions']} versions"
    yield "optimizer steps", f"{values['steps']} and {warmup}"
    published = f"{values['experiences_published']:,} published, {values['experiences_trained']:,} trained"
    yield "experiences", f"{published}, {sum(values['dropped'].values()):,} dropped, {values['pending']:,} pending"
    yield "dropped", ", ".join(f"{reason} {count:,}" for reason, count in values["dropped"].items()) or "none"
    if "stable" not in values:
        yield "staleness", f"{number(values['staleness_mean'])} mean, {values['staleness_max']} max"
        mismatch = number(values["mismatch_abs_max"], 7)
        yield "engine against trainer", f"{mismatch} largest logprob difference"
        idle = f"explorer {number(values['explorer_idle_share'])}, trainer {number(values['trainer_idle_share'])}"
        yield "sampling", f"{number(values['rollout_tokens_per_s'], 0)} tokens/s; idle: {idle}"
    pause = f"{number(values['reload_pause_ms_p50'], 0)} ms p50, {number(values['reload_pause_ms_p95'], 0)} p95"
    serving = f"{number(values['publish_to_serving_ms_p95'], 0)} ms p95"
    yield "hot reload", f"pause {pause}, published to serving {serving}"
    yield "requests failed", str(values["requests_failed"])
    yield "peak memory", ", ".join(f"{name} {value:,.0f}" for name, value in values["peak_rss_mb"].items()) + " MB"


def examples_table(values: Values) -> Table:
    """Held-out prompts with the answers before and after."""
    table = Table("prompt", "before", "after", title="held-out prompts", show_lines=True)
    for cells in values["examples"]:
        table.add_row(*(Text(cell) for cell in cells))
    return table


def traffic_rows(values: Values) -> Iterator[tuple[str, str]]:
    """The rows of the traffic demo, which come first."""
    moves = f"{len(values['stable'])} versions let pass, {values['held']} held"
    yield "stable channel", f"{shares(values, 'stable_first', 'stable_last')} of the held-out tasks; {moves}"
    ends = zip(("users_liked_first", "users_liked_last"), values["users_liked_intervals"], strict=True)
    liked = " → ".join(f"{percent(values[name])} ({low:.1%} to {high:.1%})" for name, (low, high) in ends)
    yield "liked by users", f"{liked}, of {values['answers']:,} answers"
    yield "what they said", ", ".join(f"{count:,} {habit}" for habit, count in values["habits"].items())
    good = percent(values["users_liked_spammed"])
    yield "a spammer", f"liked {values['spammed']:,} more answers, {good} of them good"
    age = number(values["live_staleness_mean"], 0)
    yield "staleness", f"{age} versions on average, which the lane does not bound"


def shares(values: Values, *names: str) -> str:
    return " → ".join(percent(values[name]) for name in names)


def percent(share: float | None) -> str:
    """A share in percent; a dash for none."""
    return "–" if share is None else f"{share:.1%}"


def number(value: float | None, digits: int = 2) -> str:
    """A number; a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def draw_plot(run: RunRecord, values: Values, path: Path) -> None:
    """Left: accuracy over versions with its 95 % interval. Right, over time: users' answers, or trained rewards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for suite, results in sorted(run.results.items()):
        points = [(version, result.accuracy, result.interval) for version, result in sorted(results.items())]
        versions, shares, intervals = zip(*points, strict=True)
        ends = [(share, share) if ends is None else ends for share, ends in zip(shares, intervals, strict=True)]
        left.plot(versions, shares, marker="o", markersize=3, label=suite)
        left.fill_between(versions, [low for low, _ in ends], [high for _, high in ends], alpha=0.15)
    accuracy = run.accuracy(values["suite"])
    rows = [row for row in run.history if "reward_mean" in row]
    if "stable" in values:
        moves = [(at_s, accuracy[version]) for at_s, version in run.stable if version in accuracy]
        if moves:
            right.step(*zip(*moves, strict=True), where="post", label=f"stable version, {values['suite']}, greedy")
        if seen := windows(read_seen(path.with_name(USERS_FILE)), run.started_s):
            right.plot(*zip(*seen, strict=True), marker=".", linewidth=0.6, label=f"users' answers, liked of {WINDOW}")
        right.set(ylabel="accuracy", ylim=(0, 1), title="stable version and users")
    else:
        begin_s = min([0.0, *(row["elapsed_s"] for row in rows)])  # below 0 for a run that was continued
        rewards = [row["reward_mean"] for row in rows]
        right.plot([row["elapsed_s"] - begin_s for row in rows], rewards, label="reward of trained groups")
        right.set(ylabel="reward", ylim=(min([0.0, *rewards]), max([1.0, *rewards])), title="trained groups")
    left.set(xlabel="policy version", ylabel="greedy accuracy", ylim=(0, 1), title=values["measure"])
    right.set(xlabel="seconds since the start")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
