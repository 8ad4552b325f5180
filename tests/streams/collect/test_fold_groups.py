"""collect, group by group: what completes one, what closes one, and that it happens once."""

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from infra.chain.chain import ChainResult, Context, Dropped
from schemas import Block, Closure, Experience, encode
from schemas.experience import MAX_MEMBERS, is_withdrawal
from schemas.ids import request_group
from schemas.wire.block import blocks_of
from streams.collect.decision import (
    Chain,
    Decision,
    dead_letter,
    judged,
)
from streams.collect.feedback import take_feedback
from streams.collect.group import AnswerFeedback, Attempt, BlockPlace, Group, LoggedFeedback
from streams.collect.pending import PendingFile
from streams.collect.rules import Rules
from streams.collect.state import MAX_CACHED_BYTES, MEMBER_BYTES, Frames, State
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


def test_redelivered_records_change_nothing() -> None:
    records = [block(answer("t.0", 0)), block(answer("t.0", 0)), stub("t.0", 0), block(answer("t.0", 1))]
    results = folded(FakePartition().extend([*records, *records]))
    assert len(decisions(results)) == 1
    assert not drops(results)


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


def test_a_straggler_is_counted_once_however_often_it_comes() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0))])
    inbox.append(tick(), after_ms=DEADLINE_MS)
    inbox.extend([block(answer("t.0", 1)), block(answer("t.0", 1))])
    assert drops(folded(inbox))["late"] == 1


def test_an_unfinished_episode_is_left_out_at_the_deadline() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0)), block(answer("t.0", 1, part=0, last=False))])
    inbox.append(tick(), after_ms=DEADLINE_MS)
    assert buffered(folded(inbox)) == {("t.0", 0): [("t.0.0-0-0", 0.0)]}


def test_duplicate_ticks_are_harmless() -> None:
    inbox = FakePartition().extend([tick(), block(answer("t.0", 0)), tick()])
    inbox.append(tick(), after_ms=DEADLINE_MS)
    inbox.extend([tick(), tick()])
    assert closures(inbox) == [("t.0", 0, "buffered", "deadline")]


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
    assert closures(inbox) == [
        ("t.0", 0, "superseded", ""),
        ("t.0", 1, "buffered", ""),
        ("t.0", 2, "superseded", ""),
    ]
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


def attempt(number: int = 0, size: int = 2) -> Attempt:
    return Attempt(number, size, "usual", 412, 1_000)


def test_of_a_group_that_waits_the_garbage_collector_knows_one_list() -> None:
    group = Group("a.0", attempts={0: attempt(size=1)})
    group.attempts[0].add(answer("a.0", 0, size=1), BlockPlace(1, 0))
    state = State()
    state.add(group)
    held = [
        group,
        *group.attempts.values(),
        *(one for each in group.attempts.values() for one in each.episodes.values()),
    ]
    dicts = [group.attempts, group.feedback, group.credits, *(each.episodes for each in group.attempts.values())]
    dicts += [one.parts for each in group.attempts.values() for one in each.episodes.values()]
    assert len(held) == 3 and len(dicts) == 5
    assert [one for one in (*held, *dicts, group.superseded) if gc.is_tracked(one)] == [[]]


def test_the_oldest_that_waits_is_the_first_that_came_and_has_not_ended_also_after_a_start(tmp_path: Path) -> None:
    state = State()
    assert state.oldest_ms() == 0
    for name, came_ms in (("words only", 0), ("ended", 1_000), ("waits", 2_000), ("again", 3_000)):
        attempts = {0: Attempt(0, 2, "usual", 412, came_ms)} if came_ms else {}
        state.add(Group(name, attempts=attempts))
        state.touched.add(name)
    assert state.oldest_ms() == 1_000
    state.now_ms = 4_000
    state.close(state.groups["ended"])
    assert state.oldest_ms() == 2_000
    pending = PendingFile(tmp_path / "collect-0.sqlite")
    asyncio.run(pending.save(state, keep_ms=1_000_000))
    state.touched.add("waits")  # its row is the last of the file now
    asyncio.run(pending.save(state, keep_ms=1_000_000))
    pending.close()
    again = PendingFile(tmp_path / "collect-0.sqlite")
    assert again.load({}).oldest_ms() == 2_000
    again.close()


