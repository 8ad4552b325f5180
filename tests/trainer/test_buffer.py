"""The buffer: what is held, how often it may be trained, and that deliveries twice or late change nothing."""

from hypothesis import given
from hypothesis import strategies as st

from schemas import Block, encode
from tests.trainer.buffered_blocks import block, mixed
from trainer.buffer.buffer import Buffer, Known, candidate_of, use_key
from trainer.buffer.pool import Candidate


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
    assert add(restarted, 6, block("a.0", revision=1)) == "already trained", "what was trained is left as it is"


def test_an_amended_answer_that_was_trained_is_left_and_a_copy_that_waits_is_replaced() -> None:
    """A session of five turns rated as it goes: every rating amends what was said of all turns before it."""
    buffer = Buffer({"live": 1})
    trained: list[tuple[str, int]] = []
    offset = 0
    for rated in range(5):
        for turn in range(rated + 1):
            add(buffer, offset, block(f"turn{turn}.0", lane="live", num_members=1, revision=rated - turn))
            offset += 1
        if rated % 2:
            trained += [(one.group, one.revision) for one in buffer.candidates("live")]
            buffer.take(buffer.candidates("live"))
    trained += [(one.group, one.revision) for one in buffer.candidates("live")]
    assert trained == [("turn0.0", 1), ("turn1.0", 0), ("turn2.0", 1), ("turn3.0", 0), ("turn4.0", 0)]


def test_a_group_is_trained_again_once_each_time_it_was_sent_to_be_retrained() -> None:
    buffer = Buffer({"human": 1})
    for offset, (revision, retrained) in enumerate([(0, 0), (1, 1), (2, 1), (3, 2), (4, 0)]):
        reason = add(buffer, offset, block("a.0", lane="human", revision=revision, retrained=retrained))
        assert reason == ("already trained" if offset in (2, 4) else "")
        if not reason:
            buffer.take([only(buffer, "human")])
    assert len(buffer.uses) == 3


def test_a_group_in_half_use_keeps_its_uses_when_a_revision_takes_its_place() -> None:
    buffer = filled(block("a.0", lane="expert"))
    buffer.take([only(buffer, "expert")])
    assert add(buffer, 1, block("a.0", lane="expert", revision=1)) == ""
    assert (only(buffer, "expert").offset, only(buffer, "expert").uses) == (1, 1)
    buffer.take([only(buffer, "expert")])
    assert buffer.candidates("expert") == []


def test_uses_are_forgotten_below_the_horizon_unless_held_or_delivered_again() -> None:
    buffer = filled(*(block(f"{name}.0", lane="expert") for name in "abcd"))
    for number in (0, 0, 0, 0, 0):  # a and b twice, c once
        buffer.take(buffer.candidates("expert")[number : number + 1])
    assert add(buffer, 9, block("b.0", lane="expert")) == "already trained"
    assert (len(buffer.uses), buffer.forget_uses(5)) == (3, 1)
    assert add(buffer, 10, block("b.0", lane="expert")) == "already trained", "it came again within the horizon"
    assert only_uses(buffer, "c.0") == 1, "it waits for its second use"
    assert buffer.forget_uses(5) == 0


def only_uses(buffer: Buffer, group: str) -> int:
    return next(one.uses for one in buffer.candidates("expert") if one.group == group)


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
    assert dict(buffer.uses) == {use_key("a.0", 0, "usual"): Known(1, 9)}
    assert add(buffer, 9, block("a.0")) == "already trained"


def test_a_use_that_the_journal_tells_of_counts_for_whichever_revision_is_held() -> None:
    for held, told in ((0, 1), (1, 0)):
        buffer = filled(block("a.0", revision=held), block("e.0", lane="expert", revision=held))
        buffer.count_use(candidate_of(9, block("a.0", revision=told), 0))
        buffer.count_use(candidate_of(9, block("e.0", lane="expert", revision=told), 0))
        assert not buffer.candidates("usual") and only(buffer, "expert").uses == 1
        assert add(buffer, 9, block("a.0", revision=2)) == "already trained"
    buffer = filled(block("a.0"))
    buffer.count_use(candidate_of(9, block("a.0", revision=1, retrained=1), 0))
    assert only(buffer).uses == 0, "what was sent to be trained again is counted by itself"


def test_a_candidate_is_as_old_as_its_oldest_token_and_has_a_ratio_only_if_all_have() -> None:
    young, old = block(version=9).experiences[0], block(version=2, ratio=False).experiences[1]
    one = candidate_of(4, Block((young, old)), 0)
    assert (one.min_version, one.has_ratio, one.num_experiences, one.offset) == (2, False, 2, 4)


DELIVERIES = st.lists(
    st.tuples(st.sampled_from(["a.0", "b.0"]), st.integers(0, 2), st.booleans(), st.booleans()), max_size=12
)


@given(DELIVERIES, st.integers(1, 2))
def test_no_group_is_trained_more_than_max_uses_whatever_is_delivered_drawn_or_restarted(
    deliveries: list[tuple[str, int, bool, bool]], max_uses: int
) -> None:
    buffer = Buffer({"usual": max_uses})
    trained: dict[str, int] = {}
    for offset, (group, revision, draw, restart) in enumerate(deliveries):
        add(buffer, offset, block(group, revision=revision))
        if draw:
            for one in buffer.candidates("usual"):
                buffer.take([one])
                trained[one.group] = trained.get(one.group, 0) + 1
        if restart:
            held = buffer.candidates("usual")
            blocks = buffer.look_at(held)
            buffer = Buffer({"usual": max_uses}, buffer.uses)
            assert [add(buffer, one.offset, back) for one, back in zip(held, blocks, strict=True)] == [""] * len(held)
    assert all(times <= max_uses for times in trained.values())
    assert {use_key(group, 0, "usual"): times for group, times in trained.items()} == {
        key: known.count for key, known in buffer.uses
    }
    names = [one.group for one in buffer.candidates("usual")]
    assert len(names) == len(set(names)) and sorted(buffer.references()) == buffer.references()
