"""Preference pairs: marked in the log, refused unless whole, packed together, and learned from."""

import numpy as np
import pytest
from trainer_samples import make_item

from infra.cli.demo.char_model import build_char_model
from schemas import Block, Span
from schemas.experience import CHOSEN, REJECTED, pair_fault, pair_side
from tests.trainer.buffered_blocks import block, message
from trainer.batch.batch import TrainItem, pack
from trainer.batch.split import split
from trainer.buffer.buffer import Buffer
from trainer.buffer.intake import Intake
from trainer.buffer.pool import unfit
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.torch import TorchLearner

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
    return Block(tuple(one.experience for one in items))


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
    assert pair_fault([one.experience for one in items]) == fault


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
    items = [one for p in range(5) for one in pair([30 + p, *[40] * (3 * p)], [60 + p, 2, 2, 2], f"p-{p}.0")]
    whole = pack(items, max_tokens=10_000)
    assert whole.lane_sequences == {"human": 10}
    for batch in (pack(items, max_tokens=5), *split(pack(items, max_tokens=12), 3, seed=1)):
        for one in batch.microbatches:
            marks = {int(mark) for mark in one.pair_N}
            assert all(mark ^ 1 in marks for mark in marks)


def opened(model: str, **lane) -> TorchLearner:
    lanes = {"human": LaneConfig(loss="dpo", **lane)}
    return TorchLearner(model, TrainerConfig(lanes=lanes, threads=1), device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))


def test_learning_from_pairs_widens_the_margin_and_any_cut_gives_one_step(model):
    items = [one for p in range(6) for one in pair([30 + p, 2], [60 + p, 2, 2], f"p-{p}.0")]
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
    assert [pair_side(one.experience) for one in pair([1], [2])] == [REJECTED, CHOSEN]
