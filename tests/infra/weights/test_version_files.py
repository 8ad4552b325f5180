"""A version's tensors in one file of this host's memory, shared by whoever holds them."""

import logging
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from infra.observe.metrics import Metrics
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import HashedTensors
from infra.policies.tensors import Tensor, chunks, from_numpy, from_torch, load_tensors, save_tensors
from infra.policies.version_files import MARGIN_BYTES, FileTensors, Put, VersionFiles
from infra.store.memory import MemoryStore
from schemas.errors import PolicyRefused
from tests.infra.weights.test_publish import bf16, put, put_run

SHA256 = "ab" * 32
WEIGHTS = {"w": from_numpy(np.arange(256, dtype=np.float32)), "none": Tensor("F32", (0,), b""), "b": bf16(7)}
ENTRIES = HashedTensors(WEIGHTS).entries
ROOMY = 10**9


def fill(to: Put) -> None:
    """With the weights."""
    for name, tensor in WEIGHTS.items():
        to(name, tensor, chunks(tensor))


def check(tensors: dict[str, Tensor]) -> None:
    """Refuse tensors that are not WEIGHTS."""
    if tensors != WEIGHTS:
        raise PolicyRefused("other values")


def never(to: Put) -> None:
    """Fail: nothing may ask for this."""
    raise AssertionError("filled again")


def files_in(folder: Path, *, room: int = ROOMY, wait_s: float = 60.0) -> VersionFiles:
    """Files in a place of so much room."""
    folder.mkdir(exist_ok=True)
    return VersionFiles([folder], free=lambda place: room, wait_s=wait_s)


def left(folder: Path) -> list[Path]:
    """The files of a place."""
    return [*folder.glob("*/*")]


def test_each_version_that_is_fetched_into_a_file_is_the_one_that_was_published_and_old_files_go(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    events, weights = put_run(store, 6)
    fetcher = PolicyFetcher(store, "main", files_in(tmp_path))
    for version in (0, 1, 3, 4):
        policy = fetcher.fetch(events[version])
        assert isinstance(policy.tensors, FileTensors) and dict(policy.tensors) == weights[version]
        assert load_tensors(policy.tensors.path.read_bytes()) == weights[version]
        assert left(tmp_path) == [policy.tensors.path]
    late = PolicyFetcher(store, "main", files_in(tmp_path / "other")).fetch(events[5])
    assert dict(late.tensors) == weights[5]
    del fetcher, policy
    assert not left(tmp_path / "other") or left(tmp_path / "other") == [late.tensors.path]  # type: ignore[attr-defined]


def test_the_library_reads_the_file(tmp_path: Path) -> None:
    placed = files_in(tmp_path).place(SHA256, ENTRIES, fill, check)
    assert placed is not None and placed.path.stat().st_mode & 0o777 == 0o400
    assert placed.path.read_bytes() == save_tensors(WEIGHTS)
    read = load_file(placed.path)
    assert {name: from_torch(tensor) for name, tensor in read.items()} == WEIGHTS


def test_engines_of_a_host_share_a_version_and_its_file_goes_with_the_last_of_them(tmp_path: Path) -> None:
    one = files_in(tmp_path).place(SHA256, ENTRIES, fill, check)
    other = files_in(tmp_path).place(SHA256, ENTRIES, never, check)
    assert one is not None and other is not None and one.path == other.path
    kept = other["w"]
    del one, other
    assert len(left(tmp_path)) == 1, "a tensor of it is held"
    assert kept == WEIGHTS["w"]
    del kept
    assert not left(tmp_path)


def test_a_version_that_was_filled_wrongly_leaves_nothing_and_the_held_one_stays(tmp_path: Path) -> None:
    store = MemoryStore()
    events, weights = put_run(store, 2)
    fetcher = PolicyFetcher(store, "main", files_in(tmp_path))
    held = fetcher.fetch(events[0])
    nan = {**weights[1], next(iter(weights[1])): from_numpy(np.full(4, np.nan, np.float32))}
    with pytest.raises(PolicyRefused):
        fetcher.fetch(put(store, 1, nan, token=99))
    assert isinstance(held.tensors, FileTensors) and left(tmp_path) == [held.tensors.path]
    assert dict(held.tensors) == weights[0] and dict(fetcher.fetch(events[1]).tensors) == weights[1]


def test_a_damaged_file_is_not_used_but_made_anew_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for damage in (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), lambda raw: raw[:50], lambda raw: b"x" * len(raw)):
        files = files_in(tmp_path)
        one = files.place(SHA256, ENTRIES, fill, check)
        assert one is not None
        sound = one.path.read_bytes()
        one.path.chmod(0o600)
        one.path.write_bytes(damage(sound))
        files.metrics = Metrics("explore")
        with caplog.at_level(logging.WARNING):
            placed = files.place(SHA256, ENTRIES, fill, check)
        assert placed is not None and dict(placed) == WEIGHTS and placed.path.read_bytes() == sound
        assert files.metrics.counters() == {"version_files_damaged": 1}
        assert "version_file_damaged" in caplog.text
        del one, placed
        assert not left(tmp_path), "the older mapping has not removed the newer file, nor left its own"


