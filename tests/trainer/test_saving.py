"""Checkpoints and versions are stored beside the next step, and a version comes out after the checkpoint that falls due with
it.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import pytest

from infra.policies.manifest import decode_manifest
from infra.policies.prune import stored_bytes
from infra.policies.tensors import Tensor
from infra.settings.config import Keep
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.store import Pieces
from schemas import Batch, topics
from schemas.errors import StoreError
from tests.role import role_of
from tests.trainer.memory_run import FLOOR, STEPS, block, filled_log, journal, published, train
from trainer.batch.batch import PackedBatch
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal import checkpoint
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

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
    """Whether an object is weights of a version."""
    folder = key.split("/")[-2]
    return ("/anchors/" in key and folder == str(version)) or ("/deltas/" in key and folder.endswith(f"-{version}"))


def learner() -> CountingLearner:
    found = CountingLearner()
    found.fourth = threading.Event()
    return found


async def test_the_next_step_is_taken_while_a_checkpoint_is_being_stored() -> None:
    each = learner()
    store = SlowStore(each)
    log = await filled_log(store)
    await train(log, store, each, CONFIG)
    batches = [record for record in await journal(log) if isinstance(record, Batch)]
    assert [batch.step for batch in batches] == [*range(6)]
    assert [batch.version for batch in batches] == [*range(6)], "a batch names the version of the weights it meets"
    assert [event.version for event in await published(log)] == [*range(7)]
    assert [event.step for event in await published(log)] == [-1, *range(6)]


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


async def test_the_next_step_is_taken_while_a_version_is_being_stored() -> None:
    each = learner()
    store = SlowStore(each, version=3)
    log = await filled_log(store)
    await train(log, store, each, NO_CHECKPOINTS)
    assert any(is_part(key, 3) for key in store.puts), "there was something to wait for"
    batches = [record for record in await journal(log) if isinstance(record, Batch)]
    assert [batch.version for batch in batches] == [*range(6)], "a batch names the version of the weights it meets"
    assert [event.version for event in await published(log)] == [*range(7)]
    assert [event.step for event in await published(log)] == [-1, *range(6)]


async def test_a_version_is_what_its_steps_made_whatever_the_next_step_does_meanwhile() -> None:
    each, alone = learner(), learner()
    alone.fourth.set()
    slow, quick = SlowStore(each, version=3), MemoryStore()
    logs = await filled_log(slow), await filled_log(quick)
    await train(logs[0], slow, each, NO_CHECKPOINTS)
    await train(logs[1], quick, alone, NO_CHECKPOINTS)
    hashes = [[event.manifest_sha256 for event in await published(log)] for log in logs]
    assert len(hashes[0]) == 7 and len(set(hashes[0])) == 7
    contents = [[decode_manifest(store.get(event.manifest)).tensors for event in await published(log)]
                for log, store in zip(logs, (slow, quick), strict=True)]  # fmt: skip
    assert contents[0] == contents[1]


async def test_a_version_that_cannot_be_stored_ends_the_trainer_and_the_next_publishes_it() -> None:
    each = learner()
    store = SlowStore(each, version=3, failing=True)
    log = await filled_log(store)
    with pytest.raises(ExceptionGroup) as failed:
        await train(log, store, each, NO_CHECKPOINTS)
    assert failed.group_contains(StoreError, match="no space")
    assert [event.version for event in await published(log)] == [0, 1, 2]
    again, whole, alone = learner(), learner(), MemoryStore()
    again.fourth.set()
    whole.fourth.set()
    store._failing, store._learner = False, again
    await train(log, store, again, NO_CHECKPOINTS)
    await train(await filled_log(alone), alone, whole, NO_CHECKPOINTS)
    assert again.tensors() == whole.tensors()
    assert [event.version for event in await published(log)] == [*range(7)]
    assert [event.step for event in await published(log)] == [-1, *range(6)]


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
CONFIG_store_bound = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=1, max_steps=VERSIONS)
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

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        super().put_pieces(key, pieces)
        self.most = max(self.most, stored_bytes(self, FOLDERS))


async def run_within(store: DirectoryStore, keep: Keep) -> int:
    log = await filled_log(store)
    for sequence in range(2 * STEPS, 2 * VERSIONS):
        await log.publish(topics.BUFFER, block(sequence))
    await train(log, store, BigLearner(), CONFIG_store_bound, msgspec.structs.replace(FLOOR, keep=keep))
    return len(await published(log))


def test_twenty_five_versions_of_a_run_stay_within_the_bound_of_a_folder_store(tmp_path: Path) -> None:
    free = WatchedStore(tmp_path / "free", lambda folder: PLENTY)
    assert asyncio.run(run_within(free, Keep(store_gb=0))) == VERSIONS + 1
    bound = 3 * free.most // 5
    bounded = WatchedStore(tmp_path / "bounded", lambda folder: PLENTY)
    assert asyncio.run(run_within(bounded, Keep(store_gb=bound / 1e9))) == VERSIONS + 1
    assert bounded.most <= bound < free.most


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
