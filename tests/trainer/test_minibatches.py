"""Minibatches keep the mix: what a lane, and each of its tokens, weighs does not depend on the rows it fell into."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_samples import make_item

from infra.cli.demo.char_model import build_char_model
from schemas import Span
from trainer.batch.batch import LANES, PackedBatch, TrainItem, pack
from trainer.batch.split import split
from trainer.config import CriticConfig, LaneConfig, TrainerConfig
from trainer.learners.lanes import microbatch_loss, step_context
from trainer.learners.torch import TorchLearner
from trainer.losses.loss import Objective, open_objectives

SOME = ("usual", "expert", "live")
CONFIGS = {
    "usual": LaneConfig(loss="reinforce", weight=0.7),
    "expert": LaneConfig(loss="sft", weight=0.3),
    "live": LaneConfig(loss="topr", weight=0.2),  # a mean over sequences
}


def items(lanes: list[tuple[int, int, int]]) -> list[TrainItem]:
    """One sequence for each (lane, group, sampled tokens), with advantage 1; a group has one lane."""
    return [
        make_item(
            [1, 3 + group, *range(20, 20 + num)],
            [Span(2, 2 + num, 0)],
            group=f"{SOME[lane]}-{group}.0",
            episode=episode,
            lane=SOME[lane],
            logprobs=np.zeros(num),
        )
        for episode, (lane, group, num) in enumerate(lanes)
    ]


def token_weights(
    objectives: dict[str, Objective], batch: PackedBatch, parts: int, ranks: int
) -> dict[str, list[float]]:
    """What each token's log π weighs in the sum over minibatches and ranks, by lane; π = μ, so ratios are 1."""
    found: dict[str, list[float]] = {}
    dealt = split(batch, parts, seed=3)
    for part in dealt:
        context = step_context(objectives, batch, len(dealt), 0, staleness_decay=1.0, bounds={})
        for rank in split(part, ranks):
            for one in rank.microbatches:
                logprob_N = torch.zeros(len(one.target_N), dtype=torch.float64, requires_grad=True)
                loss, _ = microbatch_loss(context, one, logprob_N)
                loss.backward()
                for lane, slope in zip(one.lane_N, logprob_N.grad.tolist(), strict=True):
                    found.setdefault(LANES[lane], []).append(-slope)
    return {lane: [weight / len(dealt) for weight in weights] for lane, weights in found.items()}


@settings(max_examples=80, deadline=None)
@given(
    lanes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=14),
    max_tokens=st.integers(1, 60),
    parts=st.integers(1, 7),
    ranks=st.integers(1, 3),
)
def test_each_token_weighs_as_in_one_step_whichever_minibatch_and_rank_it_falls_into(lanes, max_tokens, parts, ranks):
    objectives = open_objectives(CONFIGS)
    batch = pack(items(lanes), max_tokens=max_tokens)
    found = token_weights(objectives, batch, parts, ranks)
    for lane, weights in found.items():
        count = batch.lane_sequences[lane] if lane == "live" else batch.lane_tokens[lane]
        assert len(weights) == batch.lane_tokens[lane]
        assert weights == pytest.approx([CONFIGS[lane].weight / count] * len(weights))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    torch.set_num_threads(1)
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))


def mixed() -> list[TrainItem]:
    """Sixteen answers of the usual lane, each a row of its own, and demonstrations that share one row."""
    found = [
        make_item([1, 3 + g, *range(20, 20 + g % 4 + 1)], [Span(2, g % 4 + 3, 0)], group=f"t-{g}.0", advantage=1.0 - g % 3,
                  logprobs=np.full(g % 4 + 1, -np.log(128)), reward=0.5)
        for g in range(16)
    ]  # fmt: skip
    shown = [make_item([1, 40, 41 + g], [Span(2, 3, -1, 1.0, False)], group="d.0", episode=g, lane="expert")
             for g in range(8)]  # fmt: skip
    return found + shown


@pytest.mark.parametrize("minibatches", [3, 1, 2, 5])
def test_the_loss_of_a_step_is_the_same_for_every_number_of_minibatches(model, minibatches):
    lanes = {
        "usual": LaneConfig(loss="ppo", weight=0.9, options={"minibatches": minibatches}),
        "expert": LaneConfig(loss="sft", weight=0.1),
    }
    config = TrainerConfig(lanes=lanes, threads=1, critic=CriticConfig(learning_rate=1e-12))
    stats = TorchLearner(model, config, device="cpu").step(pack(mixed(), max_tokens=12), learning_rate=1e-12, seed=0)
    one = TrainerConfig(
        lanes=lanes | {"usual": LaneConfig(loss="ppo", weight=0.9)}, threads=1, critic=CriticConfig(learning_rate=1e-12)
    )
    whole = TorchLearner(model, one, device="cpu").step(pack(mixed(), max_tokens=12), learning_rate=1e-12, seed=0)
    assert stats.loss == pytest.approx(whole.loss, rel=1e-5)
    assert stats.values["critic/value_loss"] == pytest.approx(whole.values["critic/value_loss"], rel=1e-5)
