"""Fold: what completes a group, what closes it, and that both happen once."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from infra.chain.chain import ChainResult, Context, Dropped
from schemas import Closure, Experience
from schemas.experience import MAX_MEMBERS, is_withdrawal
from schemas.ids import request_group
from streams.collect.decision import TOO_LARGE, Chain, Decision, judged
from streams.collect.feedback import take_feedback
from streams.collect.fold import MAX_ANSWERS
from streams.collect.rules import Rules
from streams.collect.state import AnswerFeedback, Attempt, BlockPlace, Group, LoggedFeedback, State
from streams.config import LimitsConfig
from tests.names import session_name
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    RULES,
    FakePartition,
    answer,
    block,
    buffered,
    decisions,
    drops,
    folded,
    rules,
    said,
    stub,
    tick,
)


def closures(inbox: FakePartition, rules: Rules = RULES) -> list[tuple[str, int, str, str]]:
    return [
        (decision.closure.group, decision.closure.attempt, decision.closure.outcome, decision.closure.reason)
        for decision in decisions(folded(inbox, rules))
    ]


def test_a_group_is_buffered_when_its_last_episode_arrives() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 1)), block(answer("t.0", 0))])
    results = folded(inbox)
    assert not results[0].decisions
    assert buffered(results) == {("t.0", 0): [("t.0.0-0-0", 0.0), ("t.0.0-1-0", 1.0)]}
    assert decisions(results)[0].closure.mean_reward == 0.5


def test_dropped_member_still_completes_its_group() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0)), stub("t.0", 1)])
    results = folded(inbox)
    assert buffered(results) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}
    closure = decisions(results)[0].closure
    assert (closure.outcome, closure.drops, closure.experiences) == ("buffered", {"too short": 1}, 1)
    assert drops(results) == {"too short": 1}


def test_a_group_of_stubs_closes_as_dropped_with_their_reason() -> None:
    inbox = FakePartition().extend([stub("t.0", 0), stub("t.0", 1)])
    assert closures(inbox) == [("t.0", 0, "dropped", "too short")]


def test_an_episode_is_done_only_with_all_its_parts() -> None:
    parts = [answer("t.0", 0, size=1, part=part, last=part == 2) for part in range(3)]
    inbox = FakePartition().extend([block(parts[2]), block(parts[0])])
    assert not decisions(folded(inbox))
    inbox.append(block(parts[1]))
    assert [name for name, _ in buffered(folded(inbox))[("t.0", 0)]] == ["t.0.0-0-0", "t.0.0-0-1", "t.0.0-0-2"]


def test_deadline_fires_only_when_a_record_reaches_it() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0))])
    state = State()
    assert not decisions(folded(inbox, state=state))
    assert state.next_due_ms() == inbox.time_ms + DEADLINE_MS
    inbox.append(tick(), after_ms=DEADLINE_MS - 1)
    assert not decisions(folded(inbox, state=state))
    inbox.append(tick(), after_ms=1)
    results = folded(inbox, state=state)
    assert buffered(results) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}
    assert decisions(results)[0].closure.reason == "deadline"
    assert decisions(results)[0].closure.drops == {"missing at deadline": 1}


def test_deadline_fires_before_the_record_that_reaches_it() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0))])
    inbox.append(block(answer("t.0", 1)), after_ms=DEADLINE_MS)
    results = folded(inbox)
    assert buffered(results) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}
    assert drops(results) == {"missing at deadline": 1, "late": 1}


def test_an_unfinished_episode_is_left_out_at_the_deadline() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0)), block(answer("t.0", 1, part=0, last=False))])
    inbox.append(tick(), after_ms=DEADLINE_MS)
    assert buffered(folded(inbox)) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}


def test_the_first_attempt_that_completes_wins() -> None:
    inbox = FakePartition().extend(
        [
            block(answer("t.0", 0)),
            block(answer("t.0", 0, attempt=1), answer("t.0", 1, attempt=1)),
            block(answer("t.0", 1)),
            block(answer("t.0", 0, attempt=2)),
            block(answer("t.0", 1, attempt=2)),
        ]
    )
    assert closures(inbox) == [("t.0", 0, "superseded", ""), ("t.0", 1, "buffered", ""), ("t.0", 2, "superseded", "")]
    assert [name for name, _ in buffered(folded(inbox))[("t.0", 0)]] == ["t.0.1-0-0", "t.0.1-1-0"]


def test_a_deadline_closes_the_attempt_that_came_furthest() -> None:
    inbox = FakePartition().extend(
        [
            block(answer("t.0", 0, size=3)),
            block(answer("t.0", 0, attempt=1, size=3), answer("t.0", 1, attempt=1, size=3)),
        ]
    )
    inbox.append(tick(), after_ms=DEADLINE_MS)
    assert closures(inbox) == [("t.0", 0, "superseded", ""), ("t.0", 1, "buffered", "deadline")]


def test_demonstrations_go_on_untouched_when_they_are_all_there() -> None:
    shown = [answer("d.0", episode, lane="expert") for episode in range(2)]
    inbox = FakePartition().extend([block(shown[0])])
    assert not decisions(folded(inbox))
    inbox.append(block(shown[1]))
    assert buffered(folded(inbox)) == {("d.0", 0): [("d.0.0-0-0", None), ("d.0.0-1-0", None)]}


def test_an_episode_beyond_its_group_is_counted_and_ignored() -> None:
    results = folded(FakePartition().extend([block(answer("t.0", 5, size=2))]))
    assert drops(results) == {"episode beyond its group": 1}


def test_closed_groups_are_forgotten_after_keep() -> None:
    rules = Rules(deadline_ms=DEADLINE_MS, keep_ms=5_000)
    state = State()
    inbox = FakePartition().extend([block(answer("t.0", 0), answer("t.0", 1))])
    inbox.append(tick(), after_ms=5_001)
    folded(inbox, rules, state)
    assert not state.groups


async def halve(experiences: Sequence[Experience], context: Context) -> ChainResult:
    """A chain that drops even episodes, and rewards the others by their number."""
    odd = tuple(
        msgspec.structs.replace(member, reward=float(member.episode)) for member in experiences if member.episode % 2
    )
    even = [msgspec.structs.replace(member, reward=0.0) for member in experiences if not member.episode % 2]
    return ChainResult(kept=odd, dropped=tuple(Dropped(item, "even", "", "halve@1") for item in even))


def end(group: Group, attempt: Attempt, given: Sequence[Experience], chain: Chain = halve) -> Decision:
    context = Context()
    return asyncio.run(judged(group, attempt, given, given, "deadline", chain=chain, context=context))


def attempt_of(size: int, done: int, lane: str = "usual") -> Attempt:
    item = Attempt(2, size, lane, 412, 1_000)  # type: ignore[arg-type]
    for episode in range(done):
        item.add(answer("a.0", episode, size=size), BlockPlace(episode, 0))
    return item


def at_version(episode: int, version: int, **more: object) -> Experience:
    member = answer("a.0", episode, size=9)
    spans = tuple(msgspec.structs.replace(span, version=version) for span in member.spans)
    return msgspec.structs.replace(member, spans=spans, **more)


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
    assert [member.episode for sent in decision.blocks for member in sent.experiences] == [1, 3]
    assert [gone.experience.episode for gone in decision.dropped] == [0]


async def keep(experiences: Sequence[Experience], context: Context) -> ChainResult:
    return ChainResult(kept=tuple(experiences), dropped=())


def test_a_group_larger_than_a_block_is_dropped_as_the_trainer_takes_a_single_block() -> None:
    size = MAX_MEMBERS + 1
    given = [answer("a.0", episode, size=size) for episode in range(size)]
    large, fits = (end(Group("a.0"), attempt_of(size, size), some, keep) for some in (given, given[1:]))
    assert not large.blocks and (large.closure.outcome, large.closure.reason) == ("dropped", TOO_LARGE)
    assert large.closure.drops == {TOO_LARGE: size} and len(large.dropped) == size
    assert len(fits.blocks) == 1 and fits.closure.experiences == MAX_MEMBERS


def test_a_group_of_which_nothing_goes_on_is_dropped_for_what_most_of_it_was_dropped_for() -> None:
    item = attempt_of(4, 3)
    item.add(stub("a.0", 3, size=4), "too short")
    closure = end(Group("a.0"), item, [at_version(0, 1), at_version(2, 1)]).closure
    assert (closure.outcome, closure.reason, closure.experiences) == ("dropped", "even", 0)
    assert closure.drops == {"even": 2, "too short": 1}
    empty = end(Group("a.0"), attempt_of(0, 0), []).closure
    assert (empty.outcome, empty.reason, empty.version, empty.trial) == ("dropped", "deadline", -1, -1)
    assert empty.ratings == () and empty.mean_reward is None


def test_what_an_older_revision_sent_on_is_taken_back_where_this_one_sends_nothing() -> None:
    def sent(group: Group, episode: int) -> list[Experience]:
        return [
            member
            for part in end(group, attempt_of(1, 1), [at_version(episode, 1)]).blocks
            for member in part.experiences
        ]

    assert sent(Group("a.0"), 0) == []
    (back,) = sent(Group("a.0", lane="human", revision=4), 0)
    two = end(Group("a.0", lane="human"), attempt_of(2, 2), [at_version(0, 1), at_version(2, 1)])
    assert [member.id for part in two.blocks for member in part.experiences] == [at_version(0, 1).id] == [back.id]
    assert is_withdrawal(back) and (back.lane, back.revision, back.group) == ("human", 4, "a.0")
    assert [is_withdrawal(sent_block) for sent_block in sent(Group("a.0", lane="usual", revision=4), 1)] == [False]
    assert [is_withdrawal(sent_block) for sent_block in sent(Group("a.0", revision=4), 1)] == [False]
    moved = sent(Group("a.0", lane="human", revision=4), 1)
    assert [(item.lane, is_withdrawal(item)) for item in moved] == [("human", True), ("usual", False)], "it goes first"


def test_what_was_made_of_a_group_goes_on_under_its_own_name_also_where_the_group_does_not() -> None:
    async def remade(experiences: Sequence[Experience], context: Context) -> ChainResult:
        return ChainResult(kept=(answer("syn.0", 0), *(member for member in experiences if member.episode)), dropped=())

    with_own = end(Group("a.0", lane="usual"), attempt_of(2, 2), [at_version(0, 1), at_version(1, 1)], chain=remade)
    assert [sent_block.group for sent_block in with_own.blocks] == [
        "syn.0",
        "a.0",
    ] and with_own.closure.experiences == 1
    alone = end(Group("a.0", lane="live"), attempt_of(1, 1), [at_version(0, 1)], chain=remade)
    assert [sent_block.group for sent_block in alone.blocks] == ["a.0", "syn.0"] and alone.closure.outcome == "dropped"
    assert is_withdrawal(alone.blocks[0].experiences[0])


def test_a_record_that_does_not_belong_here_is_put_aside_and_named() -> None:
    inbox = FakePartition().extend([Closure(group="a.0", outcome="dropped"), None])
    state = State()
    first, second = folded(inbox, RULES, state)
    (letter,) = first.letters
    assert (letter.reason, letter.error, letter.offset) == ("unexpected record", "Closure", 0)
    assert not second.letters and (state.next_offset, state.last_ms) == (2, inbox.time_ms)


def test_of_a_group_so_many_answers_are_spoken_of_before_it_is_closed() -> None:
    inbox = FakePartition(step_ms=0).extend(
        said(f"a.0.0-{number}-0", 1.0, rater="ann") for number in range(MAX_ANSWERS + 1)
    )
    inbox.append(said("a.0.0-0-0", 0.0, id="again", rater="ann"))
    state = State()
    results = folded(inbox, rules(limits=LimitsConfig(rater_answers=MAX_ANSWERS + 1, rater_share=0.0)), state)
    assert drops(results) == {"feedback about too many answers of a group": 1} and MAX_ANSWERS == 1024
    assert len(state.groups["a.0"].feedback) == MAX_ANSWERS


@pytest.mark.parametrize(
    ("late", "episode", "revisions", "reason"),
    [
        ("drop", 1, 16, "late feedback"),
        ("amend", 7, 16, "feedback for an unknown answer"),
        ("amend", 1, 0, "revised often enough"),
    ],
)
def test_a_word_that_was_dropped_uses_up_nobodys_limit(late: str, episode: int, revisions: int, reason: str) -> None:
    closed = [block(answer("a.0", number)) for number in range(2)]
    words = [said(f"a.0.0-{episode}-0", 0.5, id=str(number), rater="ann") for number in range(3)]
    still_open = [block(answer("b.0", 0, size=1, lane="live")), said("b.0.0-0-0", 1.0, rater="ann")]
    limited = rules(late, revisions=revisions, limits=LimitsConfig(rater_answers=1, rater_share=0.0))
    inbox = FakePartition().extend(closed)
    inbox.append(tick(), after_ms=5_000)
    results = folded(inbox.extend([*words, *still_open]), limited)
    assert {reason: count for reason, count in drops(results).items() if count} == {reason: 3}
    assert [len(decision.closure.ratings or ()) for decision in decisions(results)] == [0, 1]


def test_ratings_of_a_source_that_no_setting_names_are_counted() -> None:
    live = [block(answer(f"{name}.0", 0, size=1, lane="live")) for name in "ab"]
    inbox = FakePartition().extend([*live, said("a.0.0-0-0", 1.0, source="letters"), said("b.0.0-0-0", 0.0)])
    inbox.append(tick(), after_ms=5_000)
    found = [rating for decision in decisions(folded(inbox, rules())) for rating in decision.closure.ratings or ()]
    assert {(rating.source, rating.value) for rating in found} == {("letters", 1.0), ("csat", 0.0)}


def test_an_answer_of_several_choices_waits_for_a_word_about_each() -> None:
    group = request_group(session_name("acme", "chat"), 7, 1)
    choices = block(*(answer(group, number, lane="live") for number in range(2)))
    words = [said(f"{group}.0-{number}-0", 1.0) for number in range(2)]
    assert [len(result.decisions) for result in folded(FakePartition().extend([choices, *words]), rules())] == [0, 0, 1]
