"""The critic: advantages against their definition, value clipping, learning, and what its checkpoint brings back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_samples import make_item, tiny_model

from schemas import Span
from schemas.errors import ConfigError
from trainer.batch.batch import TrainItem, pack
from trainer.config import CriticConfig, LaneConfig, TrainerConfig
from trainer.learners.critic import advantages, estimate, gae, value_loss
from trainer.learners.orders import Rows
from trainer.learners.torch import TorchLearner


def by_definition(reward, value, bootstrap, gamma, gae_lambda):
    """Σ_k (γλ)^k δ_{t+k} of one sequence, every sum written out."""
    num = len(reward)
    after = [*value[1:], bootstrap]
    delta = [reward[t] + gamma * after[t] - value[t] for t in range(num)]
    return [sum((gamma * gae_lambda) ** k * delta[t + k] for k in range(num - t)) for t in range(num)]


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    gae_lambda=st.sampled_from([1.0, 0.95, 0.0]),
    seed=st.integers(0, 99),
)
def test_advantages_are_their_definition_in_every_sequence_by_itself(lengths, gamma, gae_lambda, seed):
    random = np.random.default_rng(seed)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    reward, value, bootstrap = random.normal(size=(3, len(sequence)))
    got = gae(reward, value, bootstrap, sequence, gamma=gamma, gae_lambda=gae_lambda)
    for s in range(len(lengths)):
        of = sequence == s
        expected = by_definition(reward[of], value[of], bootstrap[of][-1], gamma, gae_lambda)
        assert got[of] == pytest.approx(expected)


def test_the_value_loss_is_flat_only_where_a_clipped_value_has_gone_past_its_target():
    # ½ max((V-R)², (V_old + clip(V - V_old, ±0.2) - R)²): V 0.9, old 0.5, R 1 gives ½·0.3²; R 0 gives ½·0.9²
    value = torch.tensor([0.9, 0.9, 0.6], dtype=torch.float64, requires_grad=True)
    loss = value_loss(value, torch.full((3,), 0.5), torch.tensor([1.0, 0.0, 1.0]), 0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.5 * 0.3**2, 0.5 * 0.9**2, 0.5 * 0.4**2])
    assert value.grad.tolist() == pytest.approx([0.0, 0.9, -0.4])
    assert value_loss(value, torch.full((3,), 0.5), torch.ones(3), 0.0)[0].item() == pytest.approx(0.005)


HALF = 0.5


def ending(lengths: list[int], end: str, first: int = 0, **header) -> list[TrainItem]:
    """Answers of so many tokens that end so, with reward 0.5; what state a token is chosen in is told by its place."""
    return [
        make_item(
            [1, *range(20, 20 + num)], [Span(1, 1 + num, 0)], group=f"t-{first + i}.0", reward=HALF, end=end, **header
        )
        for i, num in enumerate(lengths)
    ]


def fixed_point(items: list[TrainItem], config: CriticConfig) -> np.ndarray:
    """Values by position, each set to the mean of what its tokens are pulled to, until they stay."""
    bootstrap = config.truncated == "bootstrap"
    parts = pack(items, max_tokens=1000, bootstrap=bootstrap).microbatches
    table = np.zeros(max(int(each.positions_BT.max()) for each in parts) + 1)
    for _ in range(4000):
        pulls = np.zeros((2, len(table)))
        for each in parts:
            position_BT = each.positions_BT.reshape(-1)
            value, advantage = advantages(each, table[position_BT], np.ones(len(each.target_N), bool), config)
            np.add.at(pulls, (0, position_BT[each.predecessor_N]), value + advantage)
            np.add.at(pulls, (1, position_BT[each.predecessor_N]), 1)
        moved = np.where(pulls[1] > 0, pulls[0] / np.maximum(pulls[1], 1), table)
        if np.abs(moved - table).max() < 1e-12:
            break
        table = moved
    return table[pulls[1] > 0]


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.0])
@pytest.mark.parametrize(
    ("truncated", "ends"),
    # Where all is truncated and bootstrapped, nothing says what a state is worth, as the setting says.
    [
        ("reward", "terminal"),
        ("reward", "truncated"),
        ("reward", "both"),
        ("bootstrap", "terminal"),
        ("bootstrap", "both"),
    ],
)
def test_what_gives_a_half_every_time_is_worth_a_half_however_it_ends(ends, truncated, gae_lambda):
    items = ending([6, 4, 6], "terminal") if ends != "truncated" else []
    if ends != "terminal":
        items += ending([3, 5, 2], "truncated", first=3)
    values = fixed_point(items, CriticConfig(truncated=truncated, gae_lambda=gae_lambda))
    assert values == pytest.approx(np.full(len(values), HALF), abs=1e-6)


def test_of_a_truncated_episode_only_the_last_part_is_bootstrapped_and_no_end_counts_twice():
    items = [
        *ending([3], "truncated", part=0, last=False),
        *ending([3], "truncated", first=1, part=1, last=True),
        *ending([3], "terminal", first=2),
    ]
    for bootstrap in (False, True):
        (rows,) = pack(items, max_tokens=1000, bootstrap=bootstrap).microbatches
        rewards = [rows.reward_N[rows.sequence_N == s].sum() for s in range(3)]
        valued = [bool((rows.bootstrap_N[rows.sequence_N == s] >= 0).any()) for s in range(3)]
        assert valued == [False, bootstrap, False]
        assert rewards == [HALF, 0.0 if bootstrap else HALF, HALF]


def opened(model: str, minibatches: int = 1, critic: CriticConfig | None = None) -> TorchLearner:
    critic = critic or CriticConfig(learning_rate=2e-3, normalize=False)
    lanes = {"usual": LaneConfig(loss="ppo", options={"minibatches": minibatches})}
    return TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, critic=critic), device="cpu")


def coins(seed: int = 0, num: int = 24) -> list[TrainItem]:
    """Prompts that decide the reward, whatever is answered: 10 wins, 11 loses."""
    random = np.random.default_rng(seed)
    return [
        make_item(
            [1, 10 + i % 2, *random.integers(20, 30, 3)],
            [Span(2, 5, 0)],
            group=f"coin-{i}.0",
            logprobs=np.full(3, -np.log(128)),
            reward=1.0 - i % 2,
        )
        for i in range(num)
    ]


@pytest.mark.slow
def test_values_learn_what_the_prompt_says_about_the_reward(model):
    learner = opened(model)
    first = learner.step(pack(coins(), max_tokens=1000), learning_rate=1e-9, seed=0).values
    for step in range(1, 40):
        stats = learner.step(pack(coins(step), max_tokens=1000), learning_rate=1e-9, seed=step)
    # V = 0, so targets are (λ², λ, 1)·R with λ 0.95, and R = 1 half of the time: ½·½·(λ⁴ + λ² + 1)/3
    assert first["critic/value_loss"] == pytest.approx(0.25 * (0.95**4 + 0.95**2 + 1) / 3)
    assert stats.values["critic/value_loss"] < 0.02
    assert stats.values["critic/explained_variance"] > 0.8


def test_observations_between_turns_do_not_decay(model):
    critic = opened(model).critic
    assert critic is not None
    found = []
    for tokens, spans in (
        ([1, 10, 20, 21], [Span(2, 4, 0)]),
        ([1, 10, 20, 40, 41, 42, 21], [Span(2, 3, 0), Span(6, 7, 0)]),
    ):
        span = make_item(tokens, spans, logprobs=[-1, -1], reward=1.0)
        part = pack([span], max_tokens=100).microbatches[0]
        found.append(estimate(critic, [Rows((part,), 1, None)], [[np.ones(2, bool)]])[0][0][0].advantage)
    # V = 0 at the start: A = (γλ·1, 1), however many tokens were only seen in between
    assert found[0] == pytest.approx([0.95, 1.0]) and found[1] == pytest.approx([0.95, 1.0])


@pytest.mark.parametrize("minibatches", [3, 1])
def test_a_checkpoint_brings_the_critic_back_to_the_same_bits(model, minibatches):
    learner, other = opened(model, minibatches), opened(model, minibatches)
    learner.step(pack(coins(0), max_tokens=40), learning_rate=1e-3, seed=0)
    other.restore(learner.save())
    for each in (learner, other):
        each.step(pack(coins(1), max_tokens=40), learning_rate=1e-3, seed=1)
    saved, again = learner.save(), other.save()
    assert {name for name in saved if name.startswith("critic/head")} == {"critic/head.weight", "critic/head.bias"}
    assert all(bytes(saved[name].data) == bytes(again[name].data) for name in saved) and saved.keys() == again.keys()
    with pytest.raises(ValueError, match="critic/"):
        TorchLearner(model, TrainerConfig(threads=1), device="cpu").restore(saved)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_step_whose_values_are_not_finite_changes_nothing(model, minibatches):
    learner = opened(model, minibatches)
    learner.step(pack(coins(0), max_tokens=40), learning_rate=1e-3, seed=0)
    before = learner.save()
    poisoned = coins(1)
    poisoned[9] = make_item(
        poisoned[9].experience.tokens, [Span(2, 5, 0)], group="coin-9.0", logprobs=np.full(3, -4.0), reward=3e38
    )
    assert not learner.step(pack(poisoned, max_tokens=40), learning_rate=1e-3, seed=1).finite
    after = learner.save()
    assert all(bytes(before[name].data) == bytes(after[name].data) for name in before)


@pytest.mark.parametrize("is_tied", [False, True])
def test_after_a_warm_up_the_critic_begins_as_the_warmed_up_policy_and_comes_back_so(model, tmp_path, is_tied):
    model = tiny_model(tmp_path, "qwen3", tie_word_embeddings=True) if is_tied else model
    lanes = {"usual": LaneConfig(loss="ppo"), "expert": LaneConfig(loss="sft", weight=0.1)}
    learner = TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, critic=CriticConfig()), device="cpu")
    shown = make_item([1, 40, 41], [Span(2, 3, -1, 1.0, False)], group="d.0", lane="expert")
    learner.begin_phase("warmup")
    learner.step(pack([shown], max_tokens=9), learning_rate=1e-2, seed=0)
    learner.begin_phase("train")
    saved = learner.save()
    names = [name[7:] for name in saved if name.startswith("critic/") and "head" not in name]
    assert names and all(bytes(saved[f"critic/{name}"].data) == bytes(saved[f"model/{name}"].data) for name in names)
    other = TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, critic=CriticConfig()), device="cpu")
    began = other.save()
    assert any(bytes(began[f"critic/{name}"].data) != bytes(saved[f"critic/{name}"].data) for name in names)
    other.restore(saved)
    (rows,) = pack([shown], max_tokens=9).microbatches
    states = [each.critic._model.packed.states(rows) for each in (learner, other)]
    assert torch.equal(*states)


def test_a_critic_and_a_loss_that_wants_it_come_together(model):
    lanes = {"usual": LaneConfig(loss="ppo")}
    with pytest.raises(ConfigError, match=r"trainer\.critic: missing"):
        TorchLearner(model, TrainerConfig(lanes=lanes, threads=1), device="cpu")
    with pytest.raises(ConfigError, match=r"trainer\.critic: got a critic"):
        TorchLearner(model, TrainerConfig(threads=1, critic=CriticConfig()), device="cpu")
    with pytest.raises(ValueError, match="without a reward"):
        opened(model).step(pack([make_item([1, 2], [Span(1, 2, 0)])], max_tokens=9), learning_rate=1e-3, seed=0)
