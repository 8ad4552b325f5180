"""The priority of what is new, and the running baselines of rewards and of verdicts."""

import math
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.chain.processor import Memory
from schemas import Experience, Message, Span, ids, make_experience
from streams.collect.feedback import FeedbackRules, learn_usual, returns, usual_value
from streams.collect.state import AnswerFeedback, LaterCredit, LoggedFeedback
from streams.processors.advantage import MAX_ADVANTAGE, MEMORY, WINDOW, compared
from streams.processors.prioritize import novelty
from tests.streams.collect.collecting import said
from tests.streams.processors.by_default import advantage
from tests.streams.processors.test_collect_processors import answer


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


def test_a_later_revision_of_a_group_is_not_seen_again() -> None:
    memory = Memory(8)
    novelty(group(0.0, 1.0), memory=memory)
    novelty(group(1.0, 1.0, name="t.1"), memory=memory)
    before = memory.to_bytes()
    novelty(group(1.0, 1.0, name="t.1", revision=1), memory=memory)
    assert memory.to_bytes() == before


def test_demonstrations_keep_their_priority() -> None:
    given = tuple(msgspec.structs.replace(member, lane="expert") for member in group(1.0, version=-1))
    assert novelty(given, memory=Memory(8)) == given


GAMMA, TURNS = 0.9, 10
SOURCES = {"csat": FeedbackRules(window_ms=1, discount=GAMMA)}


def advantages_of(rewards: list[float], memory: Memory | None = None, first: int = 0) -> list[float]:
    memory = Memory(MEMORY) if memory is None else memory
    return [compared(memory, "k", f"g{first + number}", value) for number, value in enumerate(rewards)]


@pytest.mark.parametrize("rewards", [[0.8, 0.801, 0.2], [0.9, 0.9000001, 0.1]])
def test_a_few_rewards_that_lie_together_make_no_large_advantage(rewards: list[float]) -> None:
    assert all(abs(value) < 0.5 for value in advantages_of(rewards))


@given(st.lists(st.floats(-1e6, 1e6), max_size=60))
def test_an_advantage_is_bounded_whatever_the_rewards(rewards: list[float]) -> None:
    assert all(abs(value) <= MAX_ADVANTAGE for value in advantages_of(rewards))


def test_an_advantage_is_the_distance_to_the_mean_shrunk_by_what_is_known() -> None:
    # After 8 rewards half are trusted: mean 0.5, variance 1/4 as in the prior.
    assert advantages_of([0.0, 1.0] * 4 + [1.0])[-1] == pytest.approx(0.5 * 0.5 / 0.5)
    # After many nearly all: mean 0.25, variance 3/16.
    trust = WINDOW / (WINDOW + 8)
    many = [float(number % 4 == 0) for number in range(WINDOW)]
    assert advantages_of([*many, 1.0])[-1] == pytest.approx(
        trust * 0.75 / math.sqrt(trust * 3 / 16 + (1 - trust) / 4), rel=1e-6
    )
    assert advantages_of([0.7])[0] == 0.0, "there is nothing to compare the first with"


def test_the_gateways_of_a_tenant_share_a_baseline_and_tenants_and_lanes_do_not() -> None:
    memory = Memory(MEMORY)

    def lone(number: int, value: float, **header: str) -> float | None:
        member = answer(group=f"g{number}.0", group_size=1, reward=value, **header)
        return advantage((member,), memory=memory)[0].advantage

    assert [lone(number, 0.0, tenant="a", origin=f"serve/{number}") for number in range(3)] == [0.0, 0.0, 0.0]
    assert (lone(3, 1.0, tenant="b", origin="serve/0"), lone(4, 1.0, tenant="a", lane="human")) == (0.0, 0.0)
    assert (lone(5, 1.0, tenant="a", origin="serve/3") or 0) > 0


def test_an_answer_joins_the_baseline_once_however_often_it_is_revised() -> None:
    once, often = Memory(MEMORY), Memory(MEMORY)
    for number in range(20):
        compared(once, "k", f"g{number}", number / 20)
        for value in (number / 20, 1.0, 0.0):
            compared(often, "k", f"g{number}", value)
    assert often.get("kk") == once.get("kk")


def test_a_baseline_in_use_is_kept_whatever_joins() -> None:
    memory = Memory(8)
    for number in range(100):
        compared(memory, "k", f"g{number}", 1.0)
    known = memory.get("kk")
    assert isinstance(known, list) and known[0] == 100 and len(memory) == 8


# What a session's turns get, all turns equally good: liked with the same chance wherever they stand.


def session(liked: Callable[[int], bool], memories: dict[str, Memory]) -> list[tuple[bool, float]]:
    """(whether it was liked, its reward) of each turn once all are rated."""
    verdicts = [liked(turn) for turn in range(TURNS)]
    for value in verdicts:
        learn_usual(memories, "", {}, {"csat": float(value)})
    rewards = []
    for turn, value in enumerate(verdicts):
        own = AnswerFeedback(counted=[LoggedFeedback(said("a.0.0-0-0", float(value)), 0, 0)])
        echoes = [LaterCredit(later - turn, {"csat": float(verdicts[later])}) for later in range(turn + 1, TURNS)]
        rewards.append(returns(own, echoes, SOURCES, lambda source: usual_value(memories, "", source))["csat"])
    return list(zip(verdicts, rewards, strict=True))


def sessions(number: int, chance: Callable[[int], float], seed: int = 0) -> Iterator[tuple[int, bool, float]]:
    """(turn, whether it was liked, advantage), once the baselines are warm."""
    draw, memory = random.Random(seed), Memory(MEMORY)
    memories: dict[str, Memory] = {}
    for index in range(number + 50):
        for turn, (liked, value) in enumerate(session(lambda turn: draw.random() < chance(turn), memories)):
            found = compared(memory, "k", f"{index}/{turn}", value)
            if index >= 50:
                yield turn, liked, found


def by_turn(found: Iterator[tuple[int, bool, float]], liked: bool | None = None) -> list[tuple[float, float]]:
    """Mean and standard error of the advantages of each turn. liked: of those alone that were, or were not."""
    values: list[list[float]] = [[] for _ in range(TURNS)]
    for turn, was_liked, value in found:
        if liked is None or was_liked == liked:
            values[turn].append(value)
    return [(statistics.fmean(given), statistics.stdev(given) / math.sqrt(len(given))) for given in values]


@pytest.mark.parametrize("chance", [0.5, 0.9])
def test_no_turn_is_better_or_worse_off_for_its_place_in_the_session(chance: float) -> None:
    found = by_turn(sessions(1500, lambda turn: chance))
    assert all(abs(mean) < 4 * error + 0.05 for mean, error in found), found


def test_a_praised_last_turn_gains_and_a_disliked_first_one_loses() -> None:
    praised = by_turn(sessions(600, lambda turn: 0.9), liked=True)
    disliked = by_turn(sessions(600, lambda turn: 0.9), liked=False)
    assert praised[-1][0] > 0 and disliked[0][0] < 0
    assert all(low[0] < high[0] for low, high in zip(disliked, praised, strict=True))


def test_where_later_turns_are_rated_worse_early_ones_lean_down_by_a_bounded_amount() -> None:
    found = by_turn(sessions(1500, lambda turn: 0.9 if turn < 5 else 0.7))
    drop, spread = 0.2, 0.3  # of the verdicts; the smallest spread that the advantages are divided by
    assert found[4][0] < found[0][0], "the turn before the worse ones leans most"
    assert all(abs(mean) < drop * GAMMA / (1 - GAMMA) / spread for mean, _ in found)
