"""Each loss against its formula written again in numpy, and against the signs its gradient must have."""

import numpy as np
import pytest
import torch
from trainer_samples import make_item

from infra.cli.demo.char_model import build_char_model
from schemas import Block, Span
from schemas.errors import ConfigError
from schemas.experience import CHOSEN, REJECTED, pair_fault, pair_side
from tests.trainer.trainer_samples import block, message
from trainer.batch.batch import TrainItem, pack
from trainer.batch.split import split
from trainer.buffer.buffer import Buffer
from trainer.buffer.intake import Intake
from trainer.buffer.pool import unfit
from trainer.config import LOSSES, LaneConfig, TrainerConfig
from trainer.learners.torch import TorchLearner
from trainer.losses import losses
from trainer.losses.loss import LossInputs, lane_loss, open_objective
from trainer.losses.losses import decoupled, dppo, grpo, sft, tis

RANDOM = np.random.default_rng(0)
N = 200
CURRENT = np.log(RANDOM.uniform(0.01, 0.99, N))
BEHAVIOUR = np.log(RANDOM.uniform(0.01, 0.99, N))
PROXIMAL = np.log(RANDOM.uniform(0.01, 0.99, N))
REFERENCE = np.log(RANDOM.uniform(0.01, 0.99, N))
ADVANTAGE = RANDOM.normal(size=N)
STALENESS = RANDOM.integers(0, 4, N)


def tensor(values):
    return torch.tensor(np.asarray(values, float))


def inputs(current=CURRENT, behaviour=BEHAVIOUR, advantage=ADVANTAGE, *, ratio=True, **more):
    current = tensor(current).requires_grad_()
    return LossInputs(
        logprob=current,
        behaviour=tensor(behaviour),
        advantage=tensor(advantage),
        staleness=more.pop("staleness", torch.zeros(len(current), dtype=torch.int64)),
        ratio=torch.full((len(current),), ratio),
        **{name: tensor(values) for name, values in more.items()},
    )


def value_and_gradient(loss, given, **options):
    output = loss(given, **options)
    output.loss.sum().backward()
    clipped = None if output.clipped is None else output.clipped.numpy()
    return output.loss.detach().numpy(), given.logprob.grad.numpy(), clipped


def test_dppo_is_its_formula():
    # L = -min(w,5) A log π [not masked] + τ (log w)², with w constant: dL/dlogπ = -min(w,5) A [not masked] + 2τ log w
    value, gradient, clipped = value_and_gradient(dppo, inputs())
    log_w = CURRENT - BEHAVIOUR
    moved = np.exp(CURRENT) - np.exp(BEHAVIOUR)
    masked = np.where(ADVANTAGE > 0, moved > 0.2, moved < -0.2)
    kept = np.minimum(np.exp(log_w), 5) * ADVANTAGE * ~masked
    assert value == pytest.approx(-kept * CURRENT + 1e-3 * log_w**2)
    assert gradient == pytest.approx(-kept + 2e-3 * log_w)
    assert (clipped == masked).all()
    assert 20 < masked.sum() < N - 20


def test_dppo_pushes_down_a_bad_token_that_has_grown_beyond_the_cap():
    # μ 0.01 → π 0.15: w = 15 > 5. The gradient on log π is +5 for A = -1, so a step down the gradient lowers it.
    _, gradient, _ = value_and_gradient(dppo, inputs([np.log(0.15)], [np.log(0.01)], [-1.0]), tau=0.0)
    assert gradient == pytest.approx([5.0])


def test_dppo_masked_tokens_have_no_gradient_but_the_pull_to_behaviour():
    given = inputs(np.log([0.9, 0.1]), np.log([0.5, 0.5]), [1.0, -1.0])
    _, gradient, clipped = value_and_gradient(dppo, given, tau=0.0)
    assert clipped.all()
    assert gradient.tolist() == [0.0, 0.0]
    _, gradient, _ = value_and_gradient(dppo, inputs(np.log([0.9, 0.1]), np.log([0.5, 0.5]), [1.0, -1.0]))
    assert np.sign(gradient).tolist() == [1.0, -1.0]  # back towards μ: the grown one down, the shrunk one up


def test_grpo_is_its_formula():
    # L = -min(wA, clip(w, 0.8, 1.2) A); dL/dlogπ = -wA where not clipped, else 0 (dw/dlogπ = w)
    value, gradient, clipped = value_and_gradient(grpo, inputs())
    w = np.exp(CURRENT - BEHAVIOUR)
    flat = np.where(ADVANTAGE > 0, w > 1.2, w < 0.8)
    assert value == pytest.approx(-np.minimum(w * ADVANTAGE, np.clip(w, 0.8, 1.2) * ADVANTAGE))
    assert gradient == pytest.approx(np.where(flat, 0, -w * ADVANTAGE))
    assert (clipped == flat).all()


