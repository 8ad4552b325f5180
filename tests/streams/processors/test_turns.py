"""Turn-level advantages: GRPO with process supervision, from scores given turn by turn to the tokens a trainer sees."""

import math
from typing import Any

import numpy as np
import pytest

from infra.chain.processor import Drop, Memory
from schemas import BatchItem, Block, Experience, Score, Span, Stretch, decode, encode
from streams.config import AdvantageConfig
from streams.processors.difficulty import difficulty
from streams.processors.synthesize import demonstration_of
from tests.streams.processors.by_default import advantage
from tests.streams.processors.test_collect_processors import answer
from trainer.batch.batch import TrainItem, pack

NAME = "environment"


def episode(number: int, *turns: tuple[int, float], reward: float | None = None, **header: Any) -> Experience:
    """Eight tokens, of which 2, 3 and 5, 6, 7 were sampled; turns: (token, reward)."""
    given = sum(value for _, value in turns) if reward is None else reward
    one = answer(
        number, group_size=2, reward=given, scores=tuple(Score(NAME, value, at=at) for at, value in turns), **header
    )
    spans = (Span(2, 4, 3), Span(5, 8, 3))
    return one.with_bulk(tokens=range(1, 9), logprobs=[-0.1] * 5, spans=spans)


def judged(*group: Experience, **options: Any) -> tuple[Experience, ...]:
    return advantage(group, memory=Memory(8), turns=NAME, **options)


def per_token(one: Experience, **item: Any) -> list[float]:
    settled = BatchItem(id=one.id, partition=0, offset=0, index=0, lane="usual", **item)
    (batch,) = pack([TrainItem(experience=one, item=settled)], max_tokens=64).microbatches
    return [float(value) for value in batch.advantage_N]


def test_a_token_is_credited_with_the_normalized_rewards_of_the_turns_behind_it() -> None:
    # Turn rewards 1, 0, 0, 0: mean 1/4, std sqrt(3)/4.
    first, second = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 0.0)), epsilon=1e-9)
    std = math.sqrt(3) / 4
    good, bad = 0.75 / std, -0.25 / std
    assert [one.stop for one in first.advantages] == [4, 8]
    assert [one.advantage for one in first.advantages] == pytest.approx([good + bad, bad])
    assert [one.advantage for one in second.advantages] == pytest.approx([2 * bad, bad])
    assert first.advantage == pytest.approx((2 * (good + bad) + 3 * bad) / 5), "the mean over its sampled tokens"


def test_without_the_division_it_is_less_the_mean_alone() -> None:
    first, _ = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 0.0)), kind="mean")
    assert first.advantages == (Stretch(4, 0.5), Stretch(8, -0.25))


def test_what_comes_in_a_later_part_is_credited_to_the_parts_before_it() -> None:
    early, late = episode(0, (3, 0.0), last=False, reward=1.0), episode(0, (7, 1.0), part=1, reward=1.0)
    other = episode(1, (3, 0.0), (7, 0.0))
    early, late, _ = judged(early, late, other, kind="mean")
    assert early.advantages == (Stretch(4, 0.5), Stretch(8, 0.75))
    assert late.advantages == (Stretch(8, 0.75),)


def test_a_group_of_equal_rewards_whose_turns_differ_is_kept() -> None:
    one, two = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 1.0)))
    assert difficulty((one, two)) == (one, two)
    same = judged(episode(0, (3, 1.0), (7, 1.0)), episode(1, (3, 1.0), (7, 1.0)))
    assert all(isinstance(member, Drop) for member in difficulty(same))


def test_an_episode_without_turns_keeps_the_advantage_of_its_whole() -> None:
    one, two = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, reward=0.0))
    assert one.advantages and not two.advantages and two.advantage == pytest.approx(-1, abs=1e-3)


def test_the_trainer_sees_each_token_with_the_advantage_of_its_turn() -> None:
    one, _ = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 0.0)), kind="mean")
    again = decode(encode(Block((one,))))
    assert isinstance(again, Block)
    assert per_token(again.experiences[0], advantage=one.advantage) == pytest.approx([0.5] * 2 + [-0.25] * 3)


def test_what_a_batch_step_adds_is_added_to_every_token() -> None:
    one, _ = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 0.0)), kind="mean")
    assert one.advantage is not None
    assert per_token(one, advantage=one.advantage + 1.0) == pytest.approx([1.5] * 2 + [0.75] * 3)


def test_an_experience_without_turns_has_one_advantage() -> None:
    assert np.unique(per_token(episode(0, (3, 1.0)), advantage=0.25)).tolist() == [0.25]


def test_what_is_made_of_an_experience_takes_no_advantages_along() -> None:
    one, _ = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 0.0)))
    assert demonstration_of(one).advantages == ()


def test_turns_and_leave_one_out_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="leave_one_out"):
        AdvantageConfig(kind="leave_one_out", turns=NAME)
