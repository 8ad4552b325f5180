"""What a follower that begins reads, and what it holds meanwhile."""

import threading
from pathlib import Path

import msgspec

from infra.policies.fetch import LOADED_AT_ONCE, PolicyFetcher
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor
from infra.policies.version_files import VersionFiles
from infra.store.memory import MemoryStore
from tests.infra.weights.test_fetch import Counting
from tests.infra.weights.test_publish import NAMES, bf16, first_weights, put, put_run, small_step

NUM_SHARDS = 24


class LiveObject(bytes):
    """An object that was read; the store counts those that somebody still holds."""

    store: "CountingLiving"

    def __del__(self) -> None:
        self.store.count(-1)


class CountingLiving(MemoryStore):
    """A store that knows how many of the anchor's shards that it gave are held at the same time. most: at the worst."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = self.given = 0
        self._counting = threading.Lock()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        if "/anchors/" not in key:
            return data
        shard = LiveObject(data)
        shard.store = self
        self.count(1)
        return shard

    def count(self, change: int) -> None:
        with self._counting:
            self.held += change
            self.given += change > 0
            self.most = max(self.most, self.held)


def test_of_an_anchor_that_goes_into_a_file_few_shards_are_held_at_once(tmp_path: Path) -> None:
    store = CountingLiving()
    weights = {f"w{number:02}": bf16(number) for number in range(NUM_SHARDS)}
    event = put(store, 0, weights, shard_bytes=1)
    policy = PolicyFetcher(store, "main", VersionFiles([tmp_path])).fetch(event)
    assert dict(policy.tensors) == weights
    assert store.given == NUM_SHARDS and store.most <= LOADED_AT_ONCE and store.held == 0


def test_a_first_start_with_the_weights_of_version_0_at_hand_reads_manifests_and_deltas_alone() -> None:
    store = Counting()
    events, weights = put_run(store, 4)
    store.read.clear()
    follower = PolicyFetcher(store, "main")
    assert follower.adopt(events[0], first_weights()) and follower.version == 0
    assert store.read == [events[0].manifest]
    policy = follower.fetch(events[3])
    assert dict(policy.tensors) == weights[3]
    assert policy.touched == set(NAMES), "what the engine serves is not known here"
    assert {key.split("/")[3] for key in store.read} == {"manifests", "deltas"}


def test_weights_of_another_hash_are_not_adopted_and_the_anchor_is_read() -> None:
    store = Counting()
    events, weights = put_run(store, 4)
    other = small_step(first_weights(), 9)
    lacking = {name: tensor for name, tensor in first_weights().items() if name != NAMES[0]}
    wide = {name: Tensor("F32", (100, 100), tensor.data) for name, tensor in first_weights().items()}
    follower = PolicyFetcher(store, "main")
    for strange in (other, lacking, wide, {}):
        assert not follower.adopt(events[0], strange) and follower.version == -1
    assert dict(follower.fetch(events[3]).tensors) == weights[3]
    assert "anchors" in {key.split("/")[3] for key in store.read}


def test_nothing_is_adopted_for_an_event_whose_manifest_is_gone_or_another() -> None:
    store = MemoryStore()
    events, _ = put_run(store, 1)
    assert not PolicyFetcher(store, "main").adopt(
        msgspec.structs.replace(events[0], manifest_sha256="0" * 64), first_weights()
    )
    store.delete(events[0].manifest)
    assert not PolicyFetcher(store, "main").adopt(events[0], first_weights())


def test_the_policy_of_a_reward_model_or_a_draft_lies_beside_another() -> None:
    store = MemoryStore()
    found = {}
    for seed, name in enumerate(("main", "reward", "draft")):
        weights = [{f"{name}.w": bf16(seed), "shared": bf16(7)}]
        weights.append(small_step(weights[0], seed, ("shared",)))
        for version, tensors in enumerate(weights):
            new = NewVersion(policy=name, token=17, version=version, parent=version - 1, step=version)
            event = publish(store, new, tensors, previous=weights[0] if version else None, probe=None)
            found[name, version] = event, tensors
    for name in ("main", "reward", "draft"):
        follower = PolicyFetcher(store, name)
        for version in (0, 1):
            event, tensors = found[name, version]
            assert dict(follower.fetch(event).tensors) == tensors
