"""The divergence guard's table of verdicts."""

import asyncio
import math
import random
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from infra.observe.metrics import Metrics
from infra.policies.fetch import PolicyFetcher
from infra.policies.policy import Probe
from infra.policies.tensors import to_numpy
from schemas import Batch, EvalResult, Rollback, Saved, Skip, Span
from schemas.errors import ConfigError
from schemas.fields import LANES
from tests.trainer.memory_run import CONFIG as RUN_CONFIG
from tests.trainer.memory_run import FLOOR, STEPS, journal, new_run, published, train
from tests.trainer.trainer_samples import make_item
from trainer.batch.assemble import step_seed
from trainer.batch.batch import PackedBatch
from trainer.config import TrainerConfig, TrainerGuardConfig
from trainer.health import (
    ANY_FINITE,
    GuardState,
    Observed,
    alarms,
    collapses,
    diagnose,
    judge,
    norm_limit,
    passed,
    refused,
    rolled_back,
    unhealthy,
)
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner
from trainer.loop.report import Board
from trainer.loop.step import condition, mean_reward
from trainer.loop.trackers import MAX_WAITING, OPENERS, Point, Tracker, Writer, check_trackers, open_trackers

CONFIG = TrainerGuardConfig(window=5, min_steps=4, grad_norm=10, entropy=0.2, reward=0.5, probe_shift=2)
HALTING = frozenset({"usual/ess", "usual/chi2"})


@pytest.mark.parametrize(
    ("skips", "finite", "alarms", "grad_norm", "verdict", "reason"),
    [
        (0, True, (), 1.0, "go", ""),
        (2, True, (), 1.0, "go", ""),
        (0, True, ("usual/k1",), 1.0, "go", ""),
        (0, False, (), math.nan, "skip", "loss or gradient not finite"),
        (1, False, (), math.inf, "skip", "loss or gradient not finite"),
        (1, False, (), 1234.5, "skip", "gradient norm 1.23e+03"),
        (2, False, (), 1.0, "rollback", "3 steps in a row changed nothing, the last: gradient norm 1"),
        (0, True, (), 51.0, "rollback", "a gradient of norm 51 moved the weights, expected at most 50"),
        (0, True, ("usual/ess",), 1.0, "rollback", "alarm usual/ess"),
        (0, True, ("usual/ess", "usual/chi2", "usual/k1"), 1.0, "rollback", "alarm usual/chi2, usual/ess"),
        (1, False, ("usual/ess",), math.nan, "rollback", "alarm usual/ess"),
    ],
)
def test_the_verdict_on_a_step(
    skips: int, finite: bool, alarms: tuple[str, ...], grad_norm: float, verdict: str, reason: str
) -> None:
    state = GuardState(skips)
    found = judge(state, finite=finite, alarms=alarms, halting=HALTING, max_skips=3, grad_norm=grad_norm, limit=50.0)
    assert found == (verdict, reason)


def test_a_gradient_is_measured_by_the_median_of_the_last_ones() -> None:
    state = GuardState()
    for number in range(4):
        assert norm_limit(state, CONFIG) == ANY_FINITE, "nothing is refused before there is a measure"
        state = passed(state, CONFIG, grad_norm=float(number))
    assert norm_limit(state, CONFIG) == 10 * 1.5  # of 0, 1, 2, 3
    for number in (4, 5, 6):
        state = passed(state, CONFIG, grad_norm=float(number))
    assert state.norms == (2.0, 3.0, 4.0, 5.0, 6.0)
    assert norm_limit(state, CONFIG) == 10 * 4.0
    assert norm_limit(refused(state), CONFIG) == norm_limit(rolled_back(state), CONFIG) == 10 * 4.0
    assert norm_limit(state, TrainerGuardConfig(grad_norm=0)) == ANY_FINITE


def test_a_collapse_is_a_fall_below_a_share_of_what_was_usual() -> None:
    state = GuardState()
    for entropy, reward in ((1.0, 0.5), (1.2, 0.5), (1.1, 0.6), (0.9, 0.4)):
        assert collapses(state, CONFIG, entropy=0.0, reward=0.0) == ()
        state = passed(state, CONFIG, grad_norm=1.0, entropy=entropy, reward=reward)
    # A fifth of the median 1.05 is 0.21, half of the median 0.5 is 0.25.
    assert collapses(state, CONFIG, entropy=0.1, reward=0.5) == ("entropy_collapse",)
    assert collapses(state, CONFIG, entropy=1.0, reward=0.2) == ("reward_collapse",)
    assert collapses(state, CONFIG, entropy=None, reward=None) == ()
    assert collapses(state, TrainerGuardConfig(min_steps=4), entropy=0.0, reward=0.0) == (), "off unless asked for"
    below_0 = GuardState(rewards=(-2.0, -2.5, -1.5, -2.0))  # of penalties: half of the median's size below it is -3
    assert collapses(below_0, CONFIG, entropy=None, reward=-2.9) == ()
    assert collapses(below_0, CONFIG, entropy=None, reward=-3.1) == ("reward_collapse",)


