"""How a group ends and what is told of it, at the edges."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from infra.chain.chain import ChainResult, Context, Dropped
from schemas import Closure, Experience
from schemas.experience import MAX_MEMBERS
from schemas.wire.block import blocks_of
from schemas.withdrawal import is_withdrawal
from streams.collect.decision import (
    Chain,
    Decision,
    dead_letter,
    judged,
)
from streams.collect.feedback import take_feedback
from streams.collect.group import AnswerFeedback, Attempt, BlockPlace, Group, LoggedFeedback
from tests.streams.collect.collecting import answer, said, stub


def test_a_dead_letter_says_where_it_lay_and_holds_no_more_than_64_kib() -> None:
    letter = dead_letter(3, 9, "bad ref", "ref: got x", bytes(70_000))
    assert (letter.topic, letter.partition, letter.offset, letter.stage) == ("verified", 3, 9, "collect")
    assert (letter.reason, letter.error, len(letter.value)) == ("bad ref", "ref: got x", 65_536)


def test_blocks_are_of_one_group_each_in_order_and_of_a_bounded_size() -> None:
    many = [answer("a.0", number, size=200) for number in range(MAX_MEMBERS + 1)]
    blocks = blocks_of([many[0], answer("b.0", 0), *many[1:]])
    assert [(one.group, len(one.experiences)) for one in blocks] == [("a.0", 64), ("a.0", 1), ("b.0", 1)]
    assert [one.episode for one in blocks[0].experiences] == list(range(64)) and blocks_of([]) == ()


async def halve(experiences: Sequence[Experience], context: Context) -> ChainResult:
    """A chain that drops even episodes, and rewards the others by their number."""
    odd = tuple(msgspec.structs.replace(one, reward=float(one.episode)) for one in experiences if one.episode % 2)
    even = [msgspec.structs.replace(one, reward=0.0) for one in experiences if not one.episode % 2]
    return ChainResult(kept=odd, dropped=tuple(Dropped(one, "even", "", "halve@1") for one in even))


def end(group: Group, attempt: Attempt, given: Sequence[Experience], chain: Chain = halve) -> Decision:
    context = Context(time_ms=0, record_offset=0, memories={})
    return asyncio.run(judged(group, attempt, given, given, "deadline", chain=chain, context=context))


def attempt_of(size: int, done: int, lane: str = "usual") -> Attempt:
    one = Attempt(2, size, lane, 412, 1_000)  # type: ignore[arg-type]
    for episode in range(done):
        one.add(answer("a.0", episode, size=size), BlockPlace(episode, 0))
    return one


def at_version(episode: int, version: int, **more: object) -> Experience:
    one = answer("a.0", episode, size=9)
    spans = tuple(msgspec.structs.replace(span, version=version) for span in one.spans)
    return msgspec.structs.replace(one, spans=spans, **more)


def test_a_closure_tells_what_came_of_a_group() -> None:
    group = Group("a.0", revision=3, feedback={answer("a.0", 1).id: AnswerFeedback()})
    take_feedback(group.feedback[answer("a.0", 1).id], LoggedFeedback(said(answer("a.0", 1).id, 0.5), 9, 77))
    given = [at_version(0, 4), at_version(1, 3, trial=-1), at_version(3, 5)]
    decision = end(group, attempt_of(5, 3), [msgspec.structs.replace(given[0], trial=6), *given[1:]])
    closure = decision.closure
    assert msgspec.structs.replace(closure, ratings=()) == Closure(
        group="a.0", outcome="buffered", reason="deadline", attempt=2, revision=3, sequence=412, lane="usual",
        experiences=2, mean_reward=pytest.approx(4 / 3), drops={"missing at deadline": 2, "even": 1}, version=3, trial=6,
        ratings=(), answered_ms=-1,
    )  # fmt: skip
    assert [rating.value for rating in closure.ratings or ()] == [0.5]
    assert [one.episode for sent in decision.blocks for one in sent.experiences] == [1, 3]
    assert [gone.experience.episode for gone in decision.dropped] == [0]


def test_a_group_of_which_nothing_goes_on_is_dropped_for_what_most_of_it_was_dropped_for() -> None:
    one = attempt_of(4, 3)
    one.add(stub("a.0", 3, size=4), "too short")
    closure = end(Group("a.0"), one, [at_version(0, 1), at_version(2, 1)]).closure
    assert (closure.outcome, closure.reason, closure.experiences) == ("dropped", "even", 0)
    assert closure.drops == {"even": 2, "too short": 1}
    empty = end(Group("a.0"), attempt_of(0, 0), []).closure
    assert (empty.outcome, empty.reason, empty.version, empty.trial) == ("dropped", "deadline", -1, -1)
    assert empty.ratings == () and empty.mean_reward is None


def test_what_an_older_revision_sent_on_is_taken_back_where_this_one_sends_nothing() -> None:
    def sent(group: Group, episode: int) -> list[Experience]:
        return [
            one for part in end(group, attempt_of(1, 1), [at_version(episode, 1)]).blocks for one in part.experiences
        ]

    assert sent(Group("a.0"), 0) == []
    (back,) = sent(Group("a.0", lane="human", revision=4), 0)
    two = end(Group("a.0", lane="human"), attempt_of(2, 2), [at_version(0, 1), at_version(2, 1)])
    assert [one.id for part in two.blocks for one in part.experiences] == [at_version(0, 1).id] == [back.id]
    assert is_withdrawal(back) and (back.lane, back.revision, back.group) == ("human", 4, "a.0")
    assert [is_withdrawal(one) for one in sent(Group("a.0", lane="usual", revision=4), 1)] == [False]
    assert [is_withdrawal(one) for one in sent(Group("a.0", revision=4), 1)] == [False]
    moved = sent(Group("a.0", lane="human", revision=4), 1)
    assert [(one.lane, is_withdrawal(one)) for one in moved] == [("human", True), ("usual", False)], "it goes first"


def test_what_was_made_of_a_group_goes_on_under_its_own_name_also_where_the_group_does_not() -> None:
    async def remade(experiences: Sequence[Experience], context: Context) -> ChainResult:
        return ChainResult(kept=(answer("syn.0", 0), *(one for one in experiences if one.episode)), dropped=())

    with_own = end(Group("a.0", lane="usual"), attempt_of(2, 2), [at_version(0, 1), at_version(1, 1)], chain=remade)
    assert [one.group for one in with_own.blocks] == ["syn.0", "a.0"] and with_own.closure.experiences == 1
    alone = end(Group("a.0", lane="live"), attempt_of(1, 1), [at_version(0, 1)], chain=remade)
    assert [one.group for one in alone.blocks] == ["a.0", "syn.0"] and alone.closure.outcome == "dropped"
    assert is_withdrawal(alone.blocks[0].experiences[0])
