"""The chain of each stage, as settings assemble it."""

import asyncio
from typing import Any

import pytest

from infra.chain.chain import ChainResult, Context, new_memories, run_chain
from infra.chain.processor import Drop, processor, score
from infra.settings.config import decode
from schemas import Experience
from schemas.errors import ConfigError
from streams.config import ScoreConfig, StreamsConfig
from streams.stages.chain_builder import build_collect, build_verify
from tests.infra.test_chain import answer

HERE = "tests.streams.test_chain_builder"
EXACT = {"name": "exact", "use": "streams.scores.exact:exact"}


@processor(version=1)
def first(experience: Experience) -> Experience:
    return experience


@processor(version=2)
def second(experience: Experience, *, min_tokens: int = 8) -> Experience | Drop:
    return experience


@processor(version=1)
def whole(group: tuple[Experience, ...]) -> tuple[Experience, ...]:
    return group


@score(version=1)
def helpful(experience: Experience) -> float:
    return len(experience.response) / 10


def config(**tables: Any) -> StreamsConfig:
    return decode(tables, StreamsConfig, "bot.toml")


def names(stage: str, **tables: Any) -> list[str]:
    return [step.name for step in (build_verify if stage == "verify" else build_collect)(config(**tables))]


def answers(*texts: str) -> list[Experience]:
    return [answer(episode, text=text, group_size=len(texts), answer="280") for episode, text in enumerate(texts)]


def run(settings: StreamsConfig, *texts: str) -> ChainResult:
    async def both() -> ChainResult:
        verify, collect = build_verify(settings), build_collect(settings)
        outcome = await run_chain(verify, answers(*texts), Context(memories=new_memories(verify)))
        return await run_chain(collect, outcome.kept, Context(memories=new_memories(collect)))

    return asyncio.run(both())


def test_switches_take_steps_in_and_out() -> None:
    assert names("verify", verify={"dedupe": {"on": False}, "redact": {"on": True}}) == ["validate", "redact", "filter"]
    collect = {"difficulty": {"on": False}, "synthesize": {"on": True}}
    assert names("collect", collect=collect) == ["reward", "synthesize", "advantage", "prioritize"]


def test_processors_take_their_places_in_the_files_order() -> None:
    tables = [
        {"use": f"{HERE}:first", "after": "validate"},
        {"use": f"{HERE}:second", "after": "validate"},
        {"use": f"{HERE}:first", "name": "before_dedupe", "before": "dedupe"},
        {"use": f"{HERE}:first", "name": "anywhere"},
        {"use": f"{HERE}:second", "name": "after_score", "after": "exact"},
        {"use": f"{HERE}:whole", "stage": "collect", "after": "advantage"},
        {"use": f"{HERE}:first", "stage": "collect", "name": "end"},
    ]
    assert names("verify", score=[EXACT], processor=tables) == [
        "validate", "first", "second", "before_dedupe", "dedupe", "filter", "anywhere", "exact", "after_score",
    ]  # fmt: skip
    assert names("collect", processor=tables) == ["reward", "advantage", "whole", "difficulty", "prioritize", "end"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"use": f"{HERE}:first", "after": "valdate"},
            'processor[0].after: no step "valdate" in this stage, did you mean "validate"?',
        ),
        ({"use": f"{HERE}:first", "after": "advantage"}, 'processor[0].after: no step "advantage" in this stage'),
        ({"use": f"{HERE}:first", "name": "filter"}, 'processor[0]: a step "filter" exists already'),
        ({"use": f"{HERE}:first", "timeout_s": 111}, "processor[0].timeout_s: got 111, expected at most 110"),
        ({"use": f"{HERE}:whole"}, 'takes a group: expected stage = "collect"'),
        ({"use": f"{HERE}:helpful"}, "is marked @score, expected @processor"),
        ({"use": f"{HERE}:config"}, "not marked"),
        (
            {"use": f"{HERE}:second", "options": {"min_token": 1}},
            'processor[0].options.min_token: unknown option, did you mean "min_tokens"?',
        ),
    ],
)
def test_what_cannot_be_assembled_is_one_config_error(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_verify(config(processor=[tables]))
    assert message in str(caught.value)


def test_a_group_goes_through_both_stages() -> None:
    outcome = run(
        config(score=[EXACT], reward={"blend": {"exact": 1.0}, "require": ["exact"]}), "280", "082", "280", "7"
    )
    assert [member.reward for member in outcome.kept] == [1.0, 0.0, 1.0, 0.0]
    assert [round(member.advantage or 0, 2) for member in outcome.kept] == [1.0, -1.0, 1.0, -1.0]
    assert outcome.kept[0].stamps == (
        "validate@1", "dedupe@1", "filter@1", "exact@1", "reward@3", "advantage@3", "difficulty@2", "prioritize@1",
    )  # fmt: skip


def test_an_easy_group_is_dropped_but_shows_how_if_asked_to() -> None:
    settings = config(score=[EXACT], collect={"synthesize": {"on": True}})
    outcome = run(settings, "280", "280")
    assert [member.lane for member in outcome.kept] == ["expert"]
    assert [gone.reason for gone in outcome.dropped] == ["all rewards equal"] * 2


def test_a_reward_of_ones_own_replaces_the_blend_and_may_hang_alone() -> None:
    outcome = run(config(reward={"use": f"{HERE}:helpful"}), "28", "2800")
    assert [member.reward for member in outcome.kept] == [0.2, 0.4]
    assert outcome.kept[0].stamps[3:5] == ("custom_reward@1", "reward@3")


def test_a_score_with_other_options_asks_another_question() -> None:
    def question(instruction: str) -> str:
        endpoint = {"url": "http://127.0.0.1:1/v1", "model": "judge-1"}
        options = {"endpoint": endpoint, "instruction": instruction}
        score = ScoreConfig(name="judge", use="streams.scores.llm_judge:Judge", options=options)
        (step,) = [step for step in build_verify(StreamsConfig(score=(score,))) if step.name == "judge"]
        return step.question

    assert question("Be kind.") == question("Be kind.") != question("Be strict.")
