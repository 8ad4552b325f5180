"""How often groups were trained: counted by key, whatever brought them, and forgotten with the horizon."""

from trainer.buffer.buffer import COUNTS, KEY_BYTES, Known, Uses, use_key


def test_counts_and_offsets_of_any_size_are_kept_apart() -> None:
    uses = Uses()
    for key, known in ((b"a", Known(0, 0)), (b"b", Known(COUNTS - 1, 2**40)), (b"c", Known(3, 7))):
        uses.put(key, known)
        assert dict(uses)[key] == known and uses.times(key) == known.count
    assert COUNTS == 2**32
    assert uses.times(b"unknown") == 0 and len(uses) == 3


def test_a_use_counts_one_more_and_keeps_the_newest_delivery() -> None:
    uses = Uses()
    for offset in (5, 3, 9):
        uses.add(b"a", offset)
    assert dict(uses) == {b"a": Known(3, 9)}
    uses.add(b"b", 0)
    uses.add(b"b", 0)
    assert dict(uses)[b"b"] == Known(2, 0)


def test_a_copy_stays_as_it_was() -> None:
    uses = Uses()
    uses.add(b"a", 1)
    copy = uses.copy()
    uses.add(b"a", 2)
    uses.add(b"b", 2)
    assert dict(copy) == {b"a": Known(1, 1)}


def test_only_what_was_last_delivered_below_the_offset_and_is_not_held_is_forgotten() -> None:
    uses = Uses()
    for key, offset in ((b"held", 3), (b"old", 3), (b"at", 5), (b"new", 6)):
        uses.put(key, Known(7, offset))
    assert uses.forget_below(5, {b"held"}) == 1
    assert {key for key, _ in uses} == {b"held", b"at", b"new"}


def test_a_delivery_is_remembered_with_the_uses_of_its_group_retraining_and_lane() -> None:
    keys = [use_key(*parts) for parts in (("a", 0, "b"), ("a", 1, "b"), ("a", 0, "c"), ("d", 0, "b"))]
    assert len(set(keys)) == 4 and {len(key) for key in keys} == {KEY_BYTES}
    uses = Uses()
    uses.put(keys[0], Known(2, 4))
    assert (uses.delivered(keys[0], 6), uses.delivered(keys[0], 5), uses.delivered(keys[1], 6)) == (2, 2, 0)
    assert dict(uses) == {keys[0]: Known(2, 6)}, "a group that was never trained takes no room"
