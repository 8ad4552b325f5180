"""A folder as a store, and memory that is used again."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infra.files import free_and_usable
from infra.policies.tensors import LEAST_BYTES, Rooms
from infra.store.directory import STALE_AFTER_S, DirectoryStore
from infra.store.open import open_store
from schemas.errors import ConfigError, StoreError


def test_a_relative_url_lies_below_the_base(tmp_path: Path) -> None:
    open_store("store", base=tmp_path).put("a/b", b"x")
    assert (tmp_path / "store" / "a" / "b").read_bytes() == b"x"


@pytest.mark.parametrize("url", ["", "gs://bucket/x", "s3://", "https://key:hunter2@host/x", "file://host/x"])
def test_a_url_no_store_can_serve_is_a_config_error_without_its_secrets(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a folder or s3://") as caught:
        open_store(url, base=tmp_path)
    assert "hunter2" not in str(caught.value)


def test_an_unfinished_put_is_never_an_object_and_is_swept_later(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("k", b"whole")
    left_behind = tmp_path / ".incoming" / "abc"
    left_behind.write_bytes(b"half an obj")
    assert list(store.keys("")) == ["k"]
    DirectoryStore(tmp_path)
    assert left_behind.exists()  # it may be of a writer that runs now
    os.utime(left_behind, (0, left_behind.stat().st_mtime - STALE_AFTER_S - 60))
    DirectoryStore(tmp_path)
    assert not left_behind.exists()
    assert store.get("k") == b"whole"


def test_the_free_share_of_a_disk_leaves_out_what_only_root_may_take(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free, usable = free_and_usable(tmp_path)
    taken = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    assert usable - free == pytest.approx(taken, rel=0.01)


WRITER = """
import sys
from pathlib import Path
from infra.store.directory import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    for value in range(256):
        store.put("k", bytes([value]) * 2_000_000)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_whole_object(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).put("k", bytes(2_000_000))
    for delay_ms in range(0, 100, 7):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(timeout=delay_ms / 1000)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        data = DirectoryStore(tmp_path).get("k")
        assert (len(data), len(set(data))) == (2_000_000, 1)


def test_a_failed_put_leaves_the_old_object_and_nothing_else(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("file", b"x")
    with pytest.raises(StoreError, match="file/below") as caught:
        store.put("file/below", b"y")
    assert caught.value.retriable
    assert store.get("file") == b"x"
    assert list((tmp_path / ".incoming").iterdir()) == []


def place_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_room_comes_back_once_nothing_of_it_is_in_use() -> None:
    rooms = Rooms()
    first = rooms.take(LEAST_BYTES)
    place = place_of(first)
    first.flags.writeable = False
    piece = first.data[5:10]
    patterns = np.frombuffer(first.data, np.uint16)[3:]
    del first
    for _ in range(2):
        assert place_of(rooms.take(LEAST_BYTES)) != place
    del piece
    assert place_of(rooms.take(LEAST_BYTES)) != place
    del patterns
    gc.collect()
    taken = [rooms.take(LEAST_BYTES) for _ in range(3)]
    assert place in map(place_of, taken) and all(one.flags.writeable for one in taken)
    assert len({*map(place_of, taken)}) == 3
