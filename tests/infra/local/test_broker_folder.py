"""The folder of the embedded broker: its ports and its lock."""

import socket
import subprocess
from pathlib import Path

import pytest

from infra.cli.connect import RUNNING_S, STOPPED_S, kafka_folder, patience_s
from infra.cli.settings import Settings
from infra.files import is_locked, lock_folder, release_folder
from infra.local.broker import HOST, LOCK, PORTS, is_free, plan_address, read_address
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


def test_a_lock_is_seen_while_it_is_held_and_not_taken_by_the_look(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_locked(file)
    lock = lock_folder(file, "the folder")
    assert is_locked(file)
    release_folder(lock)
    assert not is_locked(file)
    release_folder(lock_folder(file, "the folder"))


def test_a_broker_that_a_process_runs_is_waited_for_longer_than_one_that_nothing_runs(tmp_path: Path) -> None:
    settings = Settings(app="t", folder=tmp_path)
    assert patience_s(settings) == STOPPED_S
    lock = lock_folder(kafka_folder(settings) / LOCK, "Kafka's folder")
    assert patience_s(settings) == RUNNING_S > STOPPED_S
    release_folder(lock)
