"""Failpoints: the table of names and actions, and what an armed one does."""

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.observe import failpoint
from infra.observe.failpoint import POINTS, Armed, parse
from schemas.errors import ConfigError, StoreError

ROOT = Path(__file__).parents[2]
WINGS = ("infra", "streams", "actors", "trainer")


def test_every_name_in_the_table_stands_in_the_code_and_every_name_in_the_code_in_the_table() -> None:
    named = set()
    for path in [path for wing in WINGS for path in (ROOT / wing).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("reach", "write_all") and isinstance(node.args[0], ast.Constant):
                named.add(node.args[0].value)
    assert named == {name for name in POINTS if not name.endswith("_send")}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("store.wrote=kill", "'store.write'"),
        ("batches.batch.aftersend=kill", "'batches.batch.after_send'"),
        ("store.write=explode", "'explode' is no action, expected one of kill"),
        ("store.write", "'' is no action"),
        ("stage.before_ack=full", "'full' makes no sense there, expected one of kill, stop, delay"),
        ("store.write=kill@0", "got @0"),
        ("store.write=kill@soon", "got @soon"),
    ],
)
def test_what_is_not_in_the_table_is_an_error_that_names_the_nearest(entry: str, said: str) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_FAILPOINTS") as caught:
        Armed(f"store.before_rename=kill, {entry}")
    assert said in str(caught.value)


def test_a_count_says_which_time_and_each_entry_happens_once() -> None:
    assert parse("store.write=kill@3") == ("store.write", "kill", 3)
    armed = Armed("store.before_rename=raise@2")
    armed.reach("store.before_rename")
    with pytest.raises(StoreError, match=r"store\.before_rename"):
        armed.reach("store.before_rename")
    armed.reach("store.before_rename")


def test_a_full_disk_keeps_half_and_says_so() -> None:
    armed = Armed("store.write=full")
    written: list[bytes] = []
    with pytest.raises(OSError) as caught:
        armed.write("store.write", b"12345678", written.append)
    assert caught.value.errno == errno.ENOSPC and written == [b"1234"]
    armed.write("store.write", b"12345678", written.append)
    assert written[1:] == [b"12345678"]


def test_a_role_with_an_unknown_failpoint_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('app = "t"\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\n')
    found = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", "master", "--config", str(tmp_path / "headrace.toml")],
        cwd=ROOT, env={**os.environ, failpoint.VARIABLE: "journal.before_sent=kill"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert found.returncode == 2
    assert "no failpoint 'journal.before_sent'; the nearest is" in " ".join(found.stderr.split())
