"""State file: crashes, rebuilds and any order of records decide alike; memories are saved by their changes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chain.processor import Memory
from schemas import Block, Control, Experience
from streams.collect.feedback import FeedbackRules
from streams.collect.fold import Decision, fold, wanted
from streams.collect.pending import PendingFile
from streams.collect.rules import Rules, group_named
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    FakePartition,
    answer,
    block,
    buffered,
    decisions,
    folded,
    said,
    scored,
    stub,
    tick,
)

RULES = Rules(
    deadline_ms=DEADLINE_MS * 1000,
    keep_ms=10_000_000_000,
    sources={"csat": FeedbackRules(window_ms=400, default=0.5, late="amend")},
)
SHORT = Rules(
    deadline_ms=150,
    keep_ms=10_000_000_000,
    sources={"csat": FeedbackRules(window_ms=120, default=None, late="retrain")},
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


class Worker:
    """Folds an inbox with its state in a file; dies and comes back at will, as the collector does it."""

    def __init__(self, path: Path, inbox: FakePartition, rules: Rules) -> None:
        self.inbox, self.rules = inbox, rules
        self.pending = PendingFile(path)
        self.state = self.pending.load({})

    def batch(self, until: int, *, save: bool) -> list[Decision]:
        """Fold up to `until`, publish; save or die before it."""

        async def run() -> list[Decision]:
            arrivals = self.inbox.arrivals[self.state.next_offset : until]
            self.pending.look_up(self.state, {name for arrival in arrivals if (name := group_named(arrival.value))})
            made: list[Decision] = []
            for arrival in arrivals:
                fetched = {offset: self.inbox.block_at(offset) for offset in wanted(self.state, arrival, self.rules)}
                made += (await fold(self.state, arrival, self.rules, scored, fetched)).decisions
            if save:
                await self.pending.save(self.state, self.rules.keep_ms)
            return made

        return asyncio.run(run())

    def die(self) -> None:
        self.pending.close()


mixed = st.lists(
    st.one_of(
        st.tuples(st.just("block"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 1)),
        st.tuples(st.just("live"), st.integers(0, 2), st.just(0), st.just(0)),
        st.tuples(st.just("stub"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 1)),
        st.tuples(st.just("said"), st.integers(0, 2), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("tick"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("unreadable"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=40,
)


def record_of(kind: str, group: int, number: int, attempt: int) -> Block | Control | None:
    if kind == "block":
        return block(answer(f"t{group}.0", number, attempt=attempt))
    if kind == "live":
        return block(answer(f"live{group}.0", 0, size=1, lane="live"))
    if kind == "stub":
        return stub(f"t{group}.0", number, attempt=attempt)
    if kind == "said":
        return said(
            f"hr-live{group}.0.0-0-0", number / 5, id=str(number), type="retraction" if number == 5 else "value"
        )
    return tick() if kind == "tick" else None


@settings(max_examples=25, deadline=None)
@given(mixed, st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_crashes_and_rebuilds_decide_as_one_uninterrupted_worker(
    steps: list[tuple[str, int, int, int]], lives: list[tuple[int, bool, bool]]
) -> None:
    inbox = FakePartition(step_ms=20).extend(record_of(*step) for step in steps)
    expected = {key_of(decision): decision.closure for decision in decisions(folded(inbox, SHORT))}
    contents = [sent for decision in decisions(folded(inbox, SHORT)) for sent in decision.blocks]
    published: dict[tuple[str, int, int], object] = {}
    sent_blocks: list[Block] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "collect-0.sqlite"
        done, turn = 0, 0
        while done < len(inbox.arrivals):
            length, save, lose_file = lives[turn % len(lives)]
            # After as many deaths as there are lives the worker stays up.
            save, lose_file = save or turn >= len(lives), lose_file and turn < len(lives)
            worker = Worker(path, inbox, SHORT)
            for decision in worker.batch(min(done + length, len(inbox.arrivals)), save=save):
                if key_of(decision) not in published:
                    published[key_of(decision)] = decision.closure
                    sent_blocks += decision.blocks
            done = worker.state.next_offset if save else done
            worker.die()
            if lose_file:
                path.unlink(missing_ok=True)
                path.with_name(path.name + "-wal").unlink(missing_ok=True)
                path.with_name(path.name + "-shm").unlink(missing_ok=True)
            turn += 1
    assert published == expected
    assert sorted(map(ids_of, sent_blocks)) == sorted(map(ids_of, contents))


def key_of(decision: Decision) -> tuple[str, int, int]:
    return (decision.closure.group, decision.closure.attempt, decision.closure.revision)


def ids_of(sent: Block) -> list[tuple[str, int, str, float | None]]:
    return [(member.id, member.revision, member.lane, member.reward) for member in sent.experiences]


def test_a_closed_group_leaves_no_block_in_the_file(tmp_path: Path) -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0)), block(answer("t.0", 1)), block(answer("u.0", 0))])
    worker = Worker(tmp_path / "collect-0.sqlite", inbox, RULES)
    for until in range(1, 4):
        worker.batch(until, save=True)
    worker.die()
    reopened = Worker(tmp_path / "collect-0.sqlite", inbox, RULES)
    assert list(reopened.state.groups) == ["u.0"]
    assert reopened.state.frames.get(2).group == "u.0"
    assert reopened.pending._connection.execute("SELECT offset FROM frames").fetchall() == [(2,)]
    reopened.die()


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
