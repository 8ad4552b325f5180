"""Where weights go on their way to vLLM's workers: memory where there is room, else disk, else a refusal that says so."""

import logging
import multiprocessing
import signal
from pathlib import Path

import numpy as np
import pytest

from actors.engines.vllm.exchange import MARGIN_BYTES, Exchange
from infra.policies.tensors import from_numpy, load_tensors
from schemas.errors import PolicyRefused

TENSORS = {"w": from_numpy(np.arange(256, dtype=np.float32))}
NEEDED = 1024 + MARGIN_BYTES


def exchange(folder: Path, *, memory: int, disk: int) -> Exchange:
    """One whose places have so much room."""
    places = [folder / "memory", folder / "disk"]
    for one in places:
        one.mkdir()
    return Exchange(places, free=lambda place: {"memory": memory, "disk": disk}[place.name])


def test_a_version_goes_through_memory_where_there_is_room_and_nothing_is_left_behind(tmp_path: Path) -> None:
    made = exchange(tmp_path, memory=NEEDED, disk=0)
    paths = [made.write(TENSORS), made.write(TENSORS)]
    assert len(set(paths)) == 2 and all(tmp_path / "memory" in path.parents for path in paths)
    assert load_tensors(paths[0].read_bytes()) == TENSORS
    made.close()
    assert not list((tmp_path / "memory").iterdir())


def test_a_version_that_memory_has_no_room_for_goes_to_disk_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = exchange(tmp_path, memory=NEEDED - 1, disk=NEEDED)
    with caplog.at_level(logging.WARNING):
        path = made.write(TENSORS)
    assert tmp_path / "disk" in path.parents and load_tensors(path.read_bytes()) == TENSORS
    assert f"needed={NEEDED}" in caplog.text and f"{NEEDED - 1:,} in {tmp_path / 'memory'}" in caplog.text
    made.close()
    assert not list((tmp_path / "disk").iterdir())


def test_a_version_that_fits_nowhere_is_refused_before_sampling_pauses(tmp_path: Path) -> None:
    made = exchange(tmp_path, memory=NEEDED - 1, disk=NEEDED - 2)
    with pytest.raises(PolicyRefused, match=r"needs 1,049,600 bytes .* larger /dev/shm, or set TMPDIR"):
        made.write(TENSORS)
    assert not [*(tmp_path / "memory").iterdir(), *(tmp_path / "disk").iterdir()]


def write_and_wait(folder: Path) -> None:
    """An engine's process, in the middle of a reload."""
    Exchange([folder], free=lambda place: NEEDED).write(TENSORS)
    (folder / "written").touch()
    signal.pause()


def test_what_a_killed_engine_left_in_memory_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    lives = Exchange([tmp_path], free=lambda place: NEEDED)
    kept = lives.write(TENSORS)
    killed = multiprocessing.get_context("spawn").Process(target=write_and_wait, args=(tmp_path,))
    killed.start()
    while not (tmp_path / "written").exists():
        assert killed.is_alive()
        killed.join(0.02)
    assert len([*tmp_path.glob("*/*.safetensors")]) == 2
    killed.kill()
    killed.join()
    Exchange([tmp_path])
    assert [*tmp_path.glob("*/*.safetensors")] == [kept]
    lives.close()
    assert [*tmp_path.iterdir()] == [tmp_path / "written"]
