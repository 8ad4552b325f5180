"""State file: crashes, rebuilds and any order of records decide alike; memories are saved by their changes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chain.processor import Memory
from schemas import Block, Control, Experience
from streams.collect.feedback import FeedbackRules
from streams.collect.pending import PendingFile
from streams.collect.rules import Rules
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    FakePartition,
    answer,
    block,
    buffered,
    decisions,
    folded,
    stub,
)

RULES = Rules(
    deadline_ms=DEADLINE_MS * 1000,
    keep_ms=10_000_000_000,
    sources={"csat": FeedbackRules(window_ms=400, default=0.5, late="amend")},
)


def whole_group(index: int, sizes: list[int], dropped: set[int]) -> list[Block | Control]:
    """All records of one rollout group, split into blocks of the given sizes, stubs for the dropped."""
    group, size = f"t{index}.0", sum(sizes)
    records: list[Block | Control] = []
    start = 0
    for number in sizes:
        members: list[Experience] = []
        for episode in range(start, start + number):
            if episode in dropped:
                records.append(stub(group, episode, size=size))
            else:
                members.append(answer(group, episode, size=size))
        if members:
            records.append(block(*members))
        start += number
    return records


groups = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.sets(st.integers(0, 8), max_size=4)),
    min_size=1,
    max_size=4,
).map(lambda shapes: [whole_group(index, sizes, dropped) for index, (sizes, dropped) in enumerate(shapes)])


@settings(max_examples=25, deadline=None)
@given(groups, st.randoms(use_true_random=False), st.integers(0, 6))
def test_any_interleaving_and_duplication_gives_the_same_closures(
    given_groups: list[list[Block | Control]], random: object, doubles: int
) -> None:
    records = [record for group in given_groups for record in group]
    expected = folded(FakePartition(step_ms=1).extend(records), RULES)
    shuffled = list(records)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for _ in range(doubles):
        place = random.randrange(len(shuffled) + 1)  # type: ignore[attr-defined]
        shuffled.insert(place, random.choice(records))  # type: ignore[attr-defined]
    got = folded(FakePartition(step_ms=1).extend(shuffled), RULES)
    assert buffered(got) == buffered(expected)
    assert ends(got) == ends(expected)


def ends(results: list[object]) -> set[tuple[object, ...]]:
    found = [
        (c.group, c.attempt, c.revision, c.outcome, c.reason, c.mean_reward, tuple(sorted(c.drops.items())))
        for c in (decision.closure for decision in decisions(results))  # type: ignore[arg-type]
    ]
    assert len(found) == len({entry[:3] for entry in found})
    return set(found)


def test_a_damaged_file_is_put_aside_and_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "collect-0.sqlite"
    path.write_bytes(b"SQLite format 3\x00" + b"garbage" * 500)
    pending = PendingFile(path)
    assert pending.load({}).next_offset == 0
    pending.close()
    assert path.with_suffix(".damaged").exists()


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
