"""What steps remember, kept in a partition's file by what changed of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.chain.processor import Memory, Value
from infra.store.directory import DirectoryStore
from infra.store.snapshots import read
from streams.collect.pending import PendingFile
from streams.collect.snapshots import write

KEEP_MS = 1_000
LIMIT = 4
# "" saves; a number is remembered under the key, None forgets it.
DONE = st.lists(st.tuples(st.sampled_from(("", *"abcdefg")), st.none() | st.integers(0, 9)), max_size=60)


class KeptFile:
    """A partition's file with one memory, on which things are done and saved."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self.pending = PendingFile(path)
        self.state = self.pending.load({"said": Memory(limit)})
        self.memory = self.state.memories["said"]

    def save(self) -> None:
        asyncio.run(self.pending.save(self.state, KEEP_MS))

    def close(self) -> None:
        self.pending.close()


def loaded(path: Path, limit: int = LIMIT) -> Memory:
    kept = KeptFile(path, limit)
    kept.close()
    return kept.memory


def do(memory: Memory, done: Sequence[tuple[str, int | None]], save: "KeptFile | None" = None) -> None:
    for key, value in done:
        if key and value is None:
            memory.discard(key)
        elif key:
            memory.set(key, value)
        elif save is not None:
            save.save()


@given(done=DONE)
def test_a_memory_of_which_only_changes_are_saved_is_read_as_it_was(
    done: list[tuple[str, int | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, plain = tmp_path_factory.mktemp("file") / "collect-0.sqlite", Memory(LIMIT)
    do(plain, done)
    kept = KeptFile(path)
    do(kept.memory, done, kept)
    kept.save()
    kept.close()
    assert loaded(path).to_bytes() == kept.memory.to_bytes() == plain.to_bytes()


@given(done=DONE)
def test_changes_alone_make_the_same_memory(done: list[tuple[str, int | None]]) -> None:
    memory, copy = Memory(LIMIT), dict[str, Value]()
    for at, one in enumerate(done):
        do(memory, [one])
        if at % 3 == 0:
            gone, entries = memory.changes()
            for key in gone:
                copy.pop(key, None)
            copy |= entries
    gone, entries = memory.changes()
    for key in gone:
        copy.pop(key, None)
    copy |= entries
    assert msgspec.msgpack.encode(list(copy.items())) == memory.to_bytes()
    assert memory.changes() == ((), {})


def test_what_a_save_writes_does_not_grow_with_what_is_remembered(tmp_path: Path) -> None:
    written = {}
    for size in (10, 4096):
        kept = KeptFile(tmp_path / f"{size}.sqlite", size)
        for number in range(size):
            kept.memory.set(f"rater {number}", [number, 1, 0])
        kept.save()
        connection = kept.pending._connection
        before = connection.total_changes
        kept.memory.set("rater 3", [3, 2, 0])
        kept.memory.set("one more", [1, 1, 0])
        kept.save()
        written[size] = connection.total_changes - before
        kept.close()
    assert written[10] == written[4096] < 20


def test_a_memory_that_comes_into_use_later_replaces_what_the_file_had_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "collect-0.sqlite"
    kept = KeptFile(path)
    kept.memory.set("old", 1)
    kept.save()
    kept.close()
    pending = PendingFile(path)
    state = pending.load({})
    state.memories["said"] = Memory(LIMIT)
    state.memories["said"].set("new", 2)
    asyncio.run(pending.save(state, KEEP_MS))
    pending.close()
    assert list(loaded(path)) == ["new"]


def test_a_smaller_limit_forgets_the_oldest_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "collect-0.sqlite"
    kept = KeptFile(path)
    do(kept.memory, [("a", 1), ("b", 2), ("c", 3), ("d", 4)])
    kept.save()
    kept.close()
    smaller = KeptFile(path, 2)
    assert list(smaller.memory) == ["c", "d"]
    smaller.memory.set("e", 5)
    smaller.save()
    smaller.close()
    assert list(loaded(path, 2)) == ["d", "e"]


def test_a_snapshot_carries_each_memory_as_its_bytes(tmp_path: Path) -> None:
    path, store = tmp_path / "collect-0.sqlite", DirectoryStore(tmp_path / "store")
    kept = KeptFile(path)
    do(kept.memory, [("b", 1), ("a", 2), ("b", 3)])
    kept.save()
    kept.memory.set("c", [1, 2.5, "three"])
    kept.state.next_offset = 7
    kept.save()
    snapshot = write(store, "a/collect-0", path, KEEP_MS, lambda: False)
    assert snapshot is not None
    stored = read(store, snapshot.parts["memories"])
    assert msgspec.msgpack.decode(stored, type=dict[str, bytes]) == {"said": kept.memory.to_bytes()}
    taken = PendingFile(tmp_path / "other" / "collect-0.sqlite")
    taken.adopt(store, snapshot)
    assert taken.load({"said": Memory(LIMIT)}).memories["said"].to_bytes() == kept.memory.to_bytes()
    assert msgspec.msgpack.decode(kept.memory.to_bytes()) == [["b", 3], ["a", 2], ["c", [1, 2.5, "three"]]]
    taken.close()
    kept.close()
