"""The divergence guard's table of verdicts."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.policies.policy import Probe
from schemas import Span
from tests.trainer.trainer_samples import make_item
from trainer.config import TrainerGuardConfig
from trainer.health import (
    ANY_FINITE,
    GuardState,
    collapses,
    judge,
    norm_limit,
    passed,
    refused,
    rolled_back,
    unhealthy,
)
from trainer.learners.learner import StepStats
from trainer.loop.step import condition, mean_reward

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


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_it_rolls_back_exactly_when_max_skips_in_a_row_were_not_finite(steps: list[bool], max_skips: int) -> None:
    state, row = GuardState(), 0
    for finite in steps:
        row = 0 if finite else row + 1
        verdict, _ = judge(state, finite=finite, alarms=(), halting=frozenset(), max_skips=max_skips)
        assert verdict == ("go" if finite else "rollback" if row == max_skips else "skip")
        state = {"go": passed(state, CONFIG, grad_norm=1.0), "skip": refused(state), "rollback": rolled_back(state)}[
            verdict
        ]
        row = 0 if verdict == "rollback" else row


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
    (alarm,) = collapses(state, CONFIG, entropy=0.1, reward=0.5)  # a fifth of the median 1.05 is 0.21
    assert str(alarm) == "entropy_collapse: got 0.1, expected at least 0.21"
    (alarm,) = collapses(state, CONFIG, entropy=1.0, reward=0.2)  # half of the median 0.5
    assert alarm.name == "reward_collapse"
    assert collapses(state, CONFIG, entropy=None, reward=None) == ()
    assert collapses(state, TrainerGuardConfig(min_steps=4), entropy=0.0, reward=0.0) == (), "off unless asked for"


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
