"""What each rank of test_deepspeed_learner runs to check that ranks publish their own weights: see deepspeed_ranks.py."""

from pathlib import Path

import pytest
from deepspeed_ranks import LANES
from trainer_samples import random_items

from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import tensor_entries
from infra.policies.publish import NewVersion
from infra.store.directory import DirectoryStore
from infra.store.store import Pieces
from schemas.errors import StoreError
from trainer.batch.batch import pack
from trainer.config import TrainerConfig
from trainer.learners.copies import Weights
from trainer.learners.deepspeed import DeepSpeedLearner


class Full(DirectoryStore):
    """A store that takes nothing while `marker` is there."""

    marker: Path

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        if self.marker.exists():
            raise StoreError("disk full")
        super().put_pieces(key, pieces)


def check_weights(model: str, stage: int, folder: Path) -> None:
    """Versions of ranks are those of one process; each rank holds a part; one that cannot store its own is named."""
    config = TrainerConfig(lanes=LANES, threads=1, dtype="bfloat16" if stage else "float32")
    learner = DeepSpeedLearner(model, config, stage=stage)
    store = Full(folder / "store")
    store.marker = folder / "full"
    if learner.rank:
        learner.follow(store)
        return
    others_store = DirectoryStore(folder / "store")  # rank 0 can still write: it is the others who are full
    follower, previous, whole = PolicyFetcher(others_store, "main"), None, {}
    for version in range(4):
        before, whole = whole, learner.tensors()
        weights = learner.weights()
        held = sum(each.num_bytes for each in weights._tensors.values())
        assert 0 < held < 0.8 * sum(each.num_bytes for each in whole.values()), "a rank holds its own part alone"
        assert weights.entries() == tensor_entries(whole) and weights.not_finite() == ""
        learner.step(pack(random_items(version), max_tokens=40, version=5), learning_rate=3e-6, seed=version)
        new = NewVersion(policy="main", token=3, version=version, parent=version - 1, step=version)
        event = weights.publish(others_store, new, previous=previous, probe=None)
        fetched = follower.fetch(event)
        assert fetched.tensors == whole, "what was published is from before the step"
        assert ("changed_share" in event.stats) == (version > 0 and stage > 0), "a step changes every value of 32 bits"
        assert PolicyFetcher(others_store, "main").fetch(event).tensors == whole, "from what is whole in the store"
        previous = weights
        assert whole != before
    refused(learner, store.marker, others_store, previous)
    assert learner.step(pack(random_items(9), max_tokens=40, version=5), learning_rate=3e-6, seed=9).finite
    learner.weights()  # and never published
    learner.close()
    print(f"stage {stage} agrees")


def refused(learner: DeepSpeedLearner, marker: Path, store: DirectoryStore, previous: Weights | None) -> None:
    """A rank that cannot store its part is named, no manifest is there, and the next version is published as ever."""
    marker.touch()
    new = NewVersion(policy="main", token=3, version=4, parent=3, step=4)
    with pytest.raises(StoreError, match="rank 1: disk full"):
        learner.weights().publish(store, new, previous=previous, probe=None)
    assert not [key for key in store.keys("policies/main/3/manifests/") if key.endswith("/4.json")]
    marker.unlink()
    weights = learner.weights()
    event = weights.publish(store, new, previous=previous, probe=None)
    assert ("changed_share" in event.stats) == bool(learner._stage), "the base is still what was published last"
    assert PolicyFetcher(store, "main").fetch(event).tensors == learner.tensors()
    with pytest.raises(ValueError, match="rank 0: previous: got weights"):
        learner.weights().publish(
            store, NewVersion(policy="main", token=3, version=5, parent=4, step=5), previous=previous, probe=None
        )
