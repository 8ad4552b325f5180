"""How often groups were trained: counted by key, whatever brought them, and forgotten with the horizon."""

from trainer.buffer.buffer import COUNTS, KEY_BYTES, REVISIONS, Known, Uses, keys_of, use_key


def test_a_key_is_the_same_in_every_release() -> None:
    """BLAKE2b-128 of group, how often it was sent to be retrained, and lane."""
    assert use_key("a.0", 0, "usual").hex() == "b72de6cab3a36ca1a565df7d5934da16"
    assert use_key("a.0", 2, "usual").hex() == "16a0078b3351b188fd335a117f091abb"
    assert len(use_key("a.0", 0, "live")) == KEY_BYTES == 16
    assert len({use_key(*of) for of in (("a", 0, "b"), ("a", 1, "b"), ("a", 0, "c"), ("d", 0, "b"))}) == 4


def test_uses_of_an_earlier_release_are_found_under_every_revision_it_may_have_counted() -> None:
    assert len(keys_of("a.0", 3, 0, "usual")) == 4, "its own and those of revisions 1 to 3"
    assert len(keys_of("a.0", 10**6, 0, "usual")) == 1 + REVISIONS == 257
    assert keys_of("a.0", 3, 1, "usual") == [use_key("a.0", 1, "usual")]


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


def test_a_delivery_is_remembered_under_every_key_its_uses_lie_under_and_their_sum_is_told() -> None:
    uses = Uses()
    own, old = keys_of("a.0", 1, 0, "usual")
    uses.put(own, Known(1, 9))
    uses.put(old, Known(2, 4))
    assert uses.of_group("a.0", 1, 0, "usual", 6) == 3
    assert dict(uses) == {own: Known(1, 9), old: Known(2, 6)}
    assert uses.of_group("b.0", 1, 0, "usual", 6) == 0 and len(uses) == 2, "what was never trained takes no room"


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
