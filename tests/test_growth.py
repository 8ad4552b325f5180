"""What a soak says of growth: lines that bursts do not move, lives that begin anew, processes with all they started."""

import ctypes
import io
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from tests.growth import DISK, Look, ProcessLife, longest, of_process, plot, size_mb, slope, tables
from tests.held import parts, tell, types
from tests.soak import APP, on_disk

ROOT = Path(__file__).resolve().parents[1]


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


def test_two_looks_are_no_line() -> None:
    assert slope(looks([1.0, 2.0]), "MB") is None


def test_a_process_that_came_back_begins_anew_and_the_longest_life_counts() -> None:
    first = ProcessLife("explore", 0.0, looks([500.0] * 30))
    second = ProcessLife("explore", 150.0, looks([200.0 + at / 720 for at in range(200)], from_s=150.0))
    assert longest([first, second])["explore"] is second
    processes, _ = tables([first, second], settle_s=60.0)
    name, lives, minutes, held, growth, *_ = said(processes)
    assert (name, lives, minutes, growth) == ("explore", "2", "16", "+1.0")
    assert held.startswith("200")


def test_what_comes_before_it_has_settled_is_left_out() -> None:
    life = ProcessLife("train", 100.0, looks([50.0 * at for at in range(20)] + [1000.0] * 20, from_s=100.0))
    assert slope(life.settled(0.0), "MB") != 0.0
    assert slope(life.settled(100.0), "MB") == 0.0


def test_a_life_that_was_too_short_has_no_growth() -> None:
    processes, _ = tables([ProcessLife("explore 2", 0.0, looks([1.0] * 10))], settle_s=600.0)
    assert said(processes)[:5] == ["explore 2", "1", "0", "", ""]


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


def test_a_file_of_holes_takes_no_disk(tmp_path: Path) -> None:
    with (tmp_path / "index").open("wb") as file:
        file.truncate(2**26)
    assert size_mb(tmp_path) < 1


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


def hold() -> None:
    """Take memory of each kind, and look after each."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before, known = parts(), types()
    block = libc.malloc(40 * 2**20)
    ctypes.memset(block, 1, 40 * 2**20)
    kept = [[] for _ in range(50_000)]
    now, names = parts(), types()
    libc.free(block)
    assert now["heap used"] - before["heap used"] == pytest.approx(40, abs=2)
    assert names.total() - known.total() == pytest.approx(50_000, abs=5_000)
    assert now["resident"] - before["resident"] > 40 and names[list] - known[list] >= len(kept)
    assert parts()["heap used"] - before["heap used"] < 5


def test_what_a_process_holds_is_seen_by_kind() -> None:
    """In a process of its own: threads and searches for garbage of other tests would be counted."""
    code = "from tests.test_growth import hold; hold()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_is_looked_at_from_beside_its_main_thread(tmp_path: Path) -> None:
    path = tmp_path / "held.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "tests.held", str(path), "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("headrace ")
    assert json.loads(path.read_text().splitlines()[0])["resident"] > 1


def make_tuples(until: threading.Event) -> int:
    """As a role does all the time, through a generator; how many."""
    made = 0
    while not until.is_set():
        made += sum(len(tuple(number for number in range(300))) for _ in range(100))
    return made


def test_a_look_does_no_harm_to_what_another_thread_is_making() -> None:
    done = threading.Event()
    with ThreadPoolExecutor() as pool:
        making = pool.submit(make_tuples, done)
        for _ in range(100):
            tell(io.StringIO())
        done.set()
        assert making.result() > 0