def test_grpo_penalizes_distance_from_the_reference_with_k3():
    # k3(π_θ‖π_ref) = π_ref/π_θ - 1 - log(π_ref/π_θ); d/dlogπ = 1 - π_ref/π_θ
    value, gradient, _ = value_and_gradient(grpo, inputs(advantage=np.zeros(N), reference=REFERENCE), kl=0.5)
    q = np.exp(REFERENCE - CURRENT)
    assert value == pytest.approx(0.5 * (q - 1 - np.log(q)))
    assert gradient == pytest.approx(0.5 * (1 - q))


def test_decoupled_is_its_formula():
    # L = -min(ρ,5) min(rA, clip(r, 0.8, 1.28) A), ρ = π_p/μ constant, r = π_θ/π_p
    value, gradient, clipped = value_and_gradient(decoupled, inputs(proximal=PROXIMAL))
    rho, r = np.minimum(np.exp(PROXIMAL - BEHAVIOUR), 5), np.exp(CURRENT - PROXIMAL)
    flat = np.where(ADVANTAGE > 0, r > 1.28, r < 0.8)
    assert value == pytest.approx(-rho * np.minimum(r * ADVANTAGE, np.clip(r, 0.8, 1.28) * ADVANTAGE))
    assert gradient == pytest.approx(np.where(flat, 0, -rho * r * ADVANTAGE))
    assert (clipped == flat).all()


def test_decoupled_log_linear_stands_between_behaviour_and_current():
    # log π_p = (1-α) log μ + α log π_θ with α = s/(s+1) and π_θ held constant there, so r = (π_θ/μ)^(1/(s+1))
    given = inputs(staleness=torch.tensor(STALENESS))
    value, gradient, _ = value_and_gradient(decoupled, given, proximal="log-linear")
    log_w = CURRENT - BEHAVIOUR
    rho, r = np.minimum(np.exp(log_w * STALENESS / (STALENESS + 1)), 5), np.exp(log_w / (STALENESS + 1))
    flat = np.where(ADVANTAGE > 0, r > 1.28, r < 0.8)
    assert value == pytest.approx(-rho * np.minimum(r * ADVANTAGE, np.clip(r, 0.8, 1.28) * ADVANTAGE))
    assert gradient == pytest.approx(np.where(flat, 0, -rho * r * ADVANTAGE))


def test_tis_is_its_formula():
    value, gradient, clipped = value_and_gradient(tis, inputs())
    w = np.exp(CURRENT - BEHAVIOUR)
    assert value == pytest.approx(-np.minimum(w, 2) * ADVANTAGE * CURRENT)
    assert gradient == pytest.approx(-np.minimum(w, 2) * ADVANTAGE)
    assert (clipped == (w > 2)).all()


def test_sft_is_the_negative_logprob_and_never_looks_at_behaviour():
    value, gradient, clipped = value_and_gradient(sft, inputs(behaviour=np.full(N, np.nan), ratio=False))
    assert value == pytest.approx(-CURRENT)
    assert gradient == pytest.approx(-np.ones(N))
    assert clipped is None


@pytest.mark.parametrize("loss", [dppo, grpo, decoupled, tis])
def test_on_policy_every_loss_with_ratios_is_the_plain_policy_gradient(loss):
    # At π_θ = π_p = μ all weights are 1, nothing is clipped, and the gradient on log π is -A.
    given = inputs(CURRENT, CURRENT, proximal=CURRENT)
    _, gradient, clipped = value_and_gradient(loss, given)
    assert gradient == pytest.approx(-ADVANTAGE)
    assert loss is tis or not clipped.any()


@pytest.mark.parametrize("loss", [dppo, grpo, decoupled, tis])
def test_tokens_without_a_ratio_never_meet_an_importance_weight(loss):
    with pytest.raises(ValueError, match="200 tokens with ratio=False"):
        loss(inputs(ratio=False, proximal=PROXIMAL))


def test_lanes_with_weights_are_the_mix_loss():
    # (1-m)·mean over usual tokens + m·mean over expert tokens, each by its own count, cut anywhere
    rl = open_objective(LaneConfig(loss="tis", weight=0.9))
    supervised = open_objective(LaneConfig(loss="sft", weight=0.1))
    ones = torch.ones(N, dtype=torch.float64)
    whole, _ = lane_loss(rl, inputs(), ones, N)
    expert, _ = lane_loss(supervised, inputs(ratio=False), ones, N)
    whole, expert = whole.detach(), expert.detach()
    w = np.exp(CURRENT - BEHAVIOUR)
    expected = 0.9 * np.mean(-np.minimum(w, 2) * ADVANTAGE * CURRENT) + 0.1 * np.mean(-CURRENT)
    assert float(whole + expert) == pytest.approx(expected)
    halves = [
        lane_loss(rl, inputs(CURRENT[cut], BEHAVIOUR[cut], ADVANTAGE[cut]), ones[cut], N)[0].detach()
        for cut in (slice(0, 70), slice(70, N))
    ]
    assert float(sum(halves)) == pytest.approx(float(whole))
    doubled, _ = lane_loss(rl, inputs(), 2 * ones, N)
    assert float(doubled.detach()) == pytest.approx(2 * float(whole))


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        (LaneConfig(loss="pppo"), 'got "pppo", expected one of '),
        (LaneConfig(loss="dppo", options={"dleta": 0.1}), 'did you mean "delta"'),
        (LaneConfig(loss="decoupled", options={"minibatches": 1}), "minibatches: got 1, expected 2 or more"),
        (LaneConfig(loss="decoupled", options={"proximal": "none"}), "proximal"),
    ],
)
def test_a_mistaken_lane_is_a_config_error_that_says_where(lane, message):
    with pytest.raises(ConfigError, match=message):
        open_objective(lane)


