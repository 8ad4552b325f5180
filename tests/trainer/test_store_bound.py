"""A folder store stays within its bound, and the disk keeps its free share."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from infra.policies.fetch import PolicyFetcher
from infra.policies.prune import prune, stored_bytes
from infra.policies.tensors import Tensor
from infra.settings.config import Keep
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.store import Pieces
from schemas import topics
from schemas.errors import PolicyRefused
from tests.infra.weights.test_publish import put_run
from tests.trainer.memory_run import FLOOR, STEPS, block, filled_log, published, train
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.checkpoint import places
from trainer.learners.scripted import ScriptedLearner

VERSIONS = 24
CONFIG = TrainerConfig(lanes={"usual": LaneConfig()}, checkpoint_every=1, max_steps=VERSIONS)
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
    await train(log, store, BigLearner(), CONFIG, msgspec.structs.replace(FLOOR, keep=keep))
    return len(await published(log))


def test_twenty_five_versions_of_a_run_stay_within_the_bound_of_a_folder_store(tmp_path: Path) -> None:
    free = WatchedStore(tmp_path / "free", lambda folder: PLENTY)
    assert asyncio.run(run_within(free, Keep(store_gb=0))) == VERSIONS + 1
    bound = free.most // 2
    bounded = WatchedStore(tmp_path / "bounded", lambda folder: PLENTY)
    assert asyncio.run(run_within(bounded, Keep(store_gb=bound / 1e9))) == VERSIONS + 1
    assert bounded.most <= bound < free.most


def test_below_the_bound_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, lambda folder: PLENTY)
    asyncio.run(run_within(store, Keep(store_gb=1e-9)))
    steps = [place.step for place in places(store, "t")]
    assert steps[-CONFIG.keep_checkpoints :] == [*range(VERSIONS - CONFIG.keep_checkpoints, VERSIONS)]


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


def test_a_needed_version_stays_when_those_around_it_go() -> None:
    store = MemoryStore()
    events, weights = put_run(store, 40)
    assert prune(store, "main", oldest=39, needed={3}) > 0
    for version in (3, 39):
        assert dict(PolicyFetcher(store, "main").fetch(events[version]).tensors) == weights[version]
    with pytest.raises(PolicyRefused, match="incomplete"):
        PolicyFetcher(store, "main").fetch(events[12])
