"""What the trainer reports about itself: metrics, and a Progress record every few seconds.

Counters only grow within one process; a sum over restarts adds the instances up.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.observe.release import full_release
from schemas import Progress, topics
from schemas.fields import Life, is_kept_figure
from trainer.batch.batch import TrainItem
from trainer.health.arithmetic import Arithmetic, card_memory
from trainer.health.board import Board
from trainer.learners.learner import StepStats

PERIOD_S = 1.0


class TrainerReport:
    """Counts steps, tokens, waits and staleness. Not thread-safe: the event loop alone writes it.

    arithmetic: of the model, None where the use of the cards is not measured.
    """

    def __init__(
        self, metrics: Metrics, owner: str = "", board: Board | None = None, arithmetic: Arithmetic | None = None
    ) -> None:
        self.metrics = metrics
        self.owner = owner or f"train/{os.getpid()}"
        self.gauges: dict[str, float] = {}
        self.state = "starting"
        self.life: Life = "starting"
        self.worth_showing: dict[str, float] = {}  # of the newest step, shown with the version that follows
        self.board = board
        self.arithmetic = arithmetic

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        self.metrics.counter(name, **labels).inc(amount)

    def set(self, name: str, value: float) -> None:
        """Set a gauge; values that are not finite are left out."""
        if math.isfinite(value):
            self.metrics.gauge(name).set(value)
            self.gauges[name] = value

    def step(self, step: int, items: list[TrainItem], stats: StepStats, version: int, step_s: float) -> None:
        """One finished optimizer step."""
        self.add("steps")
        self.add("step_seconds", step_s)
        self.add("experiences_trained", len(items))
        for phase, passed_s in stats.seconds.items():
            self.add("phase_seconds", passed_s, phase=phase)
        if self.arithmetic is not None:
            self._count_arithmetic(self.arithmetic, items, step_s)
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

    def _count_arithmetic(self, arithmetic: Arithmetic, items: list[TrainItem], step_s: float) -> None:
        needed = arithmetic.needed(items)
        self.add("flops", needed)
        if arithmetic.peak and step_s:
            self.set("mfu", needed / step_s / arithmetic.peak)
        if (memory := card_memory()) is not None:
            self.set("gpu_memory_bytes", memory[0])
            self.set("gpu_memory_capacity_bytes", memory[1])


def staleness_tokens(items: list[TrainItem], version: int) -> Mapping[int, int]:
    """Sampled tokens of the usual lane by how many versions old they are when trained."""
    ages: dict[int, int] = {}
    for one in items:
        if one.item.lane != "usual":
            continue
        for span in one.experience.spans:
            age = version - span.version
            ages[age] = ages.get(age, 0) + span.stop - span.start
    return ages


async def report_progress(log: Log, report: TrainerReport, version: Callable[[], int]) -> None:
    """Publish a Progress record every PERIOD_S."""
    while True:
        await publish_progress(log, report, version())
        await asyncio.sleep(PERIOD_S)


async def publish_progress(log: Log, report: TrainerReport, version: int) -> None:
    """Publish what was counted so far."""
    progress = Progress(
        role="train",
        instance=report.owner,
        version=version,
        counters=report.metrics.counters(),
        gauges=report.metrics.gauges(),
        state=report.state,
        life=report.life,
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
