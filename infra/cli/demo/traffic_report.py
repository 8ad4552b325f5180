"""What the traffic demo reports beside the usual figures: what users saw, and which version was stable when."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from infra.cli.demo.traffic import USERS_FILE
from infra.cli.demo.users import Seen
from infra.cli.demo.watch import Watch

ENDS = 500  # answers at each end of the run over which users' accuracy is reported
WINDOW = 200  # answers a point of the users' curve averages over


def read_seen(path: Path) -> list[Seen]:
    """The answers that users got, in the order of time; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return sorted((msgspec.json.decode(line, type=Seen) for line in lines), key=lambda one: one.at_s)


def traffic_values(watch: Watch, users: Path, suite: str) -> dict[str, object]:
    """The traffic demo's part of report.json. `requests_failed` is what users saw fail, not what the engine counted."""
    seen = read_seen(users)
    answered = [one for one in seen if one.version >= 0]
    accuracy = watch.accuracy.get(suite, {})
    ages = [row["live/staleness_mean"] for row in watch.history if "live/staleness_mean" in row]
    return {
        "requests_failed": sum(one.failed for one in seen),
        "errors_seen": sorted({one.error for one in seen if one.error})[:5],
        "answers": len(answered),
        "habits": dict(Counter(one.habit for one in answered).most_common()),
        "users_right_first": share_right(answered[:ENDS]),
        "users_right_last": share_right(answered[-ENDS:]),
        "stable": [[round(at_s, 1), version, accuracy.get(version)] for at_s, version in watch.stable],
        "stable_first": next((accuracy[version] for _, version in watch.stable if version in accuracy), None),
        "stable_last": next((accuracy[version] for _, version in watch.stable[::-1] if version in accuracy), None),
        "held": watch.num_held,
        "live_staleness_mean": round(sum(ages) / len(ages), 1) if ages else None,
    }


def share_right(seen: Sequence[Seen]) -> float | None:
    """Share of right answers; None where there are no answers."""
    return round(sum(one.right for one in seen) / len(seen), 4) if seen else None


def windows(seen: Sequence[Seen], started_s: float) -> list[tuple[float, float]]:
    """Seconds since the start and the share of right answers, of consecutive windows of answers."""
    parts = [seen[start : start + WINDOW] for start in range(0, len(seen) - WINDOW + 1, WINDOW)]
    return [(part[-1].at_s - started_s, sum(one.right for one in part) / WINDOW) for part in parts]


def draw_traffic(watch: Watch, values: Mapping[str, object], path: Path) -> None:
    """Left: what was served and what users saw, over time. Right: every evaluated version, and those that were promoted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    suite = str(values["measure"]).removesuffix(" accuracy")
    accuracy = watch.accuracy.get(suite, {})
    moves = [(at_s, accuracy[version]) for at_s, version in watch.stable if version in accuracy]
    if moves:
        moves.append((watch.history[-1]["elapsed_s"] if watch.history else moves[-1][0], moves[-1][1]))
        left.step(*zip(*moves, strict=True), where="post", label=f"stable version, {suite}, greedy")
    points = windows([one for one in read_seen(path.with_name(USERS_FILE)) if one.version >= 0], watch.started_s)
    if points:
        label = f"answers users got, right of {WINDOW}"
        left.plot(*zip(*points, strict=True), marker=".", linewidth=0.6, label=label)
    left.set(xlabel="seconds since the start", ylabel="accuracy", ylim=(0, 1), title="what customers got")
    versions = sorted(accuracy)
    right.plot(
        versions, [accuracy[one] for one in versions], color="grey", marker="o", markersize=3, label="candidates"
    )
    promoted = [version for _, version in watch.stable if version in accuracy]
    right.plot(promoted, [accuracy[one] for one in promoted], "o", markersize=6, label="let pass by the gate")
    right.set(xlabel="policy version", ylim=(0, 1), title=f"{suite}, every version that was evaluated")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
