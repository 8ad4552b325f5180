"""What all benchmarks share: with `--json` nothing but JSON is on stdout, and progress is a line each."""

import json
import subprocess
import sys

SCRIPT = """
import os, subprocess, sys
import typer
from infra.cli.bench.found import Found, command, tell

def bench() -> Found:
    print("a library warns")
    os.write(1, b"a library in C warns\\n")
    subprocess.run([sys.executable, "-c", "print('a process warns')"], check=True)
    tell("x" * 300)
    return Found({"figure": 1.0})

try:
    command("fake", bench)(as_json=sys.argv[1] == "json")
except typer.Exit as ended:
    sys.exit(ended.exit_code)
"""


def _run(how: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)


def test_with_json_what_libraries_and_processes_print_is_on_stderr() -> None:
    done = _run("json")
    assert json.loads(done.stdout) == {"figure": 1.0}
    for said in ("a library warns", "a library in C warns", "a process warns"):
        assert said in done.stderr


def test_without_json_nothing_is_moved() -> None:
    done = _run("table")
    assert all(said in done.stdout for said in ("a library warns", "a process warns", "figure"))


def test_progress_is_a_line_each_also_where_no_terminal_reads_it() -> None:
    assert "x" * 300 in _run("json").stderr.splitlines()
