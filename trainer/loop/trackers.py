"""Experiment trackers next to TensorBoard: Weights & Biases, MLflow and trackio, each with a package and variables of its own.

Guarantees: figures of steps and evaluations go out, no text and no weights; a tracker never holds up a step, since a thread
of its own opens and writes it. While it is away MAX_WAITING points wait; further points and refused points are counted as lost,
and one line says why.
"""

import contextlib
import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from infra.observe.metrics import Metrics
from schemas.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_WAITING = 1024  # points
CLOSE_S = 15.0
MAX_REASON = 200  # characters


class Point(NamedTuple):
    """Figures of a step or of a version. axis: "step" or "version". number: on it."""

    values: Mapping[str, float]
    axis: str
    number: int


class Writer(NamedTuple):
    """An opened tracker."""

    write: Callable[[Point], object]
    close: Callable[[], object]


def wandb(project: str, run: str) -> Writer:
    """Weights & Biases; its variables: WANDB_API_KEY, WANDB_MODE=offline."""
    import wandb as package

    quiet = package.Settings(
        console="off", disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True
    )
    opened = package.init(project=project, name=run, settings=quiet)
    for kind, axis in (("train", "step"), ("eval", "version")):
        opened.define_metric(f"{kind}/*", step_metric=axis)
    return Writer(lambda point: opened.log({**point.values, point.axis: point.number}), opened.finish)


def mlflow(project: str, run: str) -> Writer:
    """MLflow; its variables: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    known = client.get_experiment_by_name(project)
    experiment = client.create_experiment(project) if known is None else known.experiment_id
    identity = client.create_run(experiment, run_name=run).info.run_id

    def write(point: Point) -> None:
        for name, value in point.values.items():
            client.log_metric(identity, name.replace("/pass@", "_pass_at_"), value, step=point.number)

    return Writer(write, lambda: client.set_terminated(identity))


def trackio(project: str, run: str) -> Writer:
    """trackio, in a local folder; its variables: TRACKIO_DIR, TRACKIO_SPACE_ID."""
    import trackio as package

    opened = package.init(project=project, name=run, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return Writer(lambda point: opened.log(dict(point.values), step=point.number), opened.finish)


OPENERS: Mapping[str, Callable[[str, str], Writer]] = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}


class Tracker:
    """One tracker and its thread. opener: blocks until the tracker can be written."""

    def __init__(self, name: str, opener: Callable[[], Writer], metrics: Metrics) -> None:
        self._name = name
        self._opener = opener
        self._lost = metrics.counter("tracker_points_lost", tracker=name)
        self._waiting: queue.Queue[Point | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, point: Point) -> None:
        """Hand over a point; never blocks."""
        try:
            self._waiting.put_nowait(point)
        except queue.Full:
            self._lost.inc()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Write the waiting points, for a limited time."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=limit_s)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            logger.warning("tracker_not_closed tracker=%s: some of its points may be missing there", self._name)

    def _run(self) -> None:
        writer, faults = None, 0
        try:
            writer = self._opener()
        except Exception as error:
            self._tell("tracker_unavailable", error)
        while (point := self._waiting.get()) is not None:
            try:
                if writer is None:
                    self._lost.inc()
                else:
                    writer.write(point)
            except Exception as error:
                self._lost.inc()
                faults += 1
                if faults == 1:
                    self._tell("tracker_refused", error)
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                self._tell("tracker_not_closed", error)

    def _tell(self, event: str, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        logger.warning("%s tracker=%s error=%s: TensorBoard has its points", event, self._name, reason)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'trainer.trackers: "{name}" needs the package {name}: pip install {name}')


def open_trackers(names: Sequence[str], project: str, run: str, metrics: Metrics) -> tuple[Tracker, ...]:
    """The trackers of the settings. Raises ConfigError for one whose package is not installed."""
    check_trackers(names)
    return tuple(Tracker(name, partial(OPENERS[name], project, run), metrics) for name in names)
