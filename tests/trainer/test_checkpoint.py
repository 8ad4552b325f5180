"""Checkpoints: whole or not there, the newest that verifies, never fewer than asked for."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.policies.manifest import decode_manifest
from infra.policies.tensors import Tensor
from infra.settings.config import Keep
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from schemas import Batch, topics
from schemas.errors import StoreError
from tests.role import role_of
from tests.trainer.memory_run import FLOOR, STEPS, block, filled_log, journal, published, train
from trainer.batch.batch import PackedBatch
from trainer.buffer.buffer import Known, Uses
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal import checkpoint
from trainer.journal.checkpoint import (
    Checkpoint,
    CheckpointPlace,
    Position,
    Take,
    load_newest,
    places,
    remove_unfinished,
    save,
)
from trainer.learners.channel import Channel
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner
from trainer.learners.snapshot import Snapshot
from trainer.loop.prune import stored_bytes
from trainer.state import (
    CHUNK_BYTES,
    OBJECT_BYTES,
    Piece,
    StoredState,
    Written,
    encode_index,
    find_layout,
    index_hash,
    joined_index,
    open_state,
    whole_hash,
    whole_pieces,
    write_pieces,
    write_whole,
)
from trainer.train import run_trainer


def state(step: int, **fields: object) -> Checkpoint:
    weights = {"weights": Tensor("F32", (2,), bytes([step % 251] * 8))}
    given = {"learner": weights, "uses": Uses(), "references": (), **fields}
    return Checkpoint(position=Position(step=step, version=step), **given)  # type: ignore[arg-type]


def saved(*numbers: int) -> MemoryStore:
    store = MemoryStore()
    for number in numbers:
        save(store, "r", state(number))
    return store


def keys(store: MemoryStore, step: int) -> list[str]:
    return [key for key in store.keys("checkpoints/r/") if f"/{step + 1:012d}-0/" in key]


@given(
    st.dictionaries(
        st.binary(min_size=16, max_size=16),
        st.builds(Known, st.integers(1, 2**32 - 1), st.integers(0, 2**62)),
        max_size=20,
    ),
    st.lists(st.integers(0, 2**62), max_size=20),
    st.integers(-1, 10**9),
)
def test_what_was_saved_is_loaded(known: dict[bytes, Known], references: list[int], step: int) -> None:
    store = MemoryStore()
    uses = Uses()
    for key, value in known.items():
        uses.put(key, value)
    each = state(step, uses=uses, references=tuple(references))
    save(store, "r", each)
    found = load_newest(store, "r")
    assert found is not None
    assert (found.position, dict(found.uses), found.references) == (each.position, known, tuple(references))
    assert {name: bytes(tensor.data) for name, tensor in found.learner.items()} == {
        name: bytes(tensor.data) for name, tensor in each.learner.items()
    }


OBJECTS = ("index.msgpack", "state-00000-00000.bin", "state.safetensors")


def damaged(data: bytes, how: str) -> bytes:
    """The bytes of an object after an accident."""
    return {"cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[how]


@pytest.mark.parametrize("take", [dict, StoredState.verified])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in OBJECTS for damage in ("cut", "flipped", "empty", "gone")),
        *(("manifest.json", damage) for damage in ("cut", "empty", "gone")),
    ],
)
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(damage: str, name: str, take: Take) -> None:
    store = saved(3, 6)
    (key,) = [key for key in keys(store, 6) if key.endswith(name)]
    data = store.get(key)
    store.delete(key)
    if damage != "gone":
        store.put(key, damaged(data, damage))
    found = load_newest(store, "r", take=take)
    assert found is not None and found.position.step == 3


def test_what_a_trainer_that_died_while_storing_left_is_removed_and_nothing_else() -> None:
    store = saved(3, 6)
    for place in ("000000000005-0", "000000000009-1", "000000000005-2", "000000000009-2", "000000000009-3"):
        store.put(f"checkpoints/r/{place}/state-00000-00000.bin", b"x")
    kept = {
        key
        for key in store.keys("")
        if not key.startswith(("checkpoints/r/000000000005-", "checkpoints/r/000000000009-1"))
    }
    assert remove_unfinished(store, "r", CheckpointPlace(6, 2)) == 3
    assert set(store.keys("")) == kept
    assert [place.step for place in places(store, "r")] == [3, 6]


def test_two_trainers_that_reach_the_same_step_write_to_different_places() -> None:
    store = saved(3)
    uses = Uses()
    uses.add(b"k" * 16, 5)
    save(store, "r", state(3, uses=uses), token=9)
    assert places(store, "r") == [CheckpointPlace(3, 0), CheckpointPlace(3, 9)]
    newest = load_newest(store, "r")
    older = load_newest(store, "r", before=CheckpointPlace(3, 9))
    assert newest is not None and newest.uses and older is not None and not older.uses


def test_a_store_that_fails_is_loud_and_no_reason_to_go_back() -> None:
    class Failing(MemoryStore):
        def get(self, key: str) -> bytes:
            raise StoreError("timed out")

    store = Failing()
    save(store, "r", state(3))
    with pytest.raises(StoreError, match="timed out"):
        load_newest(store, "r")


def test_states_have_equal_hashes_exactly_where_names_dtypes_shapes_and_bytes_are_equal() -> None:
    zeros = bytes(8)
    different = [
        {"a": Tensor("F32", (2,), zeros)}, {"b": Tensor("F32", (2,), zeros)}, {"a": Tensor("I32", (2,), zeros)},
        {"a": Tensor("F32", (1, 2), zeros)}, {"a": Tensor("F32", (2,), b"\1" + zeros[1:])}, {},
        {"a": Tensor("F32", (1,), zeros[:4]), "b": Tensor("F32", (1,), zeros[:4])},
    ]  # fmt: skip
    assert len({whole_hash(state) for state in different}) == len(different)
    pair = {"a": Tensor("F32", (1,), zeros[:4]), "b": Tensor("U8", (1,), b"x")}
    assert whole_hash(pair) == whole_hash(dict(reversed(pair.items())))


SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17)


def tensors(seed: int, sizes: list[int]) -> dict[str, Tensor]:
    random = np.random.default_rng(seed)
    return {f"t{at}": Tensor("U8", (size,), random.bytes(size)) for at, size in enumerate(sizes)}


@st.composite
def cut(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[list[Piece]]]:
    """A state, and its pieces at one to four ranks: each tensor cut anywhere, each piece at any rank."""
    state = tensors(draw(st.integers(0, 99)), draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    held: list[list[Piece]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, item in state.items():
        near = st.sampled_from([0, 1, CHUNK_BYTES // 2, CHUNK_BYTES, CHUNK_BYTES + 3, 2 * CHUNK_BYTES])
        inner = draw(st.lists(near | st.integers(0, max(1, item.num_bytes)), max_size=5))
        bounds = sorted({0, item.num_bytes, *(at for at in inner if at < item.num_bytes)})
        for start, stop in pairwise(bounds):
            held[draw(st.integers(0, len(held) - 1))].append(Piece(name, start, item.data[start:stop]))
    return state, held


def written(held: list[list[Piece]], store: MemoryStore, object_bytes: int) -> list[Written]:
    return [write_pieces(store, "f", rank, pieces, object_bytes=object_bytes) for rank, pieces in enumerate(held)]


def opened(store: MemoryStore, index: object) -> StoredState:
    data = encode_index(index)  # type: ignore[arg-type]
    store.put("f/index.msgpack", data)
    return open_state(store, "f", "f/index.msgpack", hashlib.sha256(data).hexdigest())


@settings(max_examples=60, deadline=None)
@given(cut(), st.sampled_from([CHUNK_BYTES, 2 * CHUNK_BYTES, OBJECT_BYTES]), st.data())
def test_a_state_has_the_same_bytes_however_ranks_share_it_and_one_hash_where_each_tensor_is_one_piece(
    given_state: tuple[dict[str, Tensor], list[list[Piece]]], object_bytes: int, data: st.DataObject
) -> None:
    state, held = given_state
    store = MemoryStore()
    found = opened(store, joined_index(find_layout(state), written(held, store, object_bytes)))
    if all(piece.data == state[piece.name].data for pieces in held for piece in pieces):
        assert index_hash(found.index) == whole_hash(state)
    assert {name: bytes(item.data) for name, item in found.items()} == {name: item.data for name, item in state.items()}
    for name, item in state.items():
        start = data.draw(st.integers(0, item.num_bytes))
        stop = data.draw(st.integers(start, item.num_bytes))
        assert bytes(found.read(name, start, stop)) == item.data[start:stop]
    for part in range(3):
        found.verify(part, 3)


def test_any_damaged_byte_is_noticed_by_one_of_the_readers() -> None:
    store = MemoryStore()
    state = tensors(2, [2 * CHUNK_BYTES + 5, 1])
    found = opened(store, write_whole(store, "f", state))
    whole = store.get("f/state-00000-00000.bin")
    for at in (0, CHUNK_BYTES - 1, CHUNK_BYTES, len(whole) - 1):
        store.put("f/state-00000-00000.bin", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        noticed = 0
        for part in range(2):
            try:
                found.verify(part, 2)
            except ValueError as error:
                noticed += "f/state-00000-00000.bin (rank 0)" in str(error)
        assert noticed == 1


CONFIG = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=3, max_steps=6)
NO_CHECKPOINTS = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=100, max_steps=6)
THIRD = "checkpoints/t/000000000003-"  # the checkpoint after three steps, which three more follow


class CountingLearner(ScriptedLearner):
    """Says when it takes its fourth step."""

    steps = 0
    fourth = threading.Event()

    def step(self, batch: PackedBatch, **how: object) -> StepStats:  # type: ignore[override]
        self.steps += 1
        if self.steps == 4:
            self.fourth.set()
        return super().step(batch, **how)  # type: ignore[arg-type]


class SlowStore(MemoryStore):
    """Stores the third checkpoint's state only once the step after it is taken. failing: or not at all. version: the same of
    what this version consists of, in place of the checkpoint.
    """

    def __init__(self, learner: CountingLearner, *, failing: bool = False, version: int = -1) -> None:
        super().__init__()
        self.puts: list[str] = []
        self._learner = learner
        self._failing = failing
        self._version = version

    def put(self, key: str, data: bytes) -> None:
        is_slow = key.startswith(THIRD) and "/state-" in key
        if self._version >= 0:
            is_slow = is_part(key, self._version)
        if is_slow:
            assert self._learner.fourth.wait(20), "the step waits for the upload"
            if self._failing:
                raise StoreError(f"put {key}: no space")
        super().put(key, data)
        self.puts.append(key)


class StoppingStore(SlowStore):
    """Stores the third version only once the step after it is taken, and asks the trainer to stop just before."""

    stop: Callable[[], object]

    def __init__(self, learner: CountingLearner) -> None:
        super().__init__(learner, version=3)

    def put(self, key: str, data: bytes) -> None:
        if is_part(key, 3):
            assert self._learner.fourth.wait(20), "the step waits for the upload"
            self.stop()
        super().put(key, data)


def is_part(key: str, version: int) -> bool:
    """True if an object is weights of a version."""
    folder = key.split("/")[-2]
    return ("/anchors/" in key and folder == str(version)) or ("/deltas/" in key and folder.endswith(f"-{version}"))


def learner() -> CountingLearner:
    found = CountingLearner()
    found.fourth = threading.Event()
    return found


async def test_a_failed_upload_ends_the_trainer_and_the_older_checkpoint_is_where_the_next_goes_on() -> None:
    each = learner()
    store = SlowStore(each, failing=True)
    log = await filled_log(store)
    with pytest.raises(ExceptionGroup) as failed:
        await train(log, store, each, CONFIG)
    assert failed.group_contains(StoreError, match="no space")
    found = checkpoint.load_newest(store, "t")
    assert found is not None and found.position.step == -1
    assert [event.version for event in await published(log)] == [0, 1, 2]
    again, whole, alone = learner(), learner(), MemoryStore()
    again.fourth.set()
    store._failing, store._learner = False, again
    await train(log, store, again, CONFIG)
    await train(await filled_log(alone), alone, whole, CONFIG)
    assert again.tensors() == whole.tensors()
    assert [event.version for event in await published(log)] == [*range(7)]


def test_whatever_keeps_a_rank_from_storing_its_part_is_reported_to_rank_0() -> None:
    class Full(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            raise MemoryError("no room for a copy")

    class Second(Channel):
        rank, world, sent = 1, 2, b""

        def __init__(self) -> None:
            """There is no rank 0 that it could reach."""

        def gather(self, data: bytes) -> list[bytes]:
            self.sent = data
            return []

    channel, each = Second(), tensors(0, [9])
    Snapshot(channel, Full(), "f", find_layout(each), whole_pieces(each)).write()
    assert b"MemoryError: no room for a copy" in channel.sent


async def test_a_version_is_what_its_steps_made_whatever_the_next_step_does_meanwhile() -> None:
    each, alone = learner(), learner()
    alone.fourth.set()
    slow, quick = SlowStore(each, version=3), MemoryStore()
    logs = await filled_log(slow), await filled_log(quick)
    await train(logs[0], slow, each, NO_CHECKPOINTS)
    await train(logs[1], quick, alone, NO_CHECKPOINTS)
    records = [record for record in await journal(logs[0]) if isinstance(record, Batch)]
    assert [batch.version for batch in records] == [*range(6)], "a batch names the version of the weights it meets"
    hashes = [[event.manifest_sha256 for event in await published(log)] for log in logs]
    assert len(hashes[0]) == 7 and len(set(hashes[0])) == 7
    contents = [[decode_manifest(store.get(event.manifest)).tensors for event in await published(log)]
                for log, store in zip(logs, (slow, quick), strict=True)]  # fmt: skip
    assert contents[0] == contents[1]


async def test_a_trainer_that_is_stopped_publishes_what_it_has_begun_to_publish() -> None:
    each = learner()
    store = StoppingStore(each)
    log = await filled_log(store)
    role = role_of("train", FLOOR, log, store)
    store.stop = partial(asyncio.get_running_loop().call_soon_threadsafe, role.stop.set)
    await run_trainer(role, NO_CHECKPOINTS, each, seed=3)
    found = checkpoint.load_newest(store, "t")
    steps = [event.step for event in await published(log)]
    assert found is not None and steps[-1] == found.position.step >= 2, "nothing that was trained is left unsaid"
    assert [event.version for event in await published(log)] == [*range(len(steps))]


VERSIONS = 24
FOLDERS = ("policies/main/", "checkpoints/t/")
PLENTY = (10**12, 10**12)


class BigLearner(ScriptedLearner):
    """Its weights are large beside what else a version consists of."""

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"big": Tensor("F32", (25_000,), self._weights.tobytes() * 3_125)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore({name: tensor for name, tensor in state.items() if name != "big"})


class WatchedStore(DirectoryStore):
    """Remembers the most bytes that versions and checkpoints took."""

    most = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        self.most = max(self.most, stored_bytes(self, FOLDERS))


async def run_within(store: DirectoryStore, keep: Keep, checkpoint_every: int = 1) -> int:
    config = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=checkpoint_every, max_steps=VERSIONS)
    log = await filled_log(store)
    for sequence in range(2 * STEPS, 2 * VERSIONS):
        await log.publish(topics.BUFFER, block(sequence))
    await train(log, store, BigLearner(), config, msgspec.structs.replace(FLOOR, keep=keep))
    return len(await published(log))


@pytest.mark.parametrize("checkpoint_every", [1, VERSIONS])
def test_twenty_five_versions_of_a_run_stay_within_the_bound_of_a_folder_store(
    tmp_path: Path, checkpoint_every: int
) -> None:
    free = WatchedStore(tmp_path / "free", lambda folder: PLENTY)
    assert asyncio.run(run_within(free, Keep(store_gb=0), checkpoint_every)) == VERSIONS + 1
    bound = 3 * free.most // 5
    bounded = WatchedStore(tmp_path / "bounded", lambda folder: PLENTY)
    assert asyncio.run(run_within(bounded, Keep(store_gb=bound / 1e9), checkpoint_every)) == VERSIONS + 1
    assert bounded.most <= bound < free.most


async def test_a_resumed_trainer_publishes_no_version_again_whose_tensors_are_gone(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, lambda folder: PLENTY)
    config = TrainerConfig(checkpoint_every=100, max_steps=STEPS)
    log, floor = await filled_log(store), msgspec.structs.replace(FLOOR, keep=Keep(store_gb=1e-9))
    await train(log, store, BigLearner(), config, floor)
    before = await published(log)
    anchors = {key.split("/")[4] for key in store.keys(FOLDERS[0]) if "/anchors/" in key}
    assert len(before) == STEPS + 1 and len(anchors) == FLOOR.pacing.max_staleness + 1
    checkpoint.remove(store, "t", [max(checkpoint.places(store, "t"))])
    await train(log, store, BigLearner(), config, floor)
    assert await published(log) == before


def test_publication_waits_with_an_alarm_until_the_disk_has_its_free_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def usage(folder: Path) -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return (50_000 if 20 < asked <= 32 else 10**9, 10**9)

    assert asyncio.run(run_within(DirectoryStore(tmp_path, usage), Keep())) == VERSIONS + 1
    assert "keep.free_share=0.1 must stay free" in caplog.text