def test_decoded_blocks_are_kept_up_to_a_bound_the_oldest_going_first() -> None:
    one = block(answer("a.0", 0), answer("a.0", 1))
    half = bytes(MAX_CACHED_BYTES // 2 - 2 * MEMBER_BYTES)
    saved: list[int] = []

    def load(offset: int) -> bytes:
        saved.append(offset)
        return encode(one)

    frames = Frames(load)
    for offset in range(2):
        frames.put(offset, one, half)
    frames.mark_saved()
    assert frames.get(0) is frames.get(1) is one and not saved, "just what fits"
    frames.put(2, one, b"x")
    frames.mark_saved()
    assert frames.get(1) is frames.get(2) is one and not saved
    assert frames.get(0) == one and saved == [0]
    frames.put(3, one, bytes(2 * MAX_CACHED_BYTES))
    frames.mark_saved()
    assert frames.get(3) is one and saved == [0], "the newest is always kept"
    assert frames.get(0) == one and saved == [0, 0], "and alone"
    frames.remove(0)
    saved.pop()
    frames.remove(3)
    for offset in range(4, 6):
        frames.put(offset, one, half)
    frames.mark_saved()
    assert frames.get(4) is frames.get(5) is one and saved == [0], "what was removed takes no room"


def test_something_else_than_a_block_is_never_taken_for_one() -> None:
    with pytest.raises(AssertionError, match="frame 5 is no block"):
        Frames(lambda offset: encode(stub("a.0", 0))).get(5)
    assert isinstance(Frames(lambda offset: encode(block(answer("a.0", 0)))).get(5), Block)


def state_of(**due_ms: int) -> State:
    state = State()
    for name, due in due_ms.items():
        state.add(Group(name))
        state.schedule(state.groups[name], due)
    return state


def test_a_group_that_is_put_back_has_its_moment_and_its_place_among_turns() -> None:
    name = request_group(session_name("acme", "chat"), 7, 3)
    state = State()
    state.restore(Group(name, due_ms=4))
    state.restore(Group("a.0"))
    assert state.next_due_ms() == 4 and [turn.id for turn in state.turns(name)] == [name] and state.turns("a.0") == []
    other = request_group(session_name("acme", "chat"), 7, 1)
    state.add(Group(other))
    assert [turn.id for turn in state.turns(name)] == [other, name]
    state.remove(name)
    state.remove("a.0")
    assert [turn.id for turn in state.turns(name)] == [other]
    state.remove(other)
    assert state.turns(name) == [] and not state.groups and not vars(state)["_sessions"], "what is over takes no room"


def test_closed_groups_are_known_for_a_while_and_then_no_longer() -> None:
    state = state_of(a=5, b=6, c=7)
    state.close(state.groups["a"])
    assert state.groups["a"].closed_ms == 1, "also at the beginning of time it is closed"
    assert state.groups["a"].due_ms == 0 and state.next_due_ms() == 6 and state.num_open() == 2
    state.now_ms = 10
    state.close(state.groups["b"])
    assert state.groups["b"].closed_ms == 10
    state.now_ms = 101
    state.expire(100)
    assert set(state.groups) == {"a", "b", "c"}
    state.now_ms = 102
    state.expire(100)
    assert set(state.groups) == {"b", "c"}
    state.groups["b"].closed_ms = 50
    state.now_ms = 200
    state.expire(100)
    assert set(state.groups) == {"b", "c"}, "it was closed again since"
    state.close(state.groups["c"])
    state.forget_closed_order()
    state.now_ms = 900
    state.expire(100)
    assert set(state.groups) == {"b", "c"}
