"""A lock that a killed child still holds for a moment is no other process's."""

import subprocess
from pathlib import Path

import pytest

from infra.local.folder_lock import lock_folder, release_folder
from schemas.errors import ConfigError


def test_whoever_killed_what_held_the_lock_with_it_waits_for_its_end(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "lock", "the folder")
    with subprocess.Popen(["sleep", "0.5"], pass_fds=[lock.fileno()]) as child:
        release_folder(lock)
        again = lock_folder(tmp_path / "lock", "the folder")
        assert child.poll() is not None or child.wait(1) == 0
    release_folder(again)


def test_a_folder_in_use_by_a_process_that_lives_is_refused(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "lock", "the folder")
    with pytest.raises(ConfigError, match="the folder is in use by process"):
        lock_folder(tmp_path / "lock", "the folder")
    release_folder(lock)
