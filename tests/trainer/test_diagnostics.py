import numpy as np
import pytest

from trainer.batch.batch import LANES
from trainer.health import Observed, alarms, diagnose, join, select


def observed(weight, **more):
    """Tokens with these importance weights, all of one fresh sequence of the usual lane unless said otherwise."""
    num = len(weight)
    given = {
        "logprob": np.log(np.asarray(weight)) - 1.0,
        "behaviour": np.full(num, -1.0),
        "advantage": np.ones(num),
        "staleness": np.zeros(num, int),
        "version": np.zeros(num, int),
        "ratio": np.ones(num, bool),
        "clipped": np.zeros(num, bool),
        "exact": np.ones(num, bool),
        "lane": np.full(num, LANES.index("usual")),
        "sequence": np.zeros(num, int),
        "kl": np.full(num, np.nan),
        "entropy": np.full(num, np.nan),
        "rerouted": np.full(num, np.nan),
    }
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
    assert {one.name for one in alarms(values)} == {
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


def test_an_alarm_says_what_was_got_and_expected():
    (alarm,) = alarms({"usual/ess": 0.12, "usual/k1": 99.0, "loss": 5.0})
    assert str(alarm) == "usual/ess: got 0.12, expected at least 0.3"
    assert [one.name for one in alarms({"usual/ess": float("nan")})] == ["usual/ess"]


def test_forwards_join_in_order():
    both = join([observed([1.0]), observed([2.0, 3.0])])
    assert np.exp(both.logprob + 1).tolist() == pytest.approx([1.0, 2.0, 3.0])
    assert len(select(both, np.array([False, True, True])).logprob) == 2
