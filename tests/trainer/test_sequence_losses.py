"""Losses beside the clipped ones: each against its paper's formula written again in numpy, value and gradient.

The gradients are written by hand from the formula, never by automatic differentiation.
"""

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tests.trainer.test_losses import tensor, value_and_gradient
from trainer.config import LaneConfig
from trainer.losses.loss import LossInputs, lane_loss, open_objective
from trainer.losses.losses import (
    cispo,
    distill,
    dpo,
    grpo,
    gspo,
    icepop,
    m2po,
    opmd,
    ppo,
    reinforce,
    second_moment_bound,
    topr,
)

RANDOM = np.random.default_rng(7)
LENGTHS = [1, 4, 9, 2, 30, 3, 7, 12]
SEQUENCE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
N = len(SEQUENCE)
CURRENT = np.log(RANDOM.uniform(0.05, 0.95, N))
BEHAVIOUR = CURRENT + RANDOM.normal(0, 0.3, N)
REFERENCE = np.log(RANDOM.uniform(0.05, 0.95, N))
TEACHER = np.log(RANDOM.uniform(0.05, 0.95, N))
ADVANTAGE_S = RANDOM.normal(size=len(LENGTHS))
ADVANTAGE = ADVANTAGE_S[SEQUENCE]
LOG_W = CURRENT - BEHAVIOUR
W = np.exp(LOG_W)


def inputs(*, ratio=True, advantage=ADVANTAGE, current=CURRENT, sequence=SEQUENCE, **more):
    names = {name: tensor(values) for name, values in more.items() if name not in ("pair", "bound")}
    return LossInputs(
        logprob=tensor(current).requires_grad_(),
        behaviour=tensor(more.pop("behaviour", BEHAVIOUR)),
        advantage=tensor(advantage),
        staleness=torch.zeros(len(current), dtype=torch.int64),
        ratio=torch.full((len(current),), ratio),
        sequence=torch.tensor(sequence),
        pair=torch.tensor(more["pair"]) if "pair" in more else None,
        bound=more.get("bound"),
        **{name: value for name, value in names.items() if name != "behaviour"},
    )


def per_sequence(values):
    """Sum over the tokens of each sequence, by a plain loop."""
    return np.array([sum(values[s == SEQUENCE]) for s in range(len(LENGTHS))])


def test_ppo_is_the_clipped_surrogate_on_the_advantages_it_is_given():
    advantage = RANDOM.normal(size=N)  # a critic's: they differ within a sequence
    value, gradient, clipped = value_and_gradient(ppo, inputs(advantage=advantage))
    flat = np.where(advantage > 0, W > 1.2, W < 0.8)
    assert value == pytest.approx(-np.minimum(W * advantage, np.clip(W, 0.8, 1.2) * advantage))
    assert gradient == pytest.approx(np.where(flat, 0, -W * advantage))
    assert (clipped == flat).all() and 5 < flat.sum() < N - 5
    assert open_objective(LaneConfig(loss="ppo")).critic


@pytest.mark.parametrize("loss", [ppo, grpo])
def test_dual_clip_bounds_how_hard_a_bad_token_that_has_grown_is_pushed_down(loss):
    # A < 0: max(min(wA, clip(w)A), cA); flat, so without gradient, where w > c. arXiv 1912.09729 eq. 5
    current = np.log(RANDOM.uniform(0.05, 0.95, N))
    w = np.exp(current - BEHAVIOUR)
    given = inputs(current=current)
    value, gradient, clipped = value_and_gradient(loss, given, dual_clip_at=1.5)
    single = np.minimum(w * ADVANTAGE, np.clip(w, 0.8, 1.2) * ADVANTAGE)
    dual = np.where(ADVANTAGE < 0, np.maximum(single, 1.5 * ADVANTAGE), single)
    flat = np.where(ADVANTAGE > 0, w > 1.2, (w < 0.8) | (w > 1.5))
    assert value == pytest.approx(-dual)
    assert gradient == pytest.approx(np.where(flat, 0, -w * ADVANTAGE))
    assert (clipped == flat).all() and ((ADVANTAGE < 0) & (w > 1.5)).sum() > 5
    plain, _, _ = value_and_gradient(loss, inputs(current=current))
    assert plain == pytest.approx(-single)
    with pytest.raises(ConfigError, match=r"dual_clip_at.*above 1"):
        open_objective(LaneConfig(loss=loss.__name__, options={"dual_clip_at": 0.5}))


