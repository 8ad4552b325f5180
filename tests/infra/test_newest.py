"""The map that forgets what was used longest ago."""

from infra.newest import Newest


def test_the_entry_used_longest_ago_is_forgotten() -> None:
    newest = Newest[str, int](2)
    newest.put("a", 1)
    newest.put("b", 2)
    assert newest.get("a") == 1
    newest.put("c", 3)
    assert [*newest] == ["a", "c"] and newest.get("b") is None and "b" not in newest


def test_asking_whether_an_entry_is_there_does_not_make_it_the_newest() -> None:
    newest = Newest[str, None](2)
    newest.put("a", None)
    newest.put("b", None)
    assert "a" in newest
    newest.put("c", None)
    assert [*newest] == ["b", "c"]


def test_sizes_never_add_up_to_more_than_the_bound() -> None:
    newest = Newest[str, bytes](max_size=10, size=len)
    newest.put("a", bytes(4))
    newest.put("b", bytes(4))
    newest.put("a", bytes(6))
    assert [*newest] == ["b", "a"] and newest.total_size == 10
    newest.put("c", bytes(3))
    assert [*newest] == ["a", "c"] and newest.total_size == 9
    newest.put("too large", bytes(11))
    assert len(newest) == 0 and newest.total_size == 0


def test_an_entry_can_be_taken_out() -> None:
    newest = Newest[str, bytes](5, max_size=10, size=len)
    newest.put("a", b"1234")
    assert newest.pop("a") == b"1234" and newest.pop("a") is None
    assert len(newest) == 0 and newest.total_size == 0
