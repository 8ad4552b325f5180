"""From a draw to a batch: the journal record alone, with the log, gives the same items again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import decode, encode
from schemas.errors import BadFrame
from tests.trainer.buffered_blocks import block
from trainer.batch.assemble import Stamp, assemble, batch_items, check_blocks, step_seed, train_items
from trainer.buffer.buffer import candidate_of

STAMP = Stamp(run="r", token=4, step=9, version=8, phase="train", seed=77, config_hash="abc")


def drawn(offset: int, group: str, *, uses: int = 0, num_members: int = 2):
    one = block(group, num_members=num_members, advantage=0.5)
    return candidate_of(offset, one, uses), one


def test_a_group_is_listed_member_by_member_as_it_lies_in_its_block() -> None:
    items = batch_items(*drawn(31, "a.0", uses=2))
    assert [(one.id, one.offset, one.index, one.use) for one in items] == [
        ("a.0.0-0-0", 31, 0, 2),
        ("a.0.0-1-0", 31, 1, 2),
    ]
    assert {(one.lane, one.min_version, one.advantage, one.weight) for one in items} == {("usual", 3, 0.5, 1.0)}


def test_an_experience_without_an_advantage_is_journaled_with_none_of_it() -> None:
    one = block("a.0")
    assert {item.advantage for item in batch_items(candidate_of(0, one, 0), one)} == {0.0}


def test_the_record_carries_the_stamp_the_order_and_the_drops() -> None:
    gone = [
        (drawn(1, "b.0", num_members=3)[0], "stale"),
        (drawn(2, "c.0")[0], "stale"),
        (drawn(3, "d.0")[0], "no ratio"),
    ]
    batch, items = assemble(STAMP, [drawn(8, "z.0"), drawn(5, "a.0")], gone)
    assert msgspec.structs.asdict(STAMP).items() <= msgspec.structs.asdict(batch).items()
    assert batch.drops == {"stale": 5, "no ratio": 2}
    assert [one.item.offset for one in items] == [8, 8, 5, 5], "the draw's order, not the log's"
    assert [one.experience.id for one in items] == [one.id for one in batch.items]


def test_an_empty_draw_is_an_empty_batch() -> None:
    batch, items = assemble(STAMP, [])
    assert batch.items == () and items == []


@given(st.lists(st.integers(0, 10**9), unique=True, max_size=6), st.integers(1, 4))
def test_the_journaled_record_gives_the_same_items_from_the_log(offsets: list[int], num_members: int) -> None:
    groups = [drawn(offset, f"g{offset}.0", num_members=num_members) for offset in offsets]
    batch, items = assemble(STAMP, groups)
    stored = decode(encode(batch))
    again = train_items(stored, {one.offset: decode(encode(held)) for one, held in groups})
    assert [one.item for one in again] == [one.item for one in items]
    assert [one.experience.id for one in again] == [one.experience.id for one in items]
    assert [one.experience.tokens.tolist() for one in again] == [one.experience.tokens.tolist() for one in items]


@pytest.mark.parametrize("found", [{}, {5: block("other.0")}, {5: block("a.0", num_members=1)}])
def test_a_log_that_holds_something_else_there_is_an_error_that_says_where(found) -> None:
    batch, _ = assemble(STAMP, [drawn(5, "a.0")])
    with pytest.raises(BadFrame, match=r"step 9: the journal names a\.0\.0-\d-0 at buffer offset 5, index \d"):
        train_items(batch, found)


def test_a_block_that_was_altered_since_is_named_by_step_and_offset() -> None:
    one = block("a.0")
    batch, _ = assemble(STAMP, [(candidate_of(5, one, 0, b"d" * 16), one), drawn(6, "b.0")])
    check_blocks(batch, {5: b"d" * 16, 6: b"anything, as none was journaled"})
    with pytest.raises(BadFrame, match="step 9: buffer offset 5 holds another record"):
        check_blocks(batch, {5: b"e" * 16, 6: b""})


@given(st.integers(0, 2**40), st.integers(-1, 2**40))
def test_every_step_has_a_seed_of_its_own(seed: int, step: int) -> None:
    assert 0 <= step_seed(seed, step) < 2**63
    assert step_seed(seed, step) != step_seed(seed, step + 1)
    assert step_seed(seed, step) == step_seed(seed, step)