def test_cispo_keeps_every_gradient_under_a_clipped_weight():
    # L = -c A log π with c = clip(w, 0, 1.3) a constant: dL/dlogπ = -c A, also where the clip acts
    value, gradient, clipped = value_and_gradient(cispo, inputs(), low=0.3, high=0.3)
    weight = np.clip(W, 0.7, 1.3)
    assert value == pytest.approx(-weight * ADVANTAGE * CURRENT)
    assert gradient == pytest.approx(-weight * ADVANTAGE)
    assert (clipped == ((W < 0.7) | (W > 1.3))).all() and clipped.any()
    _, gradient, clipped = value_and_gradient(cispo, inputs())
    assert gradient == pytest.approx(-W * ADVANTAGE) and not clipped.any()


def test_icepop_drops_what_lies_outside_its_interval():
    # L = -w A where alpha <= w <= beta, else nothing; dw/dlogπ = w
    value, gradient, clipped = value_and_gradient(icepop, inputs(), alpha=0.8, beta=1.3)
    kept = (W >= 0.8) & (W <= 1.3)
    assert value == pytest.approx(np.where(kept, -W * ADVANTAGE, 0))
    assert gradient == pytest.approx(np.where(kept, -W * ADVANTAGE, 0))
    assert (clipped == ~kept).all() and 5 < kept.sum() < N - 5


PUSHED = np.where(ADVANTAGE > 0, LOG_W > 0, LOG_W < 0)  # what a step would move further away


def second_moment_by_removal(threshold):
    """Algorithm 1 as it reads: take the largest away until the mean of the rest is within the threshold."""
    left = sorted(np.square(LOG_W[PUSHED]))
    while left and np.mean(left) > threshold:
        left.pop()
    return left


@pytest.mark.parametrize("threshold", [1e-9, 0.005, 0.04, 1.0])
def test_m2po_masks_the_fewest_outliers_that_bring_the_second_moment_down(threshold):
    bound = second_moment_bound(LOG_W, ADVANTAGE, threshold=threshold)
    left = second_moment_by_removal(threshold)
    value, gradient, clipped = value_and_gradient(m2po, inputs(bound=bound), threshold=threshold)
    kept = ~PUSHED | ((left[-1] if left else -1) >= LOG_W**2)
    assert kept.sum() == len(left) + (~PUSHED).sum() and 9 < PUSHED.sum() < N - 9
    assert value == pytest.approx(np.where(kept, -W * ADVANTAGE, 0))
    assert gradient == pytest.approx(np.where(kept, -W * ADVANTAGE, 0))
    assert (clipped == ~kept).all()


