"""What a soak says of growth: lines that bursts do not move, lives that begin anew, processes with all they started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from tests.growth import DISK, Look, ProcessLife, longest, of_process, plot, slope, tables
from tests.soak import APP, on_disk


def looks(values: list[float], *, from_s: float = 0.0, every_s: float = 5.0) -> list[Look]:
    return [Look(from_s + every_s * at, {"MB": value}) for at, value in enumerate(values)]


@given(by_hour=st.floats(-1e4, 1e4), begin=st.floats(0, 1e5), count=st.integers(3, 200))
def test_growth_is_the_slope_of_the_line(by_hour: float, begin: float, count: int) -> None:
    found = slope(looks([begin + by_hour * 5.0 * at / 3600 for at in range(count)]), "MB")
    assert found == pytest.approx(by_hour, abs=1e-3, rel=1e-6)


def test_a_burst_does_not_move_the_line() -> None:
    values = [100.0 + at / 72 for at in range(720)]  # 10 MB in an hour
    values[300:400] = [900.0] * 100
    assert slope(looks(values), "MB") == pytest.approx(10.0, rel=0.2)


def test_a_process_that_came_back_begins_anew_and_the_longest_life_counts() -> None:
    first = ProcessLife("explore", 0.0, looks([500.0] * 30))
    second = ProcessLife("explore", 150.0, looks([200.0 + at / 720 for at in range(200)], from_s=150.0))
    assert longest([first, second])["explore"] is second
    processes, _ = tables([first, second], settle_s=60.0)
    name, lives, minutes, held, growth, *_ = said(processes)
    assert (name, lives, minutes, growth) == ("explore", "2", "16", "+1.0")
    assert held.startswith("200")


def said(table: Table) -> list[str]:
    return [str(next(iter(column.cells))) for column in table.columns]


def test_a_process_is_looked_at_with_all_that_it_started() -> None:
    own = of_process(os.getpid())
    sleeping = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", sleeping], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        alone, both = of_process(child.pid), of_process(os.getpid())
        child.kill()
    assert alone["MB"] > 1 and alone["descriptors"] >= 3 and alone["threads"] == 1
    assert both["threads"] > own["threads"] and both["descriptors"] >= own["descriptors"] + alone["descriptors"]
    assert of_process(child.pid) == {}


def test_what_lies_on_disk_is_counted_by_topic_and_by_version(tmp_path: Path) -> None:
    for partition in ("batches-0", "batches-1", "tasks-0"):
        folder = tmp_path / "kafka" / "data" / f"{APP}.{partition}"
        folder.mkdir(parents=True)
        (folder / "0.log").write_bytes(b"x" * 2**20)
    manifests = tmp_path / "store" / "policies" / "main" / "1" / "manifests"
    manifests.mkdir(parents=True)
    for version in range(4):
        (manifests / f"{version}.json").write_bytes(b"x" * 2**18)
    found = on_disk(tmp_path)
    assert found["topic batches MB"] == pytest.approx(2.0, abs=0.1)
    assert found["topic tasks MB"] == pytest.approx(1.0, abs=0.1)
    assert found["versions"] == 4 and found["KB per version"] == pytest.approx(256, abs=16)


def test_tables_and_picture_of_a_whole_run_are_made(tmp_path: Path) -> None:
    disk = ProcessLife(
        DISK, 0.0, [Look(5.0 * at, {"topic tasks MB": at / 720, "versions": float(at)}) for at in range(30)]
    )
    lives = [ProcessLife("train", 0.0, looks([100.0] * 30)), ProcessLife("serve 2", 0.0, looks([90.0] * 30)), disk]
    console = Console(width=140, record=True, file=(tmp_path / "said").open("w"))
    for table in tables(lives, settle_s=30.0):
        console.print(table)
    text = console.export_text()
    assert "train" in text and "topic tasks MB" in text and "versions" in text
    plot(lives, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_a_command_is_looked_at_from_beside_its_main_thread(tmp_path: Path) -> None:
    path = tmp_path / "held.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "tests.held", str(path), "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("headrace ")
    assert json.loads(path.read_text().splitlines()[0])["resident"] > 1
