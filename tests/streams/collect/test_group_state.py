"""What a group, its attempts and a partition's state know, at their edges."""

import asyncio
import gc
from pathlib import Path

import pytest

from schemas import Block, encode
from schemas.ids import request_group, session_name
from streams.collect.group import Attempt, BlockPlace, Group
from streams.collect.pending import PendingFile
from streams.collect.state import MAX_CACHED_BYTES, MEMBER_BYTES, Frames, State
from tests.streams.collect.collecting import answer, block, stub


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
