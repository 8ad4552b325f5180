"""Reports of the trainer about itself: metrics, a Progress record every second, TensorBoard event files and trackers.

Counters only grow within one process; a sum over restarts adds the instances up. Nothing reads the event files back; a step
that is executed again writes its points again.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.observe.release import full_release
from schemas import EvalResult, Progress, topics
from schemas.fields import Life, is_kept_figure
from trainer.batch.batch import TrainItem
from trainer.learners.learner import StepStats
from trainer.loop.trackers import Point, Tracker


class Board:
    """Event files, which `tensorboard --logdir <folder>` shows, and trackers. folder: None writes no event files."""

    def __init__(self, folder: Path | None, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = trackers
        self._writer = None
        if folder is not None:
            from tensorboard.summary import Writer  # takes a second to import

            folder.mkdir(parents=True, exist_ok=True)
            self._writer = Writer(str(folder))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._write(Point({f"train/{name}": value for name, value in values.items()}, "step", step))

    def result(self, result: EvalResult) -> None:
        shares = {f"eval/{result.suite}/pass@{k}": share for k, share in result.pass_at.items()}
        self._write(Point({f"eval/{result.suite}": result.accuracy, **shares}, "version", result.version))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for tracker in self._trackers:
            tracker.close()

    def _write(self, point: Point) -> None:
        if self._writer is not None:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.number)
        for tracker in self._trackers:
            tracker.put(point)


async def follow_results(log: Log, board: Board) -> None:
    """Put eval results that arrive from here on onto the board."""
    async with aclosing(log.tail(topics.EVALS, "end")) as messages:
        async for message in messages:
            if isinstance(message.value, EvalResult):
                board.result(message.value)


PERIOD_S = 1.0


class TrainerReport:
    """Counts steps, tokens, waits and staleness. Not thread-safe: the event loop alone writes it."""

    def __init__(self, metrics: Metrics, owner: str = "", board: Board | None = None) -> None:
        self.metrics = metrics
        self.owner = owner or f"train/{os.getpid()}"
        self.gauges: dict[str, float] = {}
        self.state = "starting"
        self.life: Life = "starting"
        self.trains = False
        self.worth_showing: dict[str, float] = {}  # of the newest step, shown with the version that follows
        self.board = board

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self.metrics.counter(name, **labels).inc(amount)

    def set(self, name: str, value: float) -> None:
        """Set a gauge; values that are not finite are left out."""
        if math.isfinite(value):
            self.metrics.gauge(name).set(value)
            self.gauges[name] = value

    def step(self, step: int, items: list[TrainItem], stats: StepStats, version: int, step_s: float) -> None:
        self.add("steps")
        self.add("experiences_trained", len(items))
        for phase, passed_s in stats.seconds.items():
            self.add("phase_seconds", passed_s, phase=phase)
        for name, value in stats.values.items():
            self.set(name, value)
        self.set("loss", stats.loss)
        self.set("grad_norm", stats.grad_norm)
        figures = {"loss": stats.loss, "grad_norm": stats.grad_norm}
        if stats.reward is not None:
            self.set("reward_mean", stats.reward)
            figures["reward_mean"] = stats.reward
        self.worth_showing = {
            name: value
            for name, value in {**stats.values, **figures}.items()
            if is_kept_figure(name) and math.isfinite(value)
        }
        for age, tokens in staleness_tokens(items, version).items():
            self.add("staleness_tokens", tokens, versions=str(age))
        for name in ("mismatch_abs_max", "mismatch_k3"):
            value = stats.values.get(f"usual/{name}", math.nan)
            if math.isfinite(value):
                self.set(f"{name}_run", max(self.gauges.get(f"{name}_run", 0.0), value))
        if self.board is not None:
            self.board.step(step, self.gauges)


def staleness_tokens(items: list[TrainItem], version: int) -> Mapping[int, int]:
    """Sampled tokens of the usual lane by how many versions old they are when trained."""
    ages: dict[int, int] = {}
    for item in items:
        if item.item.lane != "usual":
            continue
        for span in item.experience.spans:
            age = version - span.version
            ages[age] = ages.get(age, 0) + span.stop - span.start
    return ages


async def report_progress(log: Log, report: TrainerReport, version: Callable[[], int]) -> None:
    while True:
        await publish_progress(log, report, version())
        await asyncio.sleep(PERIOD_S)


async def publish_progress(log: Log, report: TrainerReport, version: int) -> None:
    progress = Progress(
        role="train",
        instance=report.owner,
        version=version,
        counters=report.metrics.counters(),
        gauges=report.metrics.gauges(),
        state=report.state,
        life=report.life,
        trains=report.trains,
        release=full_release(),
    )
    await log.publish(topics.REPORTS, progress)


class Stopwatch:
    """Adds the seconds inside a `with` to a counter."""

    def __init__(self, report: TrainerReport, name: str) -> None:
        self._report = report
        self._name = name
        self._start = 0.0
        self.elapsed_s = 0.0

    def __enter__(self) -> "Stopwatch":
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.elapsed_s = time.monotonic() - self._start
        self._report.add(self._name, self.elapsed_s)
