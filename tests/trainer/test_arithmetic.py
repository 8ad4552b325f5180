"""What a step needs of arithmetic: counted from what is trained, and set beside what the cards could do."""

import math

import numpy as np
import pytest

from infra.model.size import FORWARD_AND_BACKWARD, TokenCost
from infra.observe.metrics import Metrics
from schemas import BatchItem, Span, make_experience
from trainer.batch.batch import TrainItem
from trainer.learners.learner import StepStats
from trainer.loop.report import WITH_FROZEN_WEIGHTS, Arithmetic, TrainerReport, card_memory

COST = TokenCost(position=1000.0, pair=10.0, head=1.0)
PROMPT, SAMPLED = 20, 10


def item(index: int, prompt: int) -> TrainItem:
    """An answer of 10 tokens to a prompt of 20, all of which are `prompt`."""
    experience = make_experience(
        id=f"a.0.0-{index}-0", group="a.0", episode=index, group_size=4,
        tokens=[*[prompt] * PROMPT, *range(SAMPLED)], logprobs=np.zeros(SAMPLED), messages=(),
        spans=(Span(PROMPT, PROMPT + SAMPLED, 0),),
    )  # fmt: skip
    return TrainItem(
        experience, BatchItem(id=experience.id, partition=0, offset=0, index=0, lane="usual", advantage=1.0)
    )


def test_a_prompt_is_needed_once_for_all_its_answers_and_an_answers_last_token_is_no_input() -> None:
    alone = FORWARD_AND_BACKWARD * (29 * 1000 + 29 * 30 / 2 * 10 + 10)
    assert Arithmetic(COST).needed([item(0, 5)]) == alone
    assert Arithmetic(COST).needed([item(0, 5), item(1, 6)]) == 2 * alone
    shared = FORWARD_AND_BACKWARD * ((29 + 9) * 1000 + (29 * 30 / 2 + sum(range(21, 30))) * 10 + 20)
    assert Arithmetic(COST).needed([item(0, 5), item(1, 5)]) == shared
    assert Arithmetic(COST, share=WITH_FROZEN_WEIGHTS).needed([item(0, 5)]) == pytest.approx(alone * 2 / 3)


def test_the_share_of_the_cards_is_told_where_their_peak_is_known_and_no_memory_without_a_card() -> None:
    stats = StepStats(finite=True, loss=math.nan, grad_norm=1.0, values={})
    found = []
    for arithmetic in (None, Arithmetic(COST), Arithmetic(COST, peak=1e6)):
        metrics = Metrics("train")
        TrainerReport(metrics, arithmetic=arithmetic).step(0, [item(0, 5)], stats, 0, 0.5)
        found.append(metrics.snapshot())
    assert "flops" not in found[0] and "mfu" not in found[1]
    needed = Arithmetic(COST).needed([item(0, 5)])
    assert found[1]["flops"] == found[2]["flops"] == needed and found[2]["mfu"] == needed / 0.5 / 1e6
    if card_memory() is None:
        assert "gpu_memory_bytes" not in found[2]
    else:
        assert 0 < found[2]["gpu_memory_bytes"] <= found[2]["gpu_memory_capacity_bytes"]


def test_the_parts_of_a_step_that_a_learner_tells_apart_are_counted() -> None:
    metrics = Metrics("train")
    report = TrainerReport(metrics)
    for update in (0.25, 0.5):
        seconds = {"gradients": 1.0, "update": update}
        stats = StepStats(finite=True, loss=1.0, grad_norm=1.0, values={}, seconds=seconds)
        report.step(0, [item(0, 5)], stats, 0, 1.5)
    counted = metrics.counters()
    assert counted["phase_seconds{phase=gradients}"] == 2.0 and counted["phase_seconds{phase=update}"] == 0.75