def test_the_settings_name_every_loss_that_is_built_in() -> None:
    built_in = {name for name, loss in vars(losses).items() if getattr(loss, "__module__", "") == losses.__name__}
    assert built_in - {"second_moment_bound"} == {*LOSSES}


PROMPT = (1, 20, 21)


def side(answer: list[int], kind: str, *, group: str = "p.0", episode: int = 0, prompt=PROMPT) -> TrainItem:
    stop = len(prompt) + len(answer)
    return make_item(
        [*prompt, *answer],
        [Span(len(prompt), stop, -1, 1.0, False)],
        group=group,
        episode=episode,
        lane="human",
        logprobs=np.zeros(len(answer)),
        kind=kind,
    )


def pair(chosen: list[int], rejected: list[int], group: str = "p.0") -> list[TrainItem]:
    return [side(rejected, REJECTED, group=group, episode=1), side(chosen, CHOSEN, group=group, episode=0)]


def block_of(items: list[TrainItem]) -> Block:
    return Block(tuple(item.experience for item in items))


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        (pair([30, 2], [31, 2]), ""),
        (pair([30, 2], [30, 2]), "pair with equal sides"),
        (pair([30, 2], [31, 2])[:1], "half a pair"),
        ([*pair([30], [31]), side([32], CHOSEN, episode=2)], "half a pair"),
        ([side([30], CHOSEN), side([31], "answer", episode=1)], "half a pair"),
        ([side([30], CHOSEN), side([31], REJECTED, episode=1, prompt=(1, 20, 22))], "pair with different prompts"),
        ([side([30], ""), side([31], "", episode=1)], ""),
    ],
)
def test_a_pair_is_two_answers_to_one_prompt_that_differ(items, fault):
    assert pair_fault([item.experience for item in items]) == fault


def test_the_buffer_keeps_whole_pairs_and_says_why_it_refuses_others():
    intake = Intake(Buffer({"human": 1}), buffer_next=0, progress_next=0)
    good, equal = block_of(pair([30, 2], [31, 2], "good.0")), block_of(pair([30, 2], [30, 2], "equal.0"))
    assert intake.take_block(message(good, 0), good) == ""
    assert intake.take_block(message(equal, 1), equal) == "pair with equal sides"
    (held,) = intake.buffer.candidates("human")
    assert held.is_pair and held.num_experiences == 2
    assert unfit([held], ratio=False, pairs=True) == []
    intake.take_block(message(block("late.0", lane="human"), 2), block("late.0", lane="human"))
    assert [reason for _, reason in unfit(intake.buffer.candidates("human"), ratio=False, pairs=True)] == ["not a pair"]


def test_sides_of_a_pair_share_a_row_however_little_fits():
    items = [each for p in range(5) for each in pair([30 + p, *[40] * (3 * p)], [60 + p, 2, 2, 2], f"p-{p}.0")]
    whole = pack(items, max_tokens=10_000)
    assert whole.lane_sequences == {"human": 10}
    for batch in (pack(items, max_tokens=5), *split(pack(items, max_tokens=12), 3, seed=1)):
        for rows in batch.microbatches:
            marks = {int(mark) for mark in rows.pair_N}
            assert all(mark ^ 1 in marks for mark in marks)


def opened(model: str, **lane) -> TorchLearner:
    lanes = {"human": LaneConfig(loss="dpo", **lane)}
    return TorchLearner(model, TrainerConfig(lanes=lanes, threads=1), device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))


def test_learning_from_pairs_widens_the_margin_and_any_cut_gives_one_step(model):
    items = [each for p in range(6) for each in pair([30 + p, 2], [60 + p, 2, 2], f"p-{p}.0")]
    learners = [opened(model), opened(model)]
    first = [
        learner.step(pack(items, max_tokens=size), learning_rate=1e-3, seed=0)
        for learner, size in zip(learners, (10_000, 6), strict=True)
    ]
    assert first[0].loss == pytest.approx(np.log(2)), "before the first step every margin is 0"
    assert first[1].loss == pytest.approx(first[0].loss) and first[1].grad_norm == pytest.approx(first[0].grad_norm)
    for step in range(1, 8):
        stats = learners[0].step(pack(items, max_tokens=10_000), learning_rate=1e-3, seed=step)
    assert stats.loss < 0.5


def test_a_lane_that_compares_takes_nothing_but_pairs(model):
    lone = [side([30], ""), *pair([31], [32], "q.0")]
    with pytest.raises(ValueError, match="outside any pair"):
        opened(model).step(pack(lone, max_tokens=100), learning_rate=1e-3, seed=0)
    assert [pair_side(each.experience) for each in pair([1], [2])] == [REJECTED, CHOSEN]
