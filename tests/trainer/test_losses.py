"""Losses, and the terms that a lane adds to any of them, against their papers' formulas written again in numpy.

The gradients are written by hand from the formula, never by automatic differentiation.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from trainer.config import LOSSES, LaneConfig
from trainer.losses import losses
from trainer.losses.loss import KL_CAP, LossInputs, lane_loss, lane_penalty, open_objective
from trainer.losses.losses import (
    cispo,
    decoupled,
    distill,
    dpo,
    dppo,
    grpo,
    gspo,
    icepop,
    m2po,
    opmd,
    ppo,
    reinforce,
    second_moment_bound,
    sft,
    tis,
    topr,
)
from trainer.losses.offpolicy import reference_k3

RANDOM = np.random.default_rng(7)
LENGTHS = [1, 4, 9, 2, 30, 3, 7, 12, 40, 20, 25, 15]
SEQUENCE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
N = len(SEQUENCE)
CURRENT, REFERENCE, TEACHER = np.log(RANDOM.uniform(0.05, 0.95, (3, N)))
BEHAVIOUR, PROXIMAL = CURRENT + RANDOM.normal(0, 0.3, (2, N))
ADVANTAGE_S = RANDOM.normal(size=len(LENGTHS))
ADVANTAGE = ADVANTAGE_S[SEQUENCE]
STALENESS = RANDOM.integers(0, 4, N)
ENTROPY = RANDOM.uniform(0, 4, N)
LOG_W = CURRENT - BEHAVIOUR
W = np.exp(LOG_W)
NOWHERE = np.full(N, np.nan)


def tensor(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values, float))


def inputs(
    current=CURRENT, *, ratio=True, sequence=SEQUENCE, staleness=None, pair=None, bound=None, **more
) -> LossInputs:
    """The arrays above, unless `more` gives others; a proximal policy, a reference and a teacher only where it names them."""
    num = len(current)
    given = {"behaviour": BEHAVIOUR, "advantage": ADVANTAGE} | more
    return LossInputs(
        logprob=tensor(current).requires_grad_(),
        staleness=torch.zeros(num, dtype=torch.int64) if staleness is None else torch.tensor(staleness),
        ratio=torch.full((num,), ratio) if isinstance(ratio, bool) else torch.tensor(ratio),
        sequence=torch.tensor(sequence),
        pair=None if pair is None else torch.tensor(pair),
        bound=bound,
        **{name: tensor(values).requires_grad_(name == "entropy") for name, values in given.items()},
    )


def per_sequence(values):
    """Sum over the tokens of each sequence, by a plain loop."""
    return np.array([sum(values[s == SEQUENCE]) for s in range(len(LENGTHS))])


def value_and_gradient(loss, given: LossInputs, **options):
    output = loss(given, **options)
    output.loss.sum().backward()
    clipped = None if output.clipped is None else output.clipped.numpy()
    return output.loss.detach().numpy(), given.logprob.grad.numpy(), clipped


def check(loss, given: LossInputs, *, value, gradient, clipped=None, **options) -> None:
    """Value by token, or by sequence where there are as many; clipped: None where the loss silences no token."""
    found, slope, silenced = value_and_gradient(loss, given, **options)
    assert (per_sequence(found) if len(value) == len(LENGTHS) else found) == pytest.approx(value)
    assert slope == pytest.approx(gradient)
    if clipped is None:
        assert silenced is None
    else:
        assert (silenced == clipped).all() and 0 < clipped.sum() < len(clipped), "some are clipped and some are not"


def test_dppo_is_its_formula():
    # L = -min(w, cap) A log π [not masked] + τ (log w)², w constant: dL/dlogπ = -min(w, cap) A [not masked] + 2τ log w
    moved = np.exp(CURRENT) - np.exp(BEHAVIOUR)
    masked = np.where(ADVANTAGE > 0, moved > 0.2, moved < -0.2)
    kept = np.minimum(W, 1.5) * ADVANTAGE * ~masked
    value, gradient = -kept * CURRENT + 1e-3 * LOG_W**2, -kept + 2e-3 * LOG_W
    check(dppo, inputs(), value=value, gradient=gradient, clipped=masked, cap=1.5)


def test_grpo_is_its_formula():
    # L = -min(wA, clip(w, 0.8, 1.2) A); dL/dlogπ = -wA where not clipped, else 0 (dw/dlogπ = w)
    flat = np.where(ADVANTAGE > 0, W > 1.2, W < 0.8)
    value = -np.minimum(W * ADVANTAGE, np.clip(W, 0.8, 1.2) * ADVANTAGE)
    check(grpo, inputs(), value=value, gradient=np.where(flat, 0, -W * ADVANTAGE), clipped=flat)


def test_ppo_is_the_clipped_surrogate_on_the_advantages_it_is_given():
    advantage = RANDOM.normal(size=N)  # a critic's: they differ within a sequence
    flat = np.where(advantage > 0, W > 1.2, W < 0.8)
    value = -np.minimum(W * advantage, np.clip(W, 0.8, 1.2) * advantage)
    gradient = np.where(flat, 0, -W * advantage)
    check(ppo, inputs(advantage=advantage), value=value, gradient=gradient, clipped=flat)
    assert open_objective(LaneConfig(loss="ppo")).critic


@pytest.mark.parametrize("loss", [ppo, grpo])
def test_dual_clip_bounds_how_hard_a_bad_token_that_has_grown_is_pushed_down(loss):
    # A < 0: max(min(wA, clip(w)A), cA); flat, so without gradient, where w > c. arXiv 1912.09729 eq. 5
    single = np.minimum(W * ADVANTAGE, np.clip(W, 0.8, 1.2) * ADVANTAGE)
    dual = np.where(ADVANTAGE < 0, np.maximum(single, 1.5 * ADVANTAGE), single)
    flat = np.where(ADVANTAGE > 0, W > 1.2, (W < 0.8) | (W > 1.5))
    assert ((ADVANTAGE < 0) & (W > 1.5)).sum() > 3
    gradient = np.where(flat, 0, -W * ADVANTAGE)
    check(loss, inputs(), value=-dual, gradient=gradient, clipped=flat, dual_clip_at=1.5)


def test_decoupled_is_its_formula():
    # L = -min(ρ, cap) min(rA, clip(r, 0.8, 1.28) A), ρ = π_p/μ constant, r = π_θ/π_p
    rho, r = np.minimum(np.exp(PROXIMAL - BEHAVIOUR), 1.3), np.exp(CURRENT - PROXIMAL)
    check_decoupled(rho, r, inputs(proximal=PROXIMAL), cap=1.3)


def test_decoupled_log_linear_stands_between_behaviour_and_current():
    # log π_p = (1-α) log μ + α log π_θ with α = s/(s+1) and π_θ held constant there, so r = (π_θ/μ)^(1/(s+1))
    rho, r = np.minimum(np.exp(LOG_W * STALENESS / (STALENESS + 1)), 1.3), np.exp(LOG_W / (STALENESS + 1))
    check_decoupled(rho, r, inputs(staleness=STALENESS), cap=1.3, proximal="log-linear")


def check_decoupled(rho, r, given: LossInputs, **options) -> None:
    flat = np.where(ADVANTAGE > 0, r > 1.28, r < 0.8)
    value = -rho * np.minimum(r * ADVANTAGE, np.clip(r, 0.8, 1.28) * ADVANTAGE)
    check(decoupled, given, value=value, gradient=np.where(flat, 0, -rho * r * ADVANTAGE), clipped=flat, **options)


def test_tis_is_its_formula():
    gradient = -np.minimum(W, 1.2) * ADVANTAGE
    check(tis, inputs(), value=gradient * CURRENT, gradient=gradient, clipped=W > 1.2, cap=1.2)


def test_cispo_keeps_every_gradient_under_a_clipped_weight():
    # L = -c A log π with c = clip(w, 0.7, 1.3) a constant: dL/dlogπ = -c A, also where the clip acts
    gradient = -np.clip(W, 0.7, 1.3) * ADVANTAGE
    check(
        cispo, inputs(), value=gradient * CURRENT, gradient=gradient, clipped=(W < 0.7) | (W > 1.3), low=0.3, high=0.3
    )


def test_icepop_drops_what_lies_outside_its_interval():
    # L = -w A where alpha <= w <= beta, else nothing; dw/dlogπ = w
    kept = (W >= 0.8) & (W <= 1.3)
    value = np.where(kept, -W * ADVANTAGE, 0)
    check(icepop, inputs(), value=value, gradient=value, clipped=~kept, alpha=0.8, beta=1.3)


def test_reinforce_never_looks_at_who_sampled():
    given = inputs(ratio=False, behaviour=NOWHERE)
    check(reinforce, given, value=-ADVANTAGE * CURRENT, gradient=-ADVANTAGE)


def test_sft_is_the_negative_logprob_and_never_looks_at_behaviour():
    check(sft, inputs(ratio=False, behaviour=NOWHERE), value=-CURRENT, gradient=-np.ones(N))


PUSHED = np.where(ADVANTAGE > 0, LOG_W > 0, LOG_W < 0)  # what a step would move further away


@pytest.mark.parametrize("threshold", [1e-9, 0.005, 0.04])
def test_m2po_masks_the_fewest_outliers_that_bring_the_second_moment_down(threshold):
    left = sorted(np.square(LOG_W[PUSHED]))  # algorithm 1 as it reads
    while left and np.mean(left) > threshold:
        left.pop()
    bound = second_moment_bound(LOG_W, ADVANTAGE, threshold=threshold)
    kept = ~PUSHED | ((left[-1] if left else -1) >= LOG_W**2)
    assert kept.sum() == len(left) + (~PUSHED).sum()
    value = np.where(kept, -W * ADVANTAGE, 0)
    check(m2po, inputs(bound=bound), value=value, gradient=value, clipped=~kept, threshold=threshold)
    assert second_moment_bound(LOG_W, ADVANTAGE, threshold=1.0) == np.inf, "nothing is masked"


def test_gspo_clips_whole_sequences_by_the_mean_of_their_log_ratios():
    # s = exp(mean log w); L_S = -min(sA, clip(s)A), each token carrying 1/|y| of it; ds/dlogπ_t = s/|y|
    s = np.exp(per_sequence(LOG_W) / LENGTHS)
    flat = np.where(ADVANTAGE_S > 0, s > 1.05, s < 0.95)
    value = -np.minimum(s * ADVANTAGE_S, np.clip(s, 0.95, 1.05) * ADVANTAGE_S)
    gradient = (np.where(flat, 0, -s * ADVANTAGE_S) / LENGTHS)[SEQUENCE]
    check(gspo, inputs(), value=value, gradient=gradient, clipped=flat[SEQUENCE], low=0.05, high=0.05)


def test_topr_imitates_the_good_and_tapers_the_bad():
    # positive: -A log π(y); negative: weight min(π(y)/μ(y), 1), a constant, which silences no token
    weight = np.where(ADVANTAGE_S >= 0, 1, np.minimum(np.exp(per_sequence(LOG_W)), 1))
    assert (weight < 1).any()
    value = -weight * ADVANTAGE_S * per_sequence(CURRENT)
    check(topr, inputs(), value=value, gradient=(-weight * ADVANTAGE_S)[SEQUENCE])


def test_opmd_is_a_plain_policy_gradient_held_by_a_squared_distance():
    # L_S = -A log π(y) + τ/2 D², D = log π(y)/μ(y): dL/dlogπ_t = -A + τ D
    distance = per_sequence(LOG_W)
    value = -ADVANTAGE_S * per_sequence(CURRENT) + 0.15 * distance**2
    check(opmd, inputs(), value=value, gradient=(-ADVANTAGE_S + 0.3 * distance)[SEQUENCE], tau=0.3)


@pytest.mark.parametrize("baseline", [None, -0.7])
def test_distillation_moves_every_token_towards_the_teacher(baseline):
    pull = np.minimum(W, 1.1) * (TEACHER - CURRENT - (baseline or 0))
    given = inputs(teacher=TEACHER, bound=baseline)
    check(distill, given, value=-pull * CURRENT, gradient=-pull, clipped=W > 1.1, cap=1.1)


PAIRS = np.array([0, 1, 3, 2, 4, 5, 7, 6, 8, 9, 10, 11])[SEQUENCE]  # sides come in any order


def test_dpo_is_the_logistic_loss_of_the_margin_between_the_sides():
    # L_p = -log σ(β m), m = Σ_w (log π - log ref) - Σ_l (…); dL/dlogπ_t = ∓β (1 - σ(β m))
    given = inputs(ratio=False, behaviour=NOWHERE, reference=REFERENCE, pair=PAIRS)
    value, gradient, _ = value_and_gradient(dpo, given, beta=0.3)
    side_sums = np.array([sum((CURRENT - REFERENCE)[side == PAIRS]) for side in range(12)])
    margin = side_sums[0::2] - side_sums[1::2]
    assert [value[p == PAIRS // 2].sum() for p in range(6)] == pytest.approx(np.log(1 + np.exp(-0.3 * margin)))
    slope = 0.3 / (1 + np.exp(0.3 * margin))
    assert gradient == pytest.approx(np.where(PAIRS % 2 == 0, -1, 1) * slope[PAIRS // 2])


@pytest.mark.parametrize(("side", "message"), [(0, "both of every pair"), (-1, "outside any pair")])
def test_dpo_refuses_half_a_pair(side, message):
    with pytest.raises(ValueError, match=message):
        dpo(inputs(reference=REFERENCE, pair=np.where(PAIRS == 1, side, PAIRS)))


WITH_RATIOS = [cispo, decoupled, dppo, gspo, grpo, icepop, m2po, opmd, ppo, tis, topr]


@pytest.mark.parametrize("loss", WITH_RATIOS)
def test_on_policy_every_loss_with_ratios_is_the_plain_policy_gradient(loss):
    # At π_θ = π_p = μ all weights are 1, nothing is clipped: -A, or its share where a sequence is one action of equal parts
    _, gradient, clipped = value_and_gradient(loss, inputs(behaviour=CURRENT, proximal=CURRENT, bound=0.0))
    assert gradient == pytest.approx(-ADVANTAGE / (np.array(LENGTHS)[SEQUENCE] if loss is gspo else 1))
    assert clipped is None or not clipped.any()


@pytest.mark.parametrize("loss", [*WITH_RATIOS, distill])
def test_tokens_without_a_ratio_never_meet_an_importance_weight(loss):
    with pytest.raises(ValueError, match=f"{N} tokens with ratio=False"):
        loss(inputs(ratio=False, proximal=PROXIMAL, bound=1.0, teacher=TEACHER))


@pytest.mark.parametrize("loss", [gspo, topr, opmd])
def test_turns_with_advantages_of_their_own_give_a_sequence_their_mean(loss):
    own = ADVANTAGE + RANDOM.normal(size=N)
    mean = (per_sequence(own) / LENGTHS)[SEQUENCE]
    found = [value_and_gradient(loss, inputs(advantage=advantage))[:2] for advantage in (own, mean)]
    assert found[0][0] == pytest.approx(found[1][0]) and found[0][1] == pytest.approx(found[1][1])


@pytest.mark.parametrize(("loss", "num"), [("tis", N), ("sft", N), *((name, 12) for name in ("gspo", "topr", "opmd"))])
def test_a_lane_adds_its_weight_times_the_mean_over_the_whole_step_however_it_is_cut(loss, num):
    objective = open_objective(LaneConfig(loss=loss, weight=0.9))

    def added(at=slice(None), times: float = 1.0) -> float:
        sequence = SEQUENCE[at] - SEQUENCE[at].min()
        part = {name: array[at] for name, array in (("behaviour", BEHAVIOUR), ("advantage", ADVANTAGE))}
        weight = torch.full((len(sequence),), times, dtype=torch.float64)
        found, _ = lane_loss(objective, inputs(CURRENT[at], sequence=sequence, **part), weight, num)
        return float(found.detach())

    values, _, _ = value_and_gradient(vars(losses)[loss], inputs())
    assert added() == pytest.approx(0.9 * values.sum() / num)
    assert added(SEQUENCE < 4) + added(SEQUENCE >= 4) == pytest.approx(added())
    assert added(times=2.0) == pytest.approx(2 * added())


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        (LaneConfig(loss="pppo"), 'got "pppo", expected one of '),
        (LaneConfig(loss="dppo", options={"dleta": 0.1}), 'did you mean "delta"'),
        (LaneConfig(loss="decoupled", options={"minibatches": 1}), "minibatches: got 1, expected 2 or more"),
        (LaneConfig(loss="grpo", options={"dual_clip_at": 0.5}), r"dual_clip_at.*above 1"),
    ],
)
def test_a_mistaken_lane_is_a_config_error_that_says_where(lane, message):
    with pytest.raises(ConfigError, match=message):
        open_objective(lane)


def test_the_settings_name_every_loss_that_is_built_in() -> None:
    built_in = {name for name, loss in vars(losses).items() if getattr(loss, "__module__", "") == losses.__name__}
    assert built_in - {"second_moment_bound"} == {*LOSSES}


WEIGHT = RANDOM.uniform(0.2, 2, N)
RATIO = RANDOM.random(N) < 0.8


def test_the_pull_to_the_reference_is_its_formula():
    # 0.5·0.3·Σ weight·w·(q - 1 - log q)/400, q = π_ref/π_θ, w = min(π_θ/μ, 5), 1 without a ratio; slope w·log(π_θ/π_ref)
    far = np.where(np.arange(N) % 3, BEHAVIOUR, CURRENT - 3)
    given = inputs(ratio=RATIO, behaviour=np.where(RATIO, far, np.nan), reference=REFERENCE)
    penalty = lane_penalty(open_objective(LaneConfig(loss="sft", weight=0.5, kl=0.3)), given, tensor(WEIGHT), 400)
    penalty.loss.backward()
    w, q = np.where(RATIO, np.minimum(np.exp(CURRENT - far), KL_CAP), 1), np.exp(REFERENCE - CURRENT)
    assert (w == KL_CAP).sum() > 20 and (~RATIO).sum() > 20
    assert penalty.kl.numpy() == pytest.approx(w * (q - 1 - np.log(q))) and penalty.entropy is None
    assert float(penalty.loss.detach()) == pytest.approx(0.15 * (WEIGHT * w * (q - 1 - np.log(q))).sum() / 400)
    assert given.logprob.grad.numpy() == pytest.approx(0.15 * WEIGHT * w * (CURRENT - REFERENCE) / 400)


def test_the_entropy_bonus_is_its_formula():
    given = inputs(entropy=ENTROPY)
    penalty = lane_penalty(open_objective(LaneConfig(loss="sft", weight=0.5, entropy=0.02)), given, tensor(WEIGHT), 400)
    penalty.loss.backward()
    assert float(penalty.loss.detach()) == pytest.approx(-0.01 * (WEIGHT * ENTROPY).sum() / 400)
    assert given.entropy.grad.numpy() == pytest.approx(-0.01 * WEIGHT / 400)
    assert penalty.kl is None and penalty.entropy.numpy() == pytest.approx(ENTROPY)


# One state with four actions: an average over samples of μ is Σ_a μ(a)·(…); z are the logits of π.
LOGITS, OTHER_LOGITS, SAMPLER_LOGITS = np.array([[0.4, -0.8, 1.1, 0.0], [0.1, 0.9, -0.7, 0.3], [0.6, -0.2, 0.5, -0.4]])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def divergence(logits: np.ndarray) -> float:
    """KL(π‖other)."""
    log_p = log_softmax(logits)
    return float((np.exp(log_p) * (log_p - log_softmax(OTHER_LOGITS))).sum())


def slope(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    step = 1e-6
    return np.array(
        [(function(at + step * each) - function(at - step * each)) / (2 * step) for each in np.eye(len(at))]
    )


def test_off_policy_the_pull_and_its_gradient_are_on_average_those_of_the_exact_divergence():
    sampler = log_softmax(SAMPLER_LOGITS)
    z = torch.tensor(LOGITS, requires_grad=True)
    logprob = torch.log_softmax(z, 0)
    weight = (logprob.detach() - torch.tensor(sampler)).exp()
    assert float(weight.max()) < KL_CAP and float((weight - 1).abs().max()) > 0.3
    mean = (
        torch.tensor(np.exp(sampler)) * reference_k3(logprob, torch.tensor(log_softmax(OTHER_LOGITS)), weight)
    ).sum()
    mean.backward()
    assert float(mean.detach()) == pytest.approx(divergence(LOGITS))
    assert z.grad.numpy() == pytest.approx(slope(divergence, LOGITS), abs=1e-8)


@pytest.mark.parametrize("baseline", [None, -1.3])
def test_distillation_on_policy_is_the_gradient_of_the_divergence_from_the_teacher_under_any_baseline(baseline):
    current = log_softmax(LOGITS)
    given = inputs(
        current, behaviour=current, advantage=np.zeros(4), sequence=range(4), teacher=log_softmax(OTHER_LOGITS),
        bound=baseline,
    )  # fmt: skip
    _, gradient, _ = value_and_gradient(distill, given)
    score = np.eye(4) - np.exp(current)  # score[a, z] = dlogπ(a)/dz
    assert (np.exp(current) * gradient) @ score == pytest.approx(slope(divergence, LOGITS), abs=1e-8)
