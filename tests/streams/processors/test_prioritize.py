"""What a group's priority is multiplied by: novelty, learning progress, recency; each remembers, and only what it must."""

import asyncio
import math
from typing import Any

import msgspec
import pytest

from infra.chain.chain import Context, new_memories, run_chain
from infra.chain.processor import Memory
from infra.settings.config import decode
from schemas import Experience, Message, Score, Span, ids, make_experience
from streams.config import StreamsConfig
from streams.processors.prioritize import novelty, progress, recency
from streams.stages.chain_builder import build_collect


def group(
    *rewards: float, name: str = "t.0", says: str = "7", version: int = 3, **header: Any
) -> tuple[Experience, ...]:
    return tuple(
        make_experience(
            tokens=[1, 2, 7],
            logprobs=[-0.3],
            messages=[Message(role="user", content="?"), Message(role="assistant", content=says)],
            id=ids.experience_id(name, 0, episode),
            group=name,
            episode=episode,
            group_size=len(rewards),
            spans=(Span(2, 3, version),),
            reward=reward,
            **header,
        )
        for episode, reward in enumerate(rewards)
    )


def priority(members: tuple[Experience, ...]) -> float:
    (found,) = {member.priority for member in members}
    return found


def test_a_task_seen_the_nth_time_counts_one_over_the_root_of_n() -> None:
    memory = Memory(8)
    found = [priority(novelty(group(0.0, 1.0, name=f"t.{round}"), memory=memory)) for round in range(4)]
    assert found == pytest.approx([1.0, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5])
    assert priority(novelty(group(0.0, 1.0, name="other.0"), memory=memory)) == 1.0
    memory.set("t", 10_000)
    assert priority(novelty(group(1.0, name="t.9"), memory=memory, min_factor=0.2)) == 0.2


def test_new_answers_to_an_old_task_are_new_by_answer() -> None:
    memory = Memory(8)
    assert priority(novelty(group(1.0, 1.0), memory=memory, of="answer")) == pytest.approx((1 + 1 / math.sqrt(2)) / 2)
    assert priority(novelty(group(0.0, name="t.1", says="8"), memory=memory, of="answer")) == 1.0
    assert priority(novelty(group(0.0, name="u.0"), memory=memory, of="answer")) == 1.0


def test_a_task_that_moves_comes_before_one_that_stands_still() -> None:
    memory = Memory(8)
    still = [priority(progress(group(0.5, 0.5, name=f"still.{n}"), memory=memory)) for n in range(4)]
    assert still == [1.0, 0.1, 0.1, 0.1]
    moving = [priority(progress(group(n / 4, name=f"up.{n}"), memory=memory)) for n in range(3)]
    # fast: 0, 0.125, 0.3125; slow: 0, 0.025, 0.0725
    assert moving == pytest.approx([1.0, 0.1 / 0.25, 0.24 / 0.25])


def test_what_is_forgotten_counts_as_much_as_what_is_learned() -> None:
    up, down = Memory(8), Memory(8)
    for rewards, memory in (((0.0, 0.2, 0.4), up), ((1.0, 0.8, 0.6), down)):
        found = [priority(progress(group(reward, name=f"t.{n}"), memory=memory)) for n, reward in enumerate(rewards)]
    assert found[-1] == pytest.approx(priority(progress(group(0.4, name="t.9", revision=1), memory=up)))


def test_priority_halves_with_every_half_life_of_versions() -> None:
    memory = Memory(1)
    found = {version: priority(recency(group(1.0, version=version), memory=memory)) for version in (20, 16, 12, 0, 24)}
    assert found == {20: 1.0, 16: 0.5, 12: 0.25, 0: 0.1, 24: 1.0}


@pytest.mark.parametrize("one", [novelty, progress])
def test_a_later_revision_of_a_group_is_not_seen_again(one: Any) -> None:
    memory = Memory(8)
    one(group(0.0, 1.0), memory=memory)
    one(group(1.0, 1.0, name="t.1"), memory=memory)
    before = memory.to_bytes()
    one(group(1.0, 1.0, name="t.1", revision=1), memory=memory)
    assert memory.to_bytes() == before


@pytest.mark.parametrize("one", [novelty, progress, recency])
def test_demonstrations_keep_their_priority(one: Any) -> None:
    given = tuple(msgspec.structs.replace(member, lane="expert") for member in group(1.0, version=-1))
    assert one(given, memory=Memory(8)) == given


def test_they_stand_behind_prioritize_by_the_settings_alone() -> None:
    tables = [
        {"use": f"streams.processors.prioritize:{name}", "stage": "collect", "after": "prioritize"}
        for name in ("novelty", "progress", "recency")
    ]
    steps = build_collect(decode({"processor": tables}, StreamsConfig, "bot.toml"))
    assert [step.name for step in steps][-4:] == ["prioritize", "novelty", "progress", "recency"]
    memories = new_memories(steps)

    def run(name: str) -> tuple[Experience, ...]:
        members = tuple(msgspec.structs.replace(m, reward=None, scores=()) for m in group(0.0, 1.0, name=name))
        scored = tuple(
            msgspec.structs.replace(m, scores=(Score(name="exact", value=float(m.episode)),)) for m in members
        )
        return asyncio.run(run_chain(steps, scored, Context(memories=memories))).kept

    assert priority(run("t.0")) == 1.0
    # half right again: spread 1, seen twice, the reward did not move
    assert priority(run("t.1")) == pytest.approx(1 / math.sqrt(2) * 0.1)
