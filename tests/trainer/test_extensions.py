"""A process killed while it compiles an extension keeps no later one from starting."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import sys
from pathlib import Path
from torch.utils.cpp_extension import load
from trainer.learners.extensions import alone

folder = Path(sys.argv[1])
(folder / "built" / "one").mkdir(parents=True, exist_ok=True)
with alone(folder / "built"):
    load("one", [str(folder / "one.cpp")], build_directory=str(folder / "built" / "one"), is_python_module=False)
print("loaded")
"""

COMPILER = """#!/bin/sh
for argument in "$@"; do
    [ "$argument" = -c ] && exec cat {held}
done
exec c++ "$@"
"""


def start(folder: Path, compiler: str = "c++") -> subprocess.Popen[str]:
    environment = os.environ | {"CXX": compiler, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", LOAD, str(folder)]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
def test_a_process_killed_while_it_compiles_keeps_no_later_one_from_starting(tmp_path):
    (tmp_path / "one.cpp").write_text("int one() { return 1; }\n")
    held, compiler = tmp_path / "held", tmp_path / "compiler"
    os.mkfifo(held)
    compiler.write_text(COMPILER.format(held=held))
    compiler.chmod(0o755)
    killed = start(tmp_path, str(compiler))
    with held.open("w"):  # opens once it compiles, and ends it when closed
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert (tmp_path / "built" / "one" / "lock").exists()
    after = start(tmp_path)
    try:
        said, _ = after.communicate(timeout=120)
    finally:
        after.kill()
    assert after.returncode == 0 and "loaded" in said
