"""A publisher that is killed, by the kernel, at every place of a publication."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

from infra.observe import failpoint
from infra.policies.fetch import PolicyFetcher
from infra.policies.prune import remove_unfinished
from infra.store.directory import INCOMING, STALE_AFTER_S, DirectoryStore
from tests.infra.weights.test_publish import first_weights, put, small_step

POINTS = (
    *(f"{point}=kill@{number}" for point in ("weights.before_shard", "weights.after_shard") for number in (1, 2, 3)),
    *(
        f"store.write=tear@{number}" for number in range(1, 8)
    ),  # of each tensor its header and its data, and the manifest
    *(f"store.before_rename=kill@{number}" for number in (1, 2, 3, 4)),
    "weights.before_manifest=kill",
    "weights.after_manifest=kill",
)
SHARD_BYTES = 2 * 20_000 + 1  # one tensor


def publish_and_be_killed(folder: Path) -> None:
    """Each point in a process of its own, under a lease of its own."""
    store, weights = DirectoryStore(folder), small_step(first_weights(), 1)
    for point in POINTS:
        if not (child := os.fork()):
            os.environ[failpoint.VARIABLE] = point
            failpoint.check()
            put(store, 1, weights, token=int(token_of(point)), shard_bytes=SHARD_BYTES)
            os._exit(0)  # it was not killed
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, point


def test_a_publisher_killed_anywhere_changes_no_version_and_what_it_left_goes(tmp_path: Path) -> None:
    store, weights = DirectoryStore(tmp_path), first_weights()
    event = put(store, 0, weights, shard_bytes=SHARD_BYTES)
    process = multiprocessing.get_context("spawn").Process(target=publish_and_be_killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == weights
    unfinished = [*(tmp_path / INCOMING).iterdir()]
    assert len(unfinished) >= sum("store." in point for point in POINTS), "several are written at once"
    in_the_manifest, whole = (token_of(point) for point in ("store.write=tear@7", "weights.after_manifest=kill"))
    before_it = token_of("weights.before_manifest=kill")
    assert {in_the_manifest, before_it, whole} <= tokens_in(store), "they had put all but the manifest, or that too"

    new = small_step(weights, 2)
    event = put(store, 1, new, token=1000, shard_bytes=SHARD_BYTES)
    assert remove_unfinished(store, "main", before=1000) >= 15
    assert tokens_in(store) == {"17", whole, "1000"}, "a version that is whole goes like any other"
    assert dict(PolicyFetcher(store, "main").fetch(event).tensors) == new
    old = time.time() - STALE_AFTER_S - 1
    for path in unfinished:
        os.utime(path, (old, old))
    DirectoryStore(tmp_path)
    assert not [*(tmp_path / INCOMING).iterdir()]


def token_of(point: str) -> str:
    return str(100 + POINTS.index(point))


def tokens_in(store: DirectoryStore) -> set[str]:
    return {key.split("/")[2] for key in store.keys("policies/main/")}
