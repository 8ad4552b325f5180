"""The buffer: what is held, how often it may be trained, and that deliveries twice or late change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import Block, encode
from tests.trainer.buffered_blocks import block, mixed
from trainer.buffer import Buffer, candidate_of, use_key
from trainer.draw import Candidate


def filled(*blocks: Block, **max_uses: int) -> Buffer:
    buffer = Buffer(max_uses or {"usual": 1, "expert": 2})  # type: ignore[arg-type]
    for offset, one in enumerate(blocks):
        assert buffer.add(offset, encode(one), one) == ""
    return buffer


def add(buffer: Buffer, offset: int, one: Block) -> str:
    return buffer.add(offset, encode(one), one)


def only(buffer: Buffer, lane: str = "usual") -> Candidate:
    (one,) = buffer.candidates(lane)  # type: ignore[arg-type]
    return one


def test_a_drawn_group_comes_back_whole_and_is_gone() -> None:
    one = block("a.0", num_members=3)
    buffer = filled(one, block("b.0"))
    (drawn,) = buffer.take(buffer.candidates("usual")[:1])
    assert [member.id for member in drawn.experiences] == [member.id for member in one.experiences]
    assert drawn.experiences[2].tokens.tolist() == one.experiences[2].tokens.tolist()
    assert buffer.references() == [1] and buffer.num_experiences("usual") == 2


def test_a_group_with_a_sequence_longer_than_the_context_is_refused_whole() -> None:
    one = block("a.0", num_members=2)
    longest = max(member.num_tokens for member in one.experiences)
    assert Buffer({"usual": 1}, max_tokens=longest).add(0, encode(one), one) == ""
    buffer = Buffer({"usual": 1}, max_tokens=longest - 1)
    assert add(buffer, 0, one) == "longer than the context" and not buffer.references()


def test_a_second_delivery_changes_nothing() -> None:
    buffer = filled(block("a.0"))
    assert add(buffer, 7, block("a.0")) == "duplicate"
    assert buffer.references() == [0] and buffer.duplicates == 1
    assert add(buffer, 0, block("a.0")) == "", "the same offset read again is no duplicate"
    assert buffer.duplicates == 1


def test_what_was_trained_is_not_taken_in_again_not_even_after_a_restart() -> None:
    buffer = filled(block("a.0"))
    buffer.take([only(buffer)])
    assert add(buffer, 5, block("a.0")) == "already trained"
    restarted = Buffer({"usual": 1}, buffer.uses)
    assert add(restarted, 5, block("a.0")) == "already trained"
    assert add(restarted, 6, block("a.0", revision=1)) == "", "a revision is trained in its own right"


def test_what_has_no_use_left_was_heard_here_and_after_a_restart() -> None:
    buffer = filled(block("a.0", num_members=3), block("b.0", num_members=2))
    buffer.take([buffer.candidates("usual")[0]])
    assert (buffer.num_experiences("usual"), buffer.num_heard("usual")) == (2, 5)
    restarted = Buffer({"usual": 1}, buffer.uses)
    add(restarted, 0, block("a.0", num_members=3))
    assert (restarted.num_experiences("usual"), restarted.num_heard("usual")) == (0, 3)


def test_a_revision_replaces_the_older_one_that_was_not_drawn_and_never_the_other_way() -> None:
    buffer = filled(block("a.0"), block("a.0", revision=2))
    assert (only(buffer).offset, only(buffer).revision) == (1, 2)
    assert add(buffer, 2, block("a.0", revision=1)) == "duplicate"
    assert buffer.references() == [1]


def test_one_group_is_held_once_per_lane() -> None:
    buffer = filled(block("a.0"), block("a.0", lane="expert"))
    assert buffer.num_groups("usual") == buffer.num_groups("expert") == 1


def test_a_group_with_uses_left_stays_until_they_are_spent() -> None:
    buffer = filled(block("a.0", lane="expert"))
    for use in (0, 1):
        assert only(buffer, "expert").uses == use
        buffer.take([only(buffer, "expert")])
    assert buffer.candidates("expert") == [] and buffer.num_bytes() == 0


def test_lanes_that_are_not_trained_and_blocks_that_mix_lanes_are_refused_with_a_reason() -> None:
    buffer = filled()
    assert add(buffer, 0, block(lane="live")) == "lane not trained"
    assert add(buffer, 1, mixed(["usual", "expert"])) == "block mixes lanes"
    assert buffer.references() == []


def test_validation_blocks_are_never_candidates_and_stay_referenced() -> None:
    buffer = filled(
        block("b.0", lane="expert", held_out=True),
        block("a.0", lane="expert", held_out=True),
    )
    assert buffer.candidates("expert") == [] and buffer.num_experiences("expert") == 0
    assert [one.group for one in buffer.validation()] == ["b.0", "a.0"]
    assert buffer.references() == [0, 1]


def test_a_group_that_the_master_waits_for_is_refused_with_a_reason_where_it_is_held_out() -> None:
    buffer = filled()
    assert add(buffer, 0, block("a.0", sequence=3, held_out=True)) == "held out"
    assert buffer.references() == [] and buffer.validation() == []


def test_a_use_of_something_no_longer_held_still_counts() -> None:
    buffer = filled()
    buffer.count_use(candidate_of(9, block("a.0"), 0))
    assert buffer.uses == {use_key("a.0", 0, "usual"): 1}
    assert add(buffer, 9, block("a.0")) == "already trained"


@pytest.mark.parametrize(("group", "revision", "lane"), [("a.0", 0, "usual"), ("a.0", 1, "usual"), ("a.0", 0, "human")])
def test_uses_are_counted_by_group_revision_and_lane(group: str, revision: int, lane: str) -> None:
    keys = [use_key(*one) for one in (("a.0", 0, "usual"), ("a.0", 1, "usual"), ("a.0", 0, "human"))]
    assert keys.count(use_key(group, revision, lane)) == 1


def test_a_candidate_is_as_old_as_its_oldest_token_and_has_a_ratio_only_if_all_have() -> None:
    young, old = block(version=9).experiences[0], block(version=2, ratio=False).experiences[1]
    one = candidate_of(4, Block((young, old)), 0)
    assert (one.min_version, one.has_ratio, one.num_experiences, one.offset) == (2, False, 2, 4)


DELIVERIES = st.lists(st.tuples(st.sampled_from(["a.0", "b.0"]), st.integers(0, 2), st.booleans()), max_size=12)


@given(DELIVERIES, st.integers(1, 2))
def test_no_revision_of_a_group_is_trained_more_than_max_uses_whatever_is_delivered(
    deliveries: list[tuple[str, int, bool]], max_uses: int
) -> None:
    buffer = Buffer({"usual": max_uses})
    trained: dict[tuple[str, int], int] = {}
    for offset, (group, revision, draw) in enumerate(deliveries):
        add(buffer, offset, block(group, revision=revision))
        if draw:
            for one in buffer.candidates("usual"):
                buffer.take([one])
                trained[one.group, one.revision] = trained.get((one.group, one.revision), 0) + 1
    assert all(times <= max_uses for times in trained.values())
    assert {use_key(group, revision, "usual"): times for (group, revision), times in trained.items()} == buffer.uses
    held = [one.group for one in buffer.candidates("usual")]
    assert len(held) == len(set(held)) and sorted(buffer.references()) == buffer.references()
