"""Ports of the embedded broker: kept while they are free."""

import socket
from pathlib import Path

from infra.local.address import HOST, PORTS, is_free, plan_address, read_address


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


def test_a_spoilt_address_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "address.json").write_text("{")
    assert read_address(tmp_path) is None
    assert plan_address(tmp_path) == read_address(tmp_path)
