"""Penalties for length, and weights below 0 that take them off."""

from typing import Any

import msgspec
import pytest

from infra.chain.processor import Drop
from schemas import Experience, Score, Span
from schemas.errors import ConfigError
from streams.config import RewardConfig, StreamsConfig
from streams.processors.length import length
from streams.processors.reward import blended
from streams.scores.overlong import Overlong
from streams.stages.chain_builder import build_collect
from tests.streams.processors.by_default import reward
from tests.streams.processors.test_collect_processors import answer


def long(num_sampled: int, episode: int = 0, right: float | None = None, **header: Any) -> Experience:
    one = answer(episode, scores=() if right is None else (Score("exact", right),), **header)
    tokens, logprobs = [1, 2, *range(num_sampled)], [-0.1] * num_sampled
    return one.with_bulk(tokens=tokens, logprobs=logprobs, spans=(Span(2, 2 + num_sampled, 3),))


def values(group: tuple[Experience, ...]) -> list[float | None]:
    return [member.score("length") for member in length(group)]


def test_overlong_is_dapos_soft_punishment() -> None:
    score = Overlong(max_tokens=100, margin=20)
    found = {number: score(long(number)) for number in (1, 80, 85, 90, 100, 140)}
    assert found == {1: 0.0, 80: 0.0, 85: 0.25, 90: 0.5, 100: 1.0, 140: 1.0}
    with pytest.raises(ConfigError, match="margin = 200"):
        Overlong(max_tokens=100, margin=200)


def test_length_is_kimis_reward_within_the_group() -> None:
    group = tuple(
        long(tokens, episode, right)
        for episode, (tokens, right) in enumerate([(10, 1.0), (20, 1.0), (30, 1.0), (10, 0.0), (30, 0.0)])
    )
    assert values(group) == [0.5, 0.0, -0.5, 0.0, -0.5], "a short wrong answer gains nothing"
    assert values((long(10, 0, 1.0), long(10, 1, 0.0))) == [0.0, 0.0]


def test_length_counts_all_parts_of_an_episode_and_leaves_demonstrations() -> None:
    shown = answer(2, lane="expert", kind="demonstration")
    group = (long(10, 0, last=False), long(30, 0, 1.0, part=1), long(20, 1, 1.0), shown)
    assert values(group) == [-0.5, -0.5, 0.5, None]


def test_a_weight_below_0_takes_a_penalty_off_the_mean_of_the_others() -> None:
    weights = {"exact": 1.0, "judge": 3.0, "overlong": -0.5}
    assert blended({"exact": 1.0, "judge": 0.5, "overlong": 1.0}, weights) == pytest.approx((1.0 + 1.5 - 0.5) / 4)
    assert blended({"exact": 1.0, "overlong": 0.5}, weights) == pytest.approx(0.75), "absent weights go to the others"
    assert blended({"exact": 1.0}, weights) == 1.0
    assert isinstance(blended({"overlong": 1.0}, weights), Drop), "a penalty alone is no verdict"


def test_dapos_reward_is_a_blend() -> None:
    score = Overlong(max_tokens=100, margin=20)
    lengths = (50, 90, 120)
    members = [
        msgspec.structs.replace(one, scores=(*one.scores, Score("overlong", score(one))))
        for one in (long(tokens, episode, 1.0) for episode, tokens in enumerate(lengths))
    ]
    blend = {"exact": 1.0, "overlong": -1.0}
    rewards = [one.reward for one in reward(tuple(members), blend=blend) if isinstance(one, Experience)]
    assert rewards == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("blend", [{"overlong": -1.0}, {"exact": 1.0, "judge": 0.0}])
def test_a_blend_without_a_verdict_is_refused(blend: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a penalty is no verdict"):
        RewardConfig(blend=blend)


def test_length_goes_before_the_reward() -> None:
    from infra.chain.insert import ProcessorConfig

    inserted = ProcessorConfig(use="streams.processors.length:length", stage="collect", before="reward")
    assert [step.name for step in build_collect(StreamsConfig(processor=(inserted,)))][:2] == ["length", "reward"]
