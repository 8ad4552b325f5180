"""What a group, its attempts and a partition's state know, at their edges."""

import asyncio
import gc
from pathlib import Path

import pytest

from infra.chain.processor import Memory
from schemas import Block, encode
from schemas.ids import request_group, session_name
from streams.collect.group import AnswerFeedback, Attempt, BlockPlace, Episode, Group, LaterCredit, fullest
from streams.collect.pending import PendingFile
from streams.collect.state import MAX_CACHED_BYTES, MEMBER_BYTES, Frames, State
from tests.streams.collect.collecting import answer, block, stub


def attempt(number: int = 0, size: int = 2) -> Attempt:
    return Attempt(number, size, "usual", 412, 1_000)


def test_what_nothing_has_come_of_is_open_and_knows_nothing() -> None:
    assert Group("a.0") == Group(
        "a.0", attempts={}, winner=-1, superseded=[], revision=0, closed_ms=0, due_ms=0, feedback={}, lane=None, depth=-1,
        credits={}, retrained=0,
    )  # fmt: skip
    assert not Group("a.0").is_closed and Group("a.0", closed_ms=1).is_closed
    assert AnswerFeedback() == AnswerFeedback([], {}, 0) and Episode() == Episode({}, -1)
    assert not Episode().is_done and attempt().num_done == 0 and not attempt().is_complete


def test_an_episode_is_done_when_all_parts_up_to_its_last_are_there_in_any_order() -> None:
    one = attempt(size=1)
    assert one.add(answer("a.0", 0, size=1, part=2), BlockPlace(3, 0)) is True
    assert (one.is_complete, one.num_done) == (False, 0)
    assert one.add(answer("a.0", 0, size=1, part=0, last=False), BlockPlace(1, 0)) is True
    assert one.add(answer("a.0", 0, size=1, part=1, last=False), BlockPlace(2, 0)) is True
    assert (one.is_complete, one.num_done) == (True, 1)
    assert one.places() == [BlockPlace(1, 0), BlockPlace(2, 0), BlockPlace(3, 0)]
    assert one.add(answer("a.0", 0, size=1, part=1, last=False), BlockPlace(9, 0)) is False, "redelivered"
    assert one.add(answer("a.0", 0, size=1, part=7, last=False), BlockPlace(9, 0)) is True
    assert one.num_done == 1, "what comes after its end makes it no second one"


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


def test_what_lies_outside_a_group_is_no_member() -> None:
    one = attempt(size=2)
    assert one.add(answer("a.0", 2), BlockPlace(0, 0)) is False and not one.episodes
    assert one.add(answer("a.0", 1), BlockPlace(0, 0)) is True
    assert one.has(1, 0) is True and one.has(1, 1) is False and one.has(0, 0) is False


def test_a_stub_counts_like_the_experience_it_stands_for_and_is_no_place() -> None:
    one = attempt(size=3)
    for episode in range(2):
        assert one.add(stub("a.0", episode), "too short")
    assert one.add(answer("a.0", 2, part=1), BlockPlace(7, 1))
    assert one.num_done == 2 and one.drops() == {"too short": 2}
    assert one.places() == [BlockPlace(7, 1)] and one.places(done_only=True) == []
    assert Group("a.0", attempts={0: one}).offsets() == {7}


def test_a_deadline_closes_the_attempt_with_most_done_then_most_arrived_then_the_earliest() -> None:
    def having(number: int, done: int, begun: int) -> Attempt:
        one = attempt(number, size=9)
        for episode in range(done + begun):
            one.add(answer("a.0", episode, size=9, last=episode < done), BlockPlace(episode, 0))
        return one

    def best(*attempts: Attempt) -> int:
        return fullest({one.number: one for one in attempts}).number

    assert best(having(0, 1, 5), having(1, 2, 0)) == 1
    assert best(having(0, 1, 1), having(1, 1, 2)) == 1
    assert best(having(1, 1, 1), having(0, 1, 1)) == 0


def test_a_frame_is_kept_until_it_is_removed_and_read_from_where_it_was_saved() -> None:
    one, other = block(answer("a.0", 0)), block(answer("b.0", 0))
    saved = {8: encode(other)}
    frames = Frames(saved.__getitem__)
    frames.put(7, one, b"")
    assert frames.unsaved == {7: encode(one)} and frames.get(7) is one
    assert frames.get(8).group == "b.0" and frames.get(8) is frames.get(8), "decoded once"
    frames.remove(7)
    assert not frames.unsaved and not frames.removed, "what was never saved leaves nothing to remove there"
    frames.remove(8)
    assert frames.removed == {8}
    for offset in (7, 8):
        with pytest.raises(KeyError):
            frames.get(offset)
    with pytest.raises(KeyError, match="3"):
        Frames().get(3)
    frames.mark_saved()
    assert not frames.removed and frames.get(8).group == "b.0"


def test_the_bytes_of_a_block_are_kept_as_they_came() -> None:
    frames = Frames()
    frames.put(1, block(answer("a.0", 0)), b"its own")
    frames.mark_saved()
    assert frames.unsaved == {}
    frames.put(2, block(answer("a.0", 0)), b"its own")
    assert frames.unsaved == {2: b"its own"}


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


def test_a_state_begins_at_the_start_of_the_log() -> None:
    state = State()
    assert (state.next_offset, state.last_ms, state.now_ms, state.next_due_ms(), state.pop_due()) == (0, 0, 0, 0, None)
    assert state.num_open() == 0 and state.memories == {}
    memories = {"x": Memory(1)}
    assert State(memories=memories).memories is memories
    assert MAX_CACHED_BYTES == 64 * 1024 * 1024 and MEMBER_BYTES == 3 * 1024


def test_time_decides_in_its_order_and_not_before_it_has_come() -> None:
    state = state_of(b=7, a=5, c=5, d=0)
    state.now_ms = 4
    assert state.next_due_ms() == 5 and state.pop_due() is None
    state.now_ms = 5
    first = state.pop_due()
    assert first is state.groups["a"] and first.due_ms == 0
    assert state.pop_due() is state.groups["c"] and state.pop_due() is None and state.next_due_ms() == 7


def test_only_the_newest_moment_of_a_group_counts() -> None:
    state = state_of(a=5, b=6)
    state.schedule(state.groups["a"], 9)
    assert state.next_due_ms() == 6
    state.schedule(state.groups["b"], 0)
    assert state.next_due_ms() == 9
    state.remove("a")
    assert state.next_due_ms() == 0


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


def test_an_echo_is_what_counts_and_how_many_turns_later() -> None:
    assert LaterCredit(2, {"csat": 0.8}) != LaterCredit(1, {"csat": 0.8}) != LaterCredit(1, {"csat": 0.7})
