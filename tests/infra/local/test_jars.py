"""The jars of the broker: verified, or not there."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.jars import Jar, class_path, read_lock
from schemas.errors import ConfigError

PRINT_CLASS_PATH = "from infra.local.jars import class_path; print(class_path())"


def test_the_lock_pins_each_jar_by_hash_and_names_no_host() -> None:
    jars = read_lock()
    assert len({jar.file_name for jar in jars}) == len(jars) > 40
    assert all(len(jar.sha256) == 64 for jar in jars)
    assert Jar("org.apache.kafka", "kafka_2.13", "4.3.1", jars[0].sha256).file_name in {jar.file_name for jar in jars}


def test_a_given_folder_is_searched_whole(tmp_path: Path) -> None:
    for name in ("modules/a-1.jar", "jars/kafka_2.13-4.3.1.jar"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert class_path(tmp_path).split(os.pathsep) == [
        str(tmp_path / "jars/kafka_2.13-4.3.1.jar"),
        str(tmp_path / "modules/a-1.jar"),
    ]


def test_a_given_folder_without_kafka_names_what_to_fix(tmp_path: Path) -> None:
    (tmp_path / "other.jar").touch()
    with pytest.raises(ConfigError, match=r"with 1 jars .* HEADRACE_KAFKA_JARS"):
        class_path(tmp_path)


def test_where_nothing_can_be_fetched_the_message_names_both_ways_out_and_nothing_stays(tmp_path: Path) -> None:
    # Every request goes to a port nobody listens on: the machine is offline, as far as jars are concerned.
    offline = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    env = {**os.environ, **offline, "NO_PROXY": "", "no_proxy": "", "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("HEADRACE_KAFKA_JARS", None)
    done = subprocess.run([sys.executable, "-c", PRINT_CLASS_PATH], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert "ConfigError" in message
    assert "kafka.bootstrap_servers" in message
    assert "HEADRACE_KAFKA_JARS" in message
    assert list((tmp_path / "headrace").glob("**/*.jar")) == []


def test_a_damaged_jar_in_the_cache_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "headrace" / "kafka-4.3.1"
    folder.mkdir(parents=True)
    for jar in read_lock():
        (folder / jar.file_name).write_bytes(b"half a download")
    offline = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    env = {**os.environ, **offline, "NO_PROXY": "", "no_proxy": "", "XDG_CACHE_HOME": str(tmp_path)}
    env.pop("HEADRACE_KAFKA_JARS", None)
    done = subprocess.run([sys.executable, "-c", PRINT_CLASS_PATH], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""


@pytest.mark.full
def test_the_cache_holds_exactly_what_the_lock_says(kafka: str) -> None:
    if os.environ.get("HEADRACE_KAFKA_JARS"):
        pytest.skip("jars are given by HEADRACE_KAFKA_JARS")
    paths = [Path(path) for path in class_path().split(os.pathsep)]
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] == [jar.sha256 for jar in read_lock()]