def test_weights_that_are_not_finite_or_moved_far_are_not_published() -> None:
    before = Probe(sequences=((1, 2, 3),), logprobs=((-1.0, -2.0),))
    near = Probe(sequences=((1, 2, 3),), logprobs=((-2.0, -4.0),))  # 1.5 nats on average
    far = Probe(sequences=((1, 2, 3),), logprobs=((-9.0, -2.0),))  # 4
    assert unhealthy("w", None, None, CONFIG) == "w holds values that are not finite"
    assert unhealthy("", before, near, CONFIG) == ""
    assert unhealthy("", before, far, CONFIG).startswith("the probe moved by 4 nats per token")
    assert unhealthy("", None, far, CONFIG) == unhealthy("", before, far, TrainerGuardConfig()) == ""


def test_the_guard_hears_of_the_rewards_of_this_step_alone_so_that_a_restart_judges_alike() -> None:
    spans = [Span(1, 2, 3)]
    rewarded = [make_item([1, 2], spans, episode=episode, reward=float(episode)) for episode in range(2)]
    stats = StepStats(finite=True, loss=1.0, grad_norm=1.0, values={"usual/entropy": 0.5})
    assert mean_reward(rewarded) == 0.5 and mean_reward([make_item([1, 2], spans, reward=None)]) is None
    assert condition(msgspec.structs.replace(stats, reward=0.5)) == (0.5, 0.5)
    assert condition(stats) == (0.5, None), "whatever an earlier step of this process said"


@pytest.mark.parametrize("name", ["usual/es", "live/ess", "reward_collapse"])
def test_an_alarm_that_is_never_raised_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"halt_on: got {name}, which is never raised"):
        TrainerConfig(halt_on=(name,), guard=TrainerGuardConfig(entropy=0.5))


INJECTIONS = 50
KINDS = ("nan steps", "nan weights", "spike", "unrefused spike", "weights collapse", "entropy collapse")
WARM_UP = 6  # steps of the warm-up in this run
EVERY = 2  # versions between checkpoints
GUARDED = {
    "checkpoint_every": EVERY,
    "max_skips": 2,
    "halt_on": ("entropy_collapse", "usual/ess"),
    "guard": TrainerGuardConfig(window=8, min_steps=3, grad_norm=20, entropy=0.3, probe_shift=3.0),
}
BAD = 100.0  # weights of the scripted learner lie in [0, 1): one that is not sound is at least so large


class Tampered(ScriptedLearner):
    """A scripted learner that one thing happens to, at one step (at two, where one is forgiven)."""

    def __init__(self, kind: str, at: int) -> None:
        super().__init__()
        self._kind = kind
        self._seeds = {step_seed(3, step) for step in range(at, at + 1 + (kind == "nan steps"))}

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        hit = seed in self._seeds
        if hit and (self._kind == "nan steps" or (self._kind == "spike" and max_grad_norm < 1000)):
            norm = 1000.0 if self._kind == "spike" else float("nan")
            return StepStats(finite=False, loss=0.5, grad_norm=norm, values={})
        super().step(batch, learning_rate=learning_rate, seed=seed)
        if hit and self._kind == "nan weights":
            self._weights = self._weights + np.float32("nan")
        elif hit and self._kind not in ("entropy collapse", "alarm"):
            self._weights = self._weights + np.float32(BAD)
        entropy = 0.01 if hit and self._kind == "entropy collapse" else 1.0
        norm = 1000.0 if hit and "spike" in self._kind else 1.0
        values = {"usual/entropy": entropy, "usual/ess": 0.0 if hit and self._kind == "alarm" else 1.0}
        return StepStats(finite=True, loss=0.5, grad_norm=norm, values=values)

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        return Probe(sequences, tuple((-float(self._weights[0]),) * (len(tokens) - 1) for tokens in sequences))


