"""Snapshots in a store: whole or not at all, checked, shared where nothing changed, and bounded in number."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.store import snapshots
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.snapshots import SnapshotDamaged, candidates, prune, read, remove, save
from infra.store.store import Store
from schemas.errors import StoreError
from tests.starts import newest

SERIES = "app/collect-0"


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path / "store")


def never(reason: str, line: str) -> None:
    raise AssertionError(line)


def told() -> tuple[list[str], Callable[[str, str], None]]:
    reasons: list[str] = []
    return reasons, lambda reason, line: reasons.append(reason)


def test_what_was_saved_is_read_again(store: Store) -> None:
    assert newest(store, SERIES, never) is None
    saved = save(store, SERIES, 7, [("open/0", b"a" * 5000), ("empty", b"")], {"now_ms": 5})
    found = newest(store, SERIES, never)
    assert found == saved
    assert (found.position, found.about) == (7, {"now_ms": 5})
    assert {name: read(store, part) for name, part in found.parts.items()} == {"open/0": b"a" * 5000, "empty": b""}
    assert 0 < found.stored_bytes < 5000
    assert newest(store, "app/collect-1", never) is None


def test_a_part_that_has_not_changed_is_not_written_again(store: Store) -> None:
    first = save(store, SERIES, 7, [("a", b"same"), ("b", b"old")], {})
    second = save(store, SERIES, 9, [("a", b"same"), ("b", b"new")], {}, before=first)
    assert second.parts["a"].key == first.parts["a"].key
    assert second.parts["b"].key != first.parts["b"].key
    assert len(list(store.keys("snapshots/"))) == 3 + 2


def test_a_late_writer_of_an_older_position_does_not_win(store: Store) -> None:
    ahead = save(store, SERIES, 90, [("a", b"ahead")], {})
    save(store, SERIES, 70, [("a", b"late")], {})
    assert newest(store, SERIES, never) == ahead


def test_a_manifest_that_names_a_part_that_is_gone_is_passed_over_and_said(store: Store) -> None:
    first = save(store, SERIES, 7, [("a", b"first")], {})
    second = save(store, SERIES, 9, [("a", b"second")], {})
    store.delete(second.parts["a"].key)
    reasons, tell = told()
    assert newest(store, SERIES, tell) == first
    assert reasons == [snapshots.MISSING]


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: b"", lambda data: data[:9] + bytes([data[9] ^ 255]) + data[10:]]
)
def test_a_damaged_part_is_never_read_as_another(store: Store, change: Callable[[bytes], bytes]) -> None:
    saved = save(store, SERIES, 7, [("a", bytes(range(256)) * 9)], {})
    part = saved.parts["a"]
    store.put(part.key, change(store.get(part.key)))
    with pytest.raises(SnapshotDamaged, match="part snapshots/app/collect-0/parts/"):
        read(store, part)


def test_pruning_keeps_two_and_what_they_name(store: Store) -> None:
    before = None
    for position in range(10, 60, 10):
        parts = [("same", b"same"), ("own", f"{position}".encode())]
        before = save(store, SERIES, position, parts, {}, before=before)
    save(store, "app/collect-1", 1, [("a", b"another series")], {})
    assert prune(store, SERIES) == 3 + 3
    assert [one.position for one in candidates(store, SERIES, never)] == [50, 40]
    assert [read(store, part) for part in newest(store, SERIES, never).parts.values()] == [b"same", b"50"]  # type: ignore[union-attr]
    assert newest(store, "app/collect-1", never) is not None
    assert prune(store, SERIES) == 0


def test_pruning_leaves_what_another_writes_beyond_it_and_takes_what_was_never_finished_below(store: Store) -> None:
    class Dies(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            if "/manifests/" in key:
                raise StoreError("died before the manifest")
            store.put(key, data)

    for position in (5, 65):
        with pytest.raises(StoreError):
            save(Dies(), SERIES, position, [("a", f"half {position}".encode())], {})
    for position in (40, 60):
        save(store, SERIES, position, [("a", f"{position}".encode())], {})
    prune(store, SERIES)
    left = [key.rpartition("/")[2].partition("-")[0] for key in store.keys(f"snapshots/{SERIES}/parts/")]
    assert [int(one) for one in left] == [40, 60, 65]


def test_a_snapshot_whose_shared_part_was_removed_meanwhile_is_not_left_behind(store: Store) -> None:
    first = save(store, SERIES, 7, [("a", b"same")], {})
    store.delete(first.parts["a"].key)
    with pytest.raises(SnapshotDamaged, match="removed while it was written"):
        save(store, SERIES, 9, [("a", b"same")], {}, before=first)
    assert newest(store, SERIES, lambda reason, line: None) is None


def test_one_of_another_log_is_removed_with_its_parts(store: Store) -> None:
    first = save(store, SERIES, 900, [("a", b"same"), ("b", b"own")], {})
    remove(store, first)
    assert list(store.keys("snapshots/")) == []
    save(store, SERIES, 9, [("a", b"same")], {})
    assert newest(store, SERIES, never) is not None
