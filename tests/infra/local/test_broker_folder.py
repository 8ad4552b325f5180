"""The folder of the embedded broker: its ports and its lock."""

import socket
import subprocess
from pathlib import Path

import pytest

from infra.files import lock_folder, release_folder
from infra.local.broker import HOST, PORTS, is_free, plan_address, read_address
from schemas.errors import ConfigError


def test_a_folder_keeps_its_address(tmp_path: Path) -> None:
    first = plan_address(tmp_path)
    assert plan_address(tmp_path) == first == read_address(tmp_path)
    assert first.port in PORTS
    assert first.port != first.controller_port


def test_a_taken_port_gives_a_new_address(tmp_path: Path) -> None:
    first = plan_address(tmp_path)
    with socket.socket() as taken:
        taken.bind((HOST, first.port))
        taken.listen()
        assert not is_free(first.port)
        second = plan_address(tmp_path)
    assert second.port != first.port
    assert read_address(tmp_path) == second


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