def test_m2po_leaves_every_outlier_that_its_own_gradient_pulls_back():
    # A > 0 and w < 1: the gradient makes the token likelier again; A < 0 and w > 1: less likely
    log_w = np.array([-3.0, 3.0, 3.0, -3.0, 0.01, 4.0])
    advantage = np.array([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    bound = second_moment_bound(log_w, advantage, threshold=0.04)
    given = inputs(current=log_w - 5, behaviour=np.full(6, -5.0), advantage=advantage, sequence=range(6), bound=bound)
    _, gradient, clipped = value_and_gradient(m2po, given)
    assert clipped.tolist() == [False, False, True, True, False, False]
    assert np.sign(gradient).tolist() == [-1.0, 1.0, 0.0, 0.0, -1.0, 0.0]
    assert second_moment_bound(log_w[:2], advantage[:2]) == np.inf, "nothing could be masked"


def test_gspo_clips_whole_sequences_by_the_mean_of_their_log_ratios():
    # s = exp(mean log w); L_S = -min(sA, clip(s)A), each token carrying 1/|y| of it; ds/dlogπ_t = s/|y|
    value, gradient, clipped = value_and_gradient(gspo, inputs(), low=0.05, high=0.05)
    s = np.exp(per_sequence(LOG_W) / LENGTHS)
    loss = -np.minimum(s * ADVANTAGE_S, np.clip(s, 0.95, 1.05) * ADVANTAGE_S)
    flat = np.where(ADVANTAGE_S > 0, s > 1.05, s < 0.95)
    assert per_sequence(value) == pytest.approx(loss)
    expected = np.where(flat, 0, -s * ADVANTAGE_S) / LENGTHS
    assert gradient == pytest.approx(expected[SEQUENCE])
    assert (clipped == flat[SEQUENCE]).all() and 0 < flat.sum() < len(LENGTHS)


def test_topr_imitates_the_good_and_tapers_the_bad():
    # positive: -A log π(y); negative: weight min(π(y)/μ(y), 1), a constant
    value, gradient, clipped = value_and_gradient(topr, inputs())
    ratio = np.exp(per_sequence(LOG_W))
    weight = np.where(ADVANTAGE_S >= 0, 1, np.minimum(ratio, 1))
    assert per_sequence(value) == pytest.approx(-weight * ADVANTAGE_S * per_sequence(CURRENT))
    assert gradient == pytest.approx((-weight * ADVANTAGE_S)[SEQUENCE])
    assert clipped is None, "a truncated weight silences no token, so that no alarm may come of it"
    assert (weight < 1).any()


def test_opmd_is_a_plain_policy_gradient_held_by_a_squared_distance():
    # L_S = -A log π(y) + τ/2 D², D = log π(y)/μ(y): dL/dlogπ_t = -A + τ D
    value, gradient, _ = value_and_gradient(opmd, inputs(), tau=0.3)
    distance = per_sequence(LOG_W)
    assert per_sequence(value) == pytest.approx(-ADVANTAGE_S * per_sequence(CURRENT) + 0.15 * distance**2)
    assert gradient == pytest.approx((-ADVANTAGE_S + 0.3 * distance)[SEQUENCE])


def test_distillation_moves_every_token_towards_the_teacher():
    value, gradient, clipped = value_and_gradient(distill, inputs(teacher=TEACHER), cap=1.1)
    pull = np.minimum(W, 1.1) * (TEACHER - CURRENT)
    assert value == pytest.approx(-pull * CURRENT)
    assert gradient == pytest.approx(-pull)
    assert (clipped == (W > 1.1)).all() and clipped.any()
    based, _, _ = value_and_gradient(distill, inputs(teacher=TEACHER, bound=-0.7), cap=1.1)
    assert based == pytest.approx(-np.minimum(W, 1.1) * (TEACHER - CURRENT + 0.7) * CURRENT)


@pytest.mark.parametrize("baseline", [None, -1.3])
def test_distillation_on_policy_is_the_gradient_of_the_divergence_from_the_teacher_under_any_baseline(baseline):
    # One state, three tokens: Σ_a π(a)·g(a)·dlogπ(a)/dz must be d/dz Σ_a π(a) log(π(a)/π_T(a)), z the logits.
    logits, teacher = np.array([0.3, -0.2, 0.9]), np.log([0.5, 0.2, 0.3])
    current = logits - np.log(np.exp(logits).sum())
    given = inputs(
        current=current, behaviour=current, advantage=np.zeros(3), sequence=[0, 1, 2], teacher=teacher, bound=baseline
    )
    _, gradient, _ = value_and_gradient(distill, given)
    p = np.exp(current)
    score = np.eye(3) - p  # score[a, z] = dlogπ(a)/dz
    step = 1e-6

    def divergence(shift):
        moved = logits + shift
        log_p = moved - np.log(np.exp(moved).sum())
        return (np.exp(log_p) * (log_p - teacher)).sum()

    numeric = [(divergence(step * each) - divergence(-step * each)) / (2 * step) for each in np.eye(3)]
    assert (p * gradient) @ score == pytest.approx(numeric, abs=1e-8)


@pytest.mark.parametrize("loss", [gspo, topr, opmd])
def test_turns_with_advantages_of_their_own_give_a_sequence_their_mean(loss):
    own = ADVANTAGE + RANDOM.normal(size=N)
    mean = (per_sequence(own) / LENGTHS)[SEQUENCE]
    found = [value_and_gradient(loss, inputs(advantage=advantage))[:2] for advantage in (own, mean)]
    assert found[0][0] == pytest.approx(found[1][0]) and found[0][1] == pytest.approx(found[1][1])


def test_reinforce_never_looks_at_who_sampled():
    value, gradient, clipped = value_and_gradient(reinforce, inputs(ratio=False, behaviour=np.full(N, np.nan)))
    assert value == pytest.approx(-ADVANTAGE * CURRENT)
    assert gradient == pytest.approx(-ADVANTAGE) and clipped is None


PAIRS = np.array([0, 1, 3, 2, 4, 5, 7, 6])[SEQUENCE]  # sides come in any order


def test_dpo_is_the_logistic_loss_of_the_margin_between_the_sides():
    # L_p = -log σ(β m), m = Σ_w (log π - log ref) - Σ_l (…); dL/dlogπ_t = ∓β (1 - σ(β m))
    given = inputs(ratio=False, behaviour=np.full(N, np.nan), reference=REFERENCE, pair=PAIRS)
    value, gradient, _ = value_and_gradient(dpo, given, beta=0.3)
    side_sums = [sum((CURRENT - REFERENCE)[side == PAIRS]) for side in range(8)]
    margin = np.array(side_sums[0::2]) - np.array(side_sums[1::2])
    loss = np.log(1 + np.exp(-0.3 * margin))
    assert [value[p == PAIRS // 2].sum() for p in range(4)] == pytest.approx(loss)
    slope = 0.3 / (1 + np.exp(0.3 * margin))
    assert gradient == pytest.approx(np.where(PAIRS % 2 == 0, -1, 1) * slope[PAIRS // 2])


def test_dpo_refuses_half_a_pair():
    with pytest.raises(ValueError, match="both of every pair"):
        dpo(inputs(reference=REFERENCE, pair=np.where(PAIRS == 1, 0, PAIRS)))
    with pytest.raises(ValueError, match="outside any pair"):
        dpo(inputs(reference=REFERENCE, pair=np.where(PAIRS == 1, -1, PAIRS)))


def test_grpo_with_k1_follows_the_gradient_of_the_divergence_from_the_reference():
    # d/dz KL(π‖ref) = Σ_a π(a) log(π(a)/ref(a)) dlogπ(a)/dz: each sampled token weighs w·log(π/ref)
    given = inputs(advantage=np.zeros(N), reference=REFERENCE)
    value, gradient, _ = value_and_gradient(grpo, given, kl=0.5, estimator="k1")
    assert gradient == pytest.approx(0.5 * W * (CURRENT - REFERENCE))
    assert value == pytest.approx(0.5 * W * (CURRENT - REFERENCE) * CURRENT)


@pytest.mark.parametrize("loss", [ppo, cispo, icepop, gspo, topr, opmd])
def test_on_policy_every_loss_is_the_policy_gradient(loss):
    # w = 1 everywhere: -A for each token, or its share of -A where the sequence is one action of equal parts
    given = inputs(behaviour=CURRENT)
    _, gradient, clipped = value_and_gradient(loss, given)
    share = np.array(LENGTHS)[SEQUENCE] if loss is gspo else 1
    assert gradient == pytest.approx(-ADVANTAGE / share)
    assert clipped is None or not clipped.any()


@pytest.mark.parametrize("loss", [ppo, cispo, icepop, m2po, gspo, topr, opmd, distill])
def test_what_was_not_sampled_by_the_policy_never_meets_a_ratio(loss):
    with pytest.raises(ValueError, match="tokens with ratio=False"):
        loss(inputs(ratio=False, bound=1.0, teacher=TEACHER))


@pytest.mark.parametrize("loss", ["gspo", "topr", "opmd"])
def test_sequence_losses_are_means_over_the_sequences_of_the_step(loss):
    objective = open_objective(LaneConfig(loss=loss, weight=0.5))
    assert objective.mean == "sequences"
    ones = torch.ones(N, dtype=torch.float64)
    whole, _ = lane_loss(objective, inputs(), ones, len(LENGTHS))
    cut = SEQUENCE < 4
    halves = [
        lane_loss(
            objective,
            inputs(
                current=CURRENT[part], behaviour=BEHAVIOUR[part], advantage=ADVANTAGE[part],
                sequence=SEQUENCE[part] - SEQUENCE[part].min(),
            ),
            ones[: part.sum()],
            len(LENGTHS),
        )[0]
        for part in (cut, ~cut)
    ]  # fmt: skip
    assert float(sum(halves).detach()) == pytest.approx(float(whole.detach()))