def test_where_a_place_has_no_room_the_next_is_asked_and_without_any_the_tensors_are_the_process_s_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = [tmp_path / "memory", tmp_path / "disk"]
    for one in places:
        one.mkdir()
    needed = len(save_tensors(WEIGHTS)) + MARGIN_BYTES
    room = {"memory": needed - 1, "disk": needed}
    files = VersionFiles(places, free=lambda folder: room[folder.parent.name])
    files.metrics = Metrics("explore")
    with caplog.at_level(logging.WARNING):
        placed = files.place(SHA256, ENTRIES, fill, check)
    assert placed is not None and places[1] in placed.path.parents and f"free={needed - 1} needed=" in caplog.text
    del placed
    assert files.metrics.counters() == {"version_files_no_room": 1}
    room["disk"] = needed - 1
    assert files.place(SHA256, ENTRIES, never, check) is None and files.metrics.counters() == {
        "version_files_no_room": 3
    }
    store = MemoryStore()
    events, weights = put_run(store, 1)
    policy = PolicyFetcher(store, "main", files).fetch(events[0])
    assert not isinstance(policy.tensors, FileTensors) and dict(policy.tensors) == weights[0]
    assert not [*left(places[0]), *left(places[1])]


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_in(tmp_path)
    made = tmp_path / f"headrace-versions-{os.getuid()}"
    made.mkdir()
    made.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert files.place(SHA256, ENTRIES, never, check) is None
    assert "no other user may enter" in caplog.text


def hold(folder: Path, told: Connection, kind: str) -> None:
    """An engine's process: fills a version, or holds one, until it is killed or told to go on."""

    def slowly(to: Put) -> None:
        told.send("filling")
        told.recv()
        fill(to)

    files = VersionFiles([folder], free=lambda place: ROOMY)
    placed = files.place(SHA256, ENTRIES, slowly if kind == "fills" else fill, check)
    told.send("holds")
    told.recv()
    assert placed is not None


class Other:
    """Another process that holds or fills a version."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir(exist_ok=True)
        self.told, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=hold, args=(folder, theirs, kind))
        self.process.start()
        theirs.close()
        assert self.told.recv() == ("filling" if kind == "fills" else "holds")

    def kill(self) -> None:
        """End the process like the kernel."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def test_what_a_killed_engine_held_stays_for_the_others_and_goes_with_the_next_version(tmp_path: Path) -> None:
    other = Other(tmp_path, "holds")
    mine = files_in(tmp_path).place(SHA256, ENTRIES, never, check)
    other.kill()
    assert mine is not None and dict(mine) == WEIGHTS and left(tmp_path) == [mine.path]
    del mine
    assert not left(tmp_path)
    other = Other(tmp_path, "holds")
    other.kill()
    assert len(left(tmp_path)) == 1
    following = files_in(tmp_path).place("cd" * 32, ENTRIES, fill, check)
    assert following is not None and left(tmp_path) == [following.path]


def test_what_a_killed_engine_left_half_filled_is_never_read(tmp_path: Path) -> None:
    other = Other(tmp_path, "fills")
    assert [path.suffix for path in left(tmp_path)] == [".part"]
    other.kill()
    placed = files_in(tmp_path).place(SHA256, ENTRIES, fill, check)
    assert placed is not None and dict(placed) == WEIGHTS and left(tmp_path) == [placed.path]


def test_a_version_that_another_fills_is_waited_for_and_not_filled_twice(tmp_path: Path) -> None:
    other = Other(tmp_path, "fills")
    assert files_in(tmp_path, wait_s=0.1).place(SHA256, ENTRIES, never, check) is None, "it has waited long enough"
    other.told.send("go on")
    placed = files_in(tmp_path).place(SHA256, ENTRIES, never, check)
    assert placed is not None and dict(placed) == WEIGHTS
    assert other.told.recv() == "holds"
    other.told.send("go on")
    other.process.join()
    assert other.process.exitcode == 0 and left(tmp_path) == [placed.path]
