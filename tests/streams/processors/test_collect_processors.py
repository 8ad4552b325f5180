"""Built-in processors of stage collect, on whole groups."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from infra.chain.processor import Drop, Memory
from schemas import BatchItem, Block, Experience, Message, Score, Span, Stretch, decode, encode, ids, make_experience
from schemas.errors import ConfigError
from streams.processors.advantage import group_normalized, leave_one_out, less_the_mean
from streams.processors.difficulty import difficulty
from streams.processors.prioritize import prioritize
from streams.processors.reward import blended
from streams.scores.overlong import Overlong
from tests.streams.processors.by_default import advantage, reward, synthesize
from trainer.batch.batch import TrainItem, pack


def answer(episode: int = 0, *, part: int = 0, group: str = "t.0", group_size: int = 4, **header: Any) -> Experience:
    return make_experience(
        tokens=[1, 2, 7, 8, 9],
        logprobs=[-0.1, -0.2, -0.3],
        messages=[Message(role="user", content="?"), Message(role="assistant", content=f"{episode}")],
        id=ids.experience_id(group, 0, episode, part),
        group=group,
        episode=episode,
        part=part,
        group_size=group_size,
        spans=(Span(2, 5, 3),),
        **header,
    )


def rewarded(rewards: Sequence[float], **header: Any) -> tuple[Experience, ...]:
    return tuple(
        answer(episode, reward=value, group_size=len(rewards), **header) for episode, value in enumerate(rewards)
    )


def advantages(group: Sequence[Experience], **options: Any) -> list[float | None]:
    return [member.advantage for member in advantage(tuple(group), memory=Memory(8), **options)]


@pytest.mark.parametrize(
    ("scores", "weights", "expected"),
    [
        ({"csat": 0.8, "judge": 0.2}, {"csat": 1.0, "judge": 0.3}, (0.8 + 0.06) / 1.3),
        ({"judge": 0.2}, {"csat": 1.0, "judge": 0.3}, 0.2),
        ({"csat": 0.8, "other": 0.0}, {"csat": 1.0, "judge": 0.3}, 0.8),
        ({"csat": 0.0}, {"csat": 1.0}, 0.0),
    ],
)
def test_absent_scores_give_their_weight_to_the_others(
    scores: dict[str, float], weights: dict[str, float], expected: float
) -> None:
    assert blended(scores, weights) == pytest.approx(expected)


def test_no_feedback_differs_from_a_reward_of_zero() -> None:
    assert blended({"judge": 0.2}, {"csat": 1.0}) == Drop("unlabelled", "no score of csat")
    assert blended({"judge": 0.2}, {"judge": 1.0}, require=["csat"]) == Drop("unlabelled", "no score csat")
    assert blended({}, {}) == Drop("unlabelled", "no score of any name")


def test_without_a_blend_every_score_counts_alike() -> None:
    (member,) = reward((answer(scores=(Score("a", 1.0), Score("b", 0.5), Score("token", 9.0, at=2))),))
    assert isinstance(member, Experience)
    assert member.reward == 0.75


def test_all_parts_of_an_episode_share_its_reward_and_advantage() -> None:
    group = (
        answer(0, part=0, last=False),
        answer(0, part=1, scores=(Score("exact", 1.0),)),
        answer(1, scores=(Score("exact", 0.0),)),
    )
    result = reward(group, blend={"exact": 1.0})
    members = [member for member in result if isinstance(member, Experience)]
    assert [member.reward for member in members] == [1.0, 1.0, 0.0]
    # Two episodes, mean 0.5, std 0.5: the long episode does not count twice.
    assert advantages(members, epsilon=1e-9) == pytest.approx([1.0, 1.0, -1.0])


def turns(*values: float, name: str = "environment") -> tuple[Score, ...]:
    return tuple(Score(name, value, at=2 + index) for index, value in enumerate(values))


def test_rewards_given_turn_by_turn_count_as_their_discounted_sum_over_all_parts() -> None:
    group = (
        answer(0, part=0, last=False, scores=turns(0.1, 0.2)),
        answer(0, part=1, scores=turns(1.0)),
        answer(1, scores=tuple(reversed(turns(0.5, 0.5)))),
    )
    for discount, expected in ((1.0, [1.3, 1.3, 1.0]), (0.5, [0.45, 0.45, 0.75]), (0.0, [0.1, 0.1, 0.5])):
        result = reward(group, blend={"environment": 1.0}, discount=discount)
        rewards = [member.reward for member in result if isinstance(member, Experience)]
        assert rewards == pytest.approx(expected)  # 0.1 + γ·0.2 + γ²·1, and 0.5 + γ·0.5


def test_an_episode_counted_by_turns_is_dropped_where_a_part_is_missing() -> None:
    whole, broken = answer(0, scores=turns(1.0)), answer(1, part=1, scores=turns(1.0))
    unfinished = answer(2, part=0, last=False, scores=turns(1.0))
    kept, *dropped = reward((whole, broken, unfinished), blend={"environment": 1.0})
    assert isinstance(kept, Experience) and kept.reward == 1.0
    assert [item.reason for item in dropped if isinstance(item, Drop)] == ["incomplete episode"] * 2
    # What is judged as a whole does not need them.
    (member,) = reward((answer(1, part=1, scores=(*turns(0.5), Score("exact", 1.0))),), blend={"exact": 1.0})
    assert isinstance(member, Experience) and member.reward == 1.0


def test_an_unlabelled_episode_is_dropped_whole_and_demonstrations_pass() -> None:
    expert = answer(2, lane="expert")
    result = reward((answer(0, scores=(Score("exact", 1.0),)), answer(1), expert), blend={"exact": 1.0})
    assert [type(member).__name__ for member in result] == ["Experience", "Drop", "Experience"]
    assert result[2] is expert


def test_group_advantage_is_reward_minus_mean_over_std() -> None:
    # Rewards 1, 0, 0, 1: mean 1/2, std 1/2.
    assert advantages(rewarded([1, 0, 0, 1])) == pytest.approx(
        [0.5 / 0.5001, -0.5 / 0.5001] * 1 + [-0.5 / 0.5001, 0.5 / 0.5001]
    )
    # Rewards 1, 0, 0, 0: mean 1/4, std sqrt(3)/4.
    std = math.sqrt(3) / 4
    assert group_normalized([1, 0, 0, 0], 1e-4) == pytest.approx([0.75 / (std + 1e-4)] + [-0.25 / (std + 1e-4)] * 3)


def test_equal_rewards_have_no_advantage_and_no_division_by_zero() -> None:
    assert advantages(rewarded([1, 1])) == [0.0, 0.0]
    assert group_normalized([], 1e-4) == []


def test_leave_one_out_compares_with_the_others() -> None:
    # 1 against (0 + 0.5)/2, 0 against (1 + 0.5)/2, 0.5 against (1 + 0)/2.
    assert leave_one_out([1, 0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])
    assert leave_one_out([1]) == [0.0]
    assert advantages(rewarded([1, 0]), kind="leave_one_out") == [1.0, -1.0]


def test_the_mean_alone_is_taken_off_where_nothing_is_divided() -> None:
    assert less_the_mean([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]
    assert less_the_mean([]) == [] and advantages(rewarded([1, 0, 0, 0]), kind="mean") == [0.75, -0.25, -0.25, -0.25]


def test_the_only_rated_choice_of_production_is_compared_as_a_lone_answer_and_kept() -> None:
    memory, rated = Memory(64), answer(0, lane="live", reward=1.0)
    for number in range(8):
        advantage((answer(group_size=1, group=f"g{number}.0", lane="live", reward=0.0),), memory=memory)
    (first, second) = advantage((rated, answer(1, lane="live")), memory=memory)
    assert first.advantage is not None and first.advantage > 0 and second.advantage is None
    assert difficulty((rated, answer(1, lane="live"))) == (rated, answer(1, lane="live"))
    both = (rated, answer(1, lane="live", reward=1.0))
    assert all(isinstance(member, Drop) for member in difficulty(both))


def test_members_without_a_reward_and_demonstrations_keep_none() -> None:
    group = (*rewarded([1, 0]), answer(2), answer(3, lane="expert", reward=1.0))
    assert advantages(group)[2:] == [None, None]


def test_a_group_of_equal_rewards_is_dropped_with_the_reason() -> None:
    result = difficulty(rewarded([1, 1, 1]))
    assert [member.reason for member in result if isinstance(member, Drop)] == ["all rewards equal"] * 3


def test_difference_and_lone_answers_pass_the_difficulty_filter() -> None:
    assert difficulty(rewarded([1, 0, 1])) == rewarded([1, 0, 1])
    assert difficulty(rewarded([1])) == rewarded([1])
    assert all(isinstance(member, Drop) for member in difficulty((answer(0, reward=1.0),)))  # one left of four
    expert = answer(3, lane="expert", reward=0.0)
    assert difficulty((*rewarded([1, 1]), expert))[2] is expert


def test_priority_grows_with_the_spread_of_the_group() -> None:
    assert prioritize(rewarded([1, 0]))[0].priority == 1.0
    assert prioritize(rewarded([1, 0, 0, 0]))[0].priority == pytest.approx(math.sqrt(3) / 2)
    assert prioritize(rewarded([1, 1]))[0].priority == 0.1
    lone = answer(group_size=1, reward=1.0, advantage=-0.4)
    assert prioritize((lone,))[0].priority == 0.4


def test_the_best_episode_becomes_a_demonstration_with_the_same_id_each_time() -> None:
    group = rewarded([0.0, 1.0, 1.0], sequence=7, subject="ada", tenant="acme", key_id="k1", meta={"answer": "1"})
    *members, made = synthesize(group)
    assert tuple(members) == group
    assert (made.lane, made.group_size, made.sequence, made.advantage) == ("expert", 1, -1, None)
    assert (made.kind, made.parent, made.meta) == ("demonstration", group[1].id, {"answer": "1"})
    assert (made.subject, made.tenant, made.key_id) == ("ada", "acme", "k1")
    assert made.spans == (Span(2, 5, -1, ratio=False),)
    assert made.logprobs.tolist() == [0.0, 0.0, 0.0]
    assert made.tokens.tolist() == group[1].tokens.tolist()
    assert ids.group_of(made.id) == made.group != group[0].group
    assert synthesize(tuple(reversed(group)))[-1].id == made.id
    assert decode(encode(Block((made,)))) == Block((made,))


def test_nothing_is_synthesized_from_weak_lone_cut_or_long_episodes() -> None:
    assert len(synthesize(rewarded([0.0, 0.9]))) == 2
    assert len(synthesize(rewarded([0.0, 0.9]), min_reward=0.5)) == 3
    assert len(synthesize(rewarded([1.0]))) == 1
    cut = (answer(0, reward=1.0, end="truncated"), answer(1, reward=0.0))
    assert len(synthesize(cut)) == 2
    long = (answer(0, reward=1.0, last=False), answer(0, part=1, reward=1.0), answer(1, reward=0.0))
    assert len(synthesize(long)) == 3


def test_a_lone_answer_is_divided_by_no_spread_where_the_mean_alone_is_asked_for() -> None:
    def last(kind: str, **options: Any) -> float | None:
        memory = Memory(64)
        for number in range(9):
            member = rewarded([float(number % 2)], group=f"g{number}.0", scores=turns(0.25, 0.75))
            (member,) = advantage(member, memory=memory, kind=kind, **options)  # type: ignore[arg-type]
        return member.advantage

    # Of eight before it, half of them 0, half is trusted: half of 0 - 0.5, and that over the spread of 0.5.
    assert last("mean") == pytest.approx(-0.25) and last("group") == pytest.approx(-0.5)
    assert last("group", turns="environment") == pytest.approx(-0.5), (
        "one answer is not compared turn by turn with itself"
    )


NAME = "environment"


def episode(number: int, *turns: tuple[int, float], reward: float | None = None, **header: Any) -> Experience:
    """Eight tokens, of which 2, 3 and 5, 6, 7 were sampled; turns: (token, reward)."""
    given = sum(value for _, value in turns) if reward is None else reward
    member = answer(
        number, group_size=2, reward=given, scores=tuple(Score(NAME, value, at=at) for at, value in turns), **header
    )
    spans = (Span(2, 4, 3), Span(5, 8, 3))
    return member.with_bulk(tokens=range(1, 9), logprobs=[-0.1] * 5, spans=spans)


def judged(*group: Experience, **options: Any) -> tuple[Experience, ...]:
    return advantage(group, memory=Memory(8), turns=NAME, **options)


def per_token(member: Experience, **item: Any) -> list[float]:
    settled = BatchItem(id=member.id, partition=0, offset=0, index=0, lane="usual", **item)
    (batch,) = pack([TrainItem(experience=member, item=settled)], max_tokens=64).microbatches
    return [float(value) for value in batch.advantage_N]


def test_a_token_is_credited_with_the_normalized_rewards_of_the_turns_behind_it() -> None:
    # Turn rewards 1, 0, 0, 0: mean 1/4, std sqrt(3)/4.
    first, second = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 0.0)), epsilon=1e-9)
    std = math.sqrt(3) / 4
    good, bad = 0.75 / std, -0.25 / std
    assert [stretch.stop for stretch in first.advantages] == [4, 8]
    assert [stretch.advantage for stretch in first.advantages] == pytest.approx([good + bad, bad])
    assert [stretch.advantage for stretch in second.advantages] == pytest.approx([2 * bad, bad])
    assert first.advantage == pytest.approx((2 * (good + bad) + 3 * bad) / 5), "the mean over its sampled tokens"


def test_what_comes_in_a_later_part_is_credited_to_the_parts_before_it() -> None:
    early, late = episode(0, (3, 0.0), last=False, reward=1.0), episode(0, (7, 1.0), part=1, reward=1.0)
    other = episode(1, (3, 0.0), (7, 0.0))
    early, late, _ = judged(early, late, other, kind="mean")
    assert early.advantages == (Stretch(4, 0.5), Stretch(8, 0.75))
    assert late.advantages == (Stretch(8, 0.75),)


def test_a_group_of_equal_rewards_whose_turns_differ_is_kept() -> None:
    member, two = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 1.0)))
    assert difficulty((member, two)) == (member, two)
    same = judged(episode(0, (3, 1.0), (7, 1.0)), episode(1, (3, 1.0), (7, 1.0)))
    assert all(isinstance(member, Drop) for member in difficulty(same))


def test_an_episode_without_turns_keeps_the_advantage_of_its_whole() -> None:
    member, two = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, reward=0.0))
    assert member.advantages and not two.advantages and two.advantage == pytest.approx(-1, abs=1e-3)


def test_the_trainer_sees_each_token_with_the_advantage_of_its_turn() -> None:
    member, _ = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 0.0)), kind="mean")
    again = decode(encode(Block((member,))))
    assert isinstance(again, Block)
    assert per_token(again.experiences[0], advantage=member.advantage) == pytest.approx([0.5] * 2 + [-0.25] * 3)


def test_what_a_batch_step_adds_is_added_to_every_token() -> None:
    member, _ = judged(episode(0, (3, 1.0), (7, 0.0)), episode(1, (3, 0.0), (7, 0.0)), kind="mean")
    assert member.advantage is not None
    assert per_token(member, advantage=member.advantage + 1.0) == pytest.approx([1.5] * 2 + [0.75] * 3)


def long(num_sampled: int, episode: int = 0, right: float | None = None, **header: Any) -> Experience:
    member = answer(episode, scores=() if right is None else (Score("exact", right),), **header)
    tokens, logprobs = [1, 2, *range(num_sampled)], [-0.1] * num_sampled
    return member.with_bulk(tokens=tokens, logprobs=logprobs, spans=(Span(2, 2 + num_sampled, 3),))


def test_overlong_is_dapos_soft_punishment() -> None:
    score = Overlong(max_tokens=100, margin=20)
    found = {number: score(long(number)) for number in (1, 80, 85, 90, 100, 140)}
    assert found == {1: 0.0, 80: 0.0, 85: 0.25, 90: 0.5, 100: 1.0, 140: 1.0}
    with pytest.raises(ConfigError, match="margin = 200"):
        Overlong(max_tokens=100, margin=200)


def test_a_weight_below_0_takes_a_penalty_off_the_mean_of_the_others() -> None:
    weights = {"exact": 1.0, "judge": 3.0, "overlong": -0.5}
    assert blended({"exact": 1.0, "judge": 0.5, "overlong": 1.0}, weights) == pytest.approx((1.0 + 1.5 - 0.5) / 4)
    assert blended({"exact": 1.0, "overlong": 0.5}, weights) == pytest.approx(0.75), "absent weights go to the others"
    assert blended({"exact": 1.0}, weights) == 1.0
    assert isinstance(blended({"overlong": 1.0}, weights), Drop), "a penalty alone is no verdict"