async def injected(kind: str, at: int) -> None:
    log, store = await new_run()
    config = msgspec.structs.replace(RUN_CONFIG, **GUARDED)
    await train(log, store, Tampered(kind, at), config)
    records = await journal(log)
    batches = [record for record in records if isinstance(record, Batch)]
    skips = [record for record in records if isinstance(record, Skip)]
    rollbacks = [record for record in records if isinstance(record, Rollback)]
    told = f"{kind} at step {at}: {skips} {rollbacks}"

    follower = PolicyFetcher(store, "main")
    versions = {event.version: follower.fetch(event) for event in await published(log)}
    weights = {version: to_numpy(policy.tensors["weights"]) for version, policy in versions.items()}
    assert all(np.isfinite(each).all() and (each < BAD).all() for each in weights.values()), told

    assert max(batch.step for batch in batches) - WARM_UP + 1 >= STEPS, told
    uses = [(item.id, item.use) for batch in batches for item in batch.items]
    assert len(set(uses)) == len(uses), f"quarantined batches came back: {told}"
    if kind == "spike":
        assert [(each.step, "gradient norm 1e+03" in each.reason) for each in skips] == [
            (at, True)
        ] and not rollbacks, told
        return
    (back,) = rollbacks
    assert at <= back.to_step <= at + 1 and WARM_UP <= back.from_step <= back.to_step, told
    np.testing.assert_array_equal(weights[back.version], weights[back.restored_version])
    healthy = [event.step for event in await published(log) if event.version > back.version]
    assert healthy and min(healthy) - at <= 2 * EVERY * FLOOR.pacing.steps_per_version, told


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_injected_is_never_published_and_the_run_learns_on(kind: str) -> None:
    chosen = random.Random(kind)
    for _ in range(-(-INJECTIONS // len(KINDS))):
        asyncio.run(injected(kind, WARM_UP + chosen.randint(3, STEPS - 4)))


def test_an_alarm_at_the_first_step_after_the_warm_up_keeps_the_warm_up() -> None:
    asyncio.run(injected("alarm", WARM_UP))


async def test_weights_that_a_warm_up_ruined_are_neither_published_nor_kept() -> None:
    log, store = await new_run()
    for _ in range(2):  # the journal decides: a restart comes to the same end
        with pytest.raises(ExceptionGroup) as raised:
            await train(log, store, Tampered("nan weights", WARM_UP - 1))
        assert raised.group_contains(RuntimeError, match=r"weights holds values that are not finite.*learning_rate")
    assert [event.version for event in await published(log)] == [0]
    assert [entry.step for entry in await journal(log) if isinstance(entry, Saved)] == [-1]


def observed(weight, **more):
    """Tokens with these importance weights, all of one fresh sequence of the usual lane unless said otherwise."""
    num = len(weight)
    given = {
        "logprob": np.log(np.asarray(weight)) - 1.0, "behaviour": np.full(num, -1.0), "advantage": np.ones(num),
        "staleness": np.zeros(num, int), "version": np.zeros(num, int), "ratio": np.ones(num, bool),
        "clipped": np.zeros(num, bool), "exact": np.ones(num, bool), "lane": np.full(num, LANES.index("usual")),
        "sequence": np.zeros(num, int), "kl": np.full(num, np.nan), "entropy": np.full(num, np.nan),
    }  # fmt: skip
    return Observed(**given | {name: np.asarray(values) for name, values in more.items()})


def test_weights_of_a_healthy_and_of_a_collapsed_batch():
    values = diagnose(observed(np.ones(10)))
    assert values["usual/ess"] == pytest.approx(1.0)
    assert values["usual/chi2"] == pytest.approx(0.0)
    assert values["usual/entropy"] == pytest.approx(1.0)
    assert alarms(values) == ()
    # One weight of 30 among nine of 0.1: ESS/B = 30.9² / (10 · 900.09) = 0.1061
    values = diagnose(observed([30.0] + [0.1] * 9))
    assert values["usual/ess"] == pytest.approx(30.9**2 / (10 * 900.09))
    assert values["usual/weight_mean"] == pytest.approx(3.09)
    assert values["usual/weight_max"] == pytest.approx(30.0)
    assert set(alarms(values)) == {
        "usual/ess", "usual/weight_mean", "usual/weight_max", "usual/chi2", "usual/mismatch_k3",
    }  # fmt: skip


def test_clip_fractions_are_by_sign_of_the_advantage():
    values = diagnose(observed(np.ones(5), advantage=[1, 1, -1, -1, 0], clipped=[True, False, True, True, False]))
    assert values["usual/clip_positive"] == 0.5
    assert values["usual/clip_negative"] == 1.0


def test_staleness_is_token_weighted_and_mixed_versions_count_sequences():
    # Sequence 0 is 19 tokens of version 5, sequence 1 one token of version 3 and one of 4; the policy is at 5.
    version = np.array([5] * 18 + [3, 4])
    values = diagnose(observed(np.ones(20), version=version, staleness=5 - version, sequence=[0] * 18 + [1, 1]))
    assert values["usual/staleness_mean"] == pytest.approx(3 / 20)
    assert values["usual/staleness_p95"] == 1.0
    assert values["usual/staleness_max"] == 2.0
    assert values["usual/mixed_versions"] == 0.5


def test_mismatch_compares_engine_and_trainer_only_on_the_version_being_trained():
    log_weight = np.array([1e-3, -2e-3, 5.0, 5.0])
    values = diagnose(observed(np.exp(log_weight), staleness=[0, 0, 1, 0], exact=[True, True, True, False]))
    assert values["usual/mismatch_tokens"] == 2.0
    assert values["usual/mismatch_abs_max"] == pytest.approx(2e-3)
    assert values["usual/mismatch_k3"] == pytest.approx((1e-6 / 2 + 4e-6 / 2) / 2, rel=1e-2)
    assert "usual/mismatch_k3" not in diagnose(observed(np.ones(2), exact=[False, False]))


def test_lanes_are_apart_and_tokens_without_a_ratio_give_no_weights():
    lane = [LANES.index("usual")] * 2 + [LANES.index("expert")] * 2
    values = diagnose(observed([1, 1, 9, 9], lane=lane, ratio=[True, True, False, False]))
    assert values["usual/weight_max"] == pytest.approx(1.0)
    assert values["expert/tokens"] == 2.0
    assert "expert/ess" not in values


class FakeTracker:
    """Points that were written; refuses those of `refused`."""

    def __init__(self, refused: int = -1) -> None:
        self.points: list[Point] = []
        self.refused, self.is_closed = refused, False

    def write(self, point: Point) -> None:
        if point.number == self.refused:
            raise ConnectionError("the tracker is away")
        self.points.append(point)

    def close(self) -> None:
        self.is_closed = True

    def opened(self) -> Writer:
        return Writer(self.write, self.close)


def lost(metrics: Metrics) -> float:
    return metrics.counters().get("tracker_points_lost{tracker=fake}", 0.0)


RESULT = EvalResult(policy="main", version=7, suite="dev", num_tasks=4, num_correct=3, pass_at={"2": 1.0})


def test_tensorboard_and_a_tracker_get_the_same_figures_by_step_and_version(tmp_path: Path) -> None:
    fake, metrics = FakeTracker(), Metrics("train")
    board = Board(tmp_path / "tensorboard", (Tracker("fake", fake.opened, metrics),))
    board.step(3, {"loss": 0.5})
    board.step(4, {"loss": 0.25})
    board.result(RESULT)
    board.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()

    def points(name: str) -> list[tuple[int, float]]:
        return [(event.step, float(event.tensor_proto.float_val[0])) for event in read.Tensors(name)]

    assert points("train/loss") == [(3, 0.5), (4, 0.25)]
    assert points("eval/dev") == [(7, 0.75)] and points("eval/dev/pass@2") == [(7, 1.0)]
    assert fake.points == [
        Point({"train/loss": 0.5}, "step", 3), Point({"train/loss": 0.25}, "step", 4),
        Point({"eval/dev": 0.75, "eval/dev/pass@2": 1.0}, "version", 7),
    ]  # fmt: skip
    assert fake.is_closed and lost(metrics) == 0


def test_a_tracker_that_is_away_holds_up_no_step_loses_no_count_and_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def never() -> Writer:
        raise OSError("no network: cannot reach api.wandb.ai")

    metrics = Metrics("train")
    board = Board(None, (Tracker("fake", never, metrics),))
    for step in range(3):
        board.step(step, {"loss": 0.5})
    board.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert lost(metrics) == 3 and "tracker_unavailable tracker=fake error=OSError: no network" in line

    release = threading.Event()
    fake = FakeTracker(refused=2)

    def slow() -> Writer:
        release.wait(60)
        return fake.opened()

    metrics = Metrics("train")
    board = Board(None, (Tracker("fake", slow, metrics),))
    for step in range(MAX_WAITING + 5):
        board.step(step, {"loss": 0.5})  # nothing of this waits for the tracker
    assert lost(metrics) >= 4
    release.set()
    board.close()
    assert len(fake.points) + lost(metrics) == MAX_WAITING + 5 and fake.is_closed


def test_a_tracker_whose_package_is_missing_is_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match="needs the package no_such_tracker: pip install no_such_tracker"):
        check_trackers(("no_such_tracker",))


@pytest.mark.parametrize("name", OPENERS)
def test_the_packages_take_what_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    for variable, value in {
        "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlflow", "TRACKIO_DIR": str(tmp_path),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    metrics = Metrics("train")
    board = Board(None, open_trackers((name,), "project", "run", metrics))
    board.step(3, {"loss": 0.5, "usual/ess": 0.25})
    board.result(RESULT)
    board.close()
    assert metrics.counters().get(f"tracker_points_lost{{tracker={name}}}", 0.0) == 0
