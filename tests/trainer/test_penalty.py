"""What a lane adds to any loss: each term against its formula in float64 numpy, and against the exact divergence."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_samples import random_items

from infra.cli.demo.char_model import build_char_model
from infra.model.model import load_model
from trainer.batch.batch import PackedBatch, TrainItem, pack
from trainer.batch.split import split
from trainer.config import LOSSES, LaneConfig, TrainerConfig
from trainer.learners.forward import PackedModel
from trainer.learners.lanes import microbatch_loss, step_context
from trainer.learners.torch import TorchLearner
from trainer.losses.loss import KL_CAP, LossInputs, Objective, lane_penalty, open_objective, open_objectives
from trainer.losses.offpolicy import reference_k3

RANDOM = np.random.default_rng(11)
N = 300
CURRENT = np.log(RANDOM.uniform(0.01, 0.99, N))
BEHAVIOUR = np.log(RANDOM.uniform(0.01, 0.99, N))
REFERENCE = np.log(RANDOM.uniform(0.01, 0.99, N))
ENTROPY = RANDOM.uniform(0, 4, N)
RATIO = RANDOM.random(N) < 0.8
WEIGHT = RANDOM.uniform(0.2, 2, N)


def tensor(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values, float))


def inputs() -> LossInputs:
    return LossInputs(
        logprob=tensor(CURRENT).requires_grad_(),
        behaviour=tensor(np.where(RATIO, BEHAVIOUR, np.nan)),
        advantage=torch.zeros(N),
        staleness=torch.zeros(N, dtype=torch.int64),
        ratio=torch.tensor(RATIO),
        reference=tensor(REFERENCE),
        entropy=tensor(ENTROPY).requires_grad_(),
    )


def objective(**terms: float) -> Objective:
    return open_objective(LaneConfig(loss="sft", weight=0.5, **terms))


def test_the_pull_to_the_reference_is_its_formula():
    # 0.5·0.3·Σ weight·w·(q - 1 - log q)/400, q = π_ref/π_θ, w = min(π_θ/μ, 5), 1 without a ratio; slope w·log(π_θ/π_ref)
    given = inputs()
    penalty = lane_penalty(objective(kl=0.3), given, tensor(WEIGHT), 400)
    penalty.loss.backward()
    w = np.where(RATIO, np.minimum(np.exp(CURRENT - BEHAVIOUR), KL_CAP), 1)
    q = np.exp(REFERENCE - CURRENT)
    assert float(penalty.loss.detach()) == pytest.approx(0.15 * (WEIGHT * w * (q - 1 - np.log(q))).sum() / 400)
    assert given.logprob.grad.numpy() == pytest.approx(0.15 * WEIGHT * w * (CURRENT - REFERENCE) / 400)
    assert given.entropy.grad is None
    assert penalty.kl.numpy() == pytest.approx(w * (q - 1 - np.log(q)))
    assert (np.exp(CURRENT - BEHAVIOUR) > KL_CAP).sum() > 20 and (~RATIO).sum() > 20


def test_below_the_cap_the_slope_is_that_of_w_times_k3_differentiated_through_both():
    current = tensor(CURRENT).requires_grad_()
    (
        torch.exp(current - tensor(BEHAVIOUR))
        * (torch.expm1(tensor(REFERENCE) - current) - tensor(REFERENCE) + current)
    ).sum().backward()
    other = tensor(CURRENT).requires_grad_()
    reference_k3(other, tensor(REFERENCE), torch.exp(other - tensor(BEHAVIOUR))).sum().backward()
    assert other.grad.numpy() == pytest.approx(current.grad.numpy())


def test_the_entropy_bonus_is_its_formula():
    given = inputs()
    penalty = lane_penalty(objective(entropy=0.02), given, tensor(WEIGHT), 400)
    penalty.loss.backward()
    assert float(penalty.loss.detach()) == pytest.approx(-0.01 * (WEIGHT * ENTROPY).sum() / 400)
    assert given.entropy.grad.numpy() == pytest.approx(-0.01 * WEIGHT / 400)
    assert penalty.kl is None and penalty.entropy.numpy() == pytest.approx(ENTROPY)


LOGITS, REFERENCE_LOGITS, SAMPLER_LOGITS = np.array(
    [[0.4, -0.8, 1.1, 0.0], [0.1, 0.9, -0.7, 0.3], [0.6, -0.2, 0.5, -0.4]]
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def slope(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    step = 1e-6
    return np.array(
        [(function(at + step * each) - function(at - step * each)) / (2 * step) for each in np.eye(len(at))]
    )


def test_off_policy_the_estimate_and_its_gradient_are_on_average_those_of_the_exact_divergence():
    # Four actions; the average over samples of μ is Σ_a μ(a)·(…), and z are the logits of π.
    reference, sampler = log_softmax(REFERENCE_LOGITS), log_softmax(SAMPLER_LOGITS)
    z = torch.tensor(LOGITS, requires_grad=True)
    logprob = torch.log_softmax(z, 0)
    weight = (logprob.detach() - torch.tensor(sampler)).exp()
    assert float(weight.max()) < KL_CAP and float((weight - 1).abs().max()) > 0.3
    mean = (torch.tensor(np.exp(sampler)) * reference_k3(logprob, torch.tensor(reference), weight)).sum()
    mean.backward()

    def divergence(logits: np.ndarray) -> float:
        log_p = log_softmax(logits)
        return float((np.exp(log_p) * (log_p - reference)).sum())

    assert float(mean.detach()) == pytest.approx(divergence(LOGITS))
    assert z.grad.numpy() == pytest.approx(slope(divergence, LOGITS), abs=1e-8)


def test_without_the_weight_the_gradient_is_that_of_the_other_divergence_and_off_policy_of_none():
    """Why the weight is there. On-policy, plain k3 follows KL(π_ref‖π); from another sampler, neither."""
    reference, sampler = log_softmax(REFERENCE_LOGITS), log_softmax(SAMPLER_LOGITS)

    def plain(actions: np.ndarray) -> np.ndarray:
        z = torch.tensor(LOGITS, requires_grad=True)
        distance = torch.tensor(reference) - torch.log_softmax(z, 0)
        (torch.tensor(np.exp(actions)) * (torch.expm1(distance) - distance)).sum().backward()
        return z.grad.numpy()

    forward = slope(lambda at: float((np.exp(reference) * (reference - log_softmax(at))).sum()), LOGITS)
    assert plain(log_softmax(LOGITS)) == pytest.approx(forward, abs=1e-8)
    assert np.abs(plain(sampler) - forward).max() > 0.01


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    torch.set_num_threads(1)
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))


@pytest.mark.parametrize(("max_tokens", "max_logits"), [(10_000, 2**26), (64, 2000)])
def test_the_entropy_and_its_gradient_are_exact_over_the_vocabulary(model, max_tokens, max_logits):
    items = random_items(seed=5, groups=3, size=3)
    packed = PackedModel(model, dtype="float32", device="cpu", max_logits=max_logits)
    with torch.no_grad():  # an untrained model's answers are all alike
        packed.module.get_output_embeddings().weight.mul_(30)
    found: dict[int, list[float]] = {}
    for rows in pack(items, max_tokens=max_tokens).microbatches:
        logprob_N, entropy_N = packed.logprobs_and_entropy(rows)
        assert (logprob_N - packed.logprobs(rows)).abs().max() < 5e-5
        entropy_N.sum().backward()
        for s, value in zip(rows.sequence_N.tolist(), entropy_N.tolist(), strict=True):
            found.setdefault(s, []).append(value)
    plain = load_model(model).double()
    with torch.no_grad():
        plain.get_output_embeddings().weight.mul_(30)
    for s, item in enumerate(items):
        ids = torch.tensor(item.experience.tokens.astype(np.int64))
        logits = plain(input_ids=ids[None], use_cache=False).logits[0]
        places = [(at - 1, span.temperature) for span in item.experience.spans for at in range(span.start, span.stop)]
        p = torch.stack([torch.softmax(logits[at] / temperature, -1) for at, temperature in places])
        entropy = -(p * p.log()).sum(-1)
        entropy.sum().backward()
        assert found[s] == pytest.approx(entropy.tolist(), abs=2e-5)
    for value, other in zip(packed.module.parameters(), plain.parameters(), strict=True):
        assert (value.grad - other.grad).abs().max() < 2e-4 * max(1, other.grad.abs().max())


LANES = {
    "usual": LaneConfig(loss="gspo", weight=0.7, kl=0.3, entropy=0.2),
    "expert": LaneConfig(loss="sft", weight=0.3, kl=0.1),
}


def of_layout(
    items: list[TrainItem], batch: PackedBatch, parts: int, ranks: int, order: list[int]
) -> tuple[float, dict[tuple[int, int], tuple[float, float]]]:
    """Loss and the slopes of (log π, entropy) of each token, named by item and place; order: of the packed items."""
    objectives = open_objectives(LANES)
    loss, slopes = 0.0, {}
    dealt = split(batch, parts, seed=1)
    for index, part in enumerate(dealt):
        context = step_context(objectives, batch, len(dealt), index, staleness_decay=0.9, bounds={})
        for rows in (micro for rank in split(part, ranks) for micro in rank.microbatches):
            begin = np.flatnonzero(np.append(True, rows.sequence_N[1:] != rows.sequence_N[:-1]))
            place_N = np.arange(len(rows.target_N)) - np.repeat(begin, np.diff(np.append(begin, len(rows.target_N))))
            names = [(order[s], int(place)) for s, place in zip(rows.sequence_N, place_N, strict=True)]
            given = [np.random.default_rng(name).normal(size=3) for name in names]
            logprob, reference, entropy = (tensor(column) for column in np.array(given).T)
            logprob = (one_minus(logprob)).requires_grad_()
            entropy.requires_grad_()
            value, _ = microbatch_loss(context, rows, logprob, reference_N=one_minus(reference), entropy_N=entropy)
            value.backward()
            loss += float(value.detach())
            slope_of = entropy.grad if entropy.grad is not None else torch.zeros(len(names))
            slopes |= dict(zip(names, zip(logprob.grad.tolist(), slope_of.tolist(), strict=True), strict=True))
    return loss / len(dealt), {name: (a / len(dealt), b / len(dealt)) for name, (a, b) in slopes.items()}


def one_minus(values: torch.Tensor) -> torch.Tensor:
    return -1 - 0.3 * values


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9),
    max_tokens=st.integers(1, 200),
    parts=st.integers(1, 4),
    ranks=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_packing_order_minibatches_and_ranks_never_change_loss_or_gradient_of_the_terms(
    seed, max_tokens, parts, ranks, random
):
    items = random_items(seed, groups=3, size=4)
    order = list(range(len(items)))
    loss, slopes = of_layout(items, pack(items, max_tokens=10_000, version=6), 1, 1, order)
    random.shuffle(order)
    cut = pack([items[i] for i in order], max_tokens=max_tokens, version=6)
    other, others = of_layout(items, cut, parts, ranks, order)
    assert other == pytest.approx(loss, rel=1e-6) and others.keys() == slopes.keys()
    assert np.array([others[name] for name in slopes]) == pytest.approx(np.array(list(slopes.values())), rel=1e-5)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"distill", "dpo", "ppo"}))
def test_every_loss_takes_both_terms_and_without_them_a_step_keeps_its_bits(model, loss):
    """The terms add to the loss what they measure, whatever loss it is."""
    items = [item for item in random_items(1, groups=2, size=3) if item.item.lane == "usual"]
    batch = pack(items, max_tokens=60, version=5)

    def stepped(**terms: float):
        lanes = {"usual": LaneConfig(loss=loss, weight=0.5, **terms)}
        learner = TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, reference_decay=0.5), device="cpu")
        learner.step(batch, learning_rate=1e-3, seed=0)
        return learner.step(batch, learning_rate=1e-9, seed=1)

    plain, zero = stepped(), stepped(kl=0.0, entropy=0.0)
    assert (plain.loss, plain.grad_norm, plain.values) == (zero.loss, zero.grad_norm, zero.values)
    assert "usual/kl_reference" not in plain.values and "usual/entropy_exact" not in plain.values
    both = stepped(kl=0.4, entropy=0.1)
    assert both.values["usual/entropy_exact"] == pytest.approx(np.log(128), abs=0.1)
    assert both.values["usual/kl_reference"] > 0
