"""A role with a mistake in its settings, kept by something that starts again whatever ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.cli.exit_codes import CONFIG_ERROR
from infra.cli.run.stay_down import VARIABLE

LIMIT_S = 60.0


def started(folder: Path, *arguments: str, stays: str) -> "subprocess.Popen[str]":
    (folder / "headrace.toml").write_text('app = "a"\nno_such_section = 1\n')
    command = [sys.executable, "-m", "infra.cli.main", *arguments, "-c", str(folder / "headrace.toml")]
    return subprocess.Popen(command, env={**os.environ, VARIABLE: stays}, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_role_with_a_mistake_in_its_settings_says_so_once_waits_and_ends_as_soon_as_it_is_stopped(
    tmp_path: Path,
) -> None:
    with started(tmp_path, "master", stays="1") as process:
        assert process.stderr is not None
        assert "no_such_section" in process.stderr.readline()
        assert process.stderr.readline() == "headrace: a restart mends none of this: master waits to be stopped\n"
        process.terminate()
        assert process.wait(LIMIT_S) == CONFIG_ERROR
        assert process.stderr.read() == ""


STOPPED_WHILE_IT_SPEAKS = """
import os, signal, sys
from infra.cli.run.stay_down import stay_down

class Stops:
    def write(self, text):
        os.kill(os.getpid(), signal.SIGTERM)
    def flush(self):
        pass

sys.stderr = Stops()
stay_down("master", int(sys.argv[1]))
"""


def test_a_stop_that_comes_while_it_says_that_it_waits_is_not_lost_and_the_code_is_the_roles() -> None:
    command = [sys.executable, "-c", STOPPED_WHILE_IT_SPEAKS, str(CONFIG_ERROR)]
    assert subprocess.run(command, timeout=LIMIT_S, check=False).returncode == CONFIG_ERROR


@pytest.mark.full
@pytest.mark.parametrize(("command", "stays"), [("master", ""), ("check", "1")], ids=["not asked for", "no role"])
def test_a_role_that_is_not_asked_to_wait_and_any_other_command_end(command: str, stays: str, tmp_path: Path) -> None:
    with started(tmp_path, command, stays=stays) as process:
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == CONFIG_ERROR and "waits to be stopped" not in said
