"""The files that start one trainer on several machines: what they say to torchrun, srun and the ranks."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from infra.cli.demo.init import EXAMPLES

MACHINES = EXAMPLES / "machines"
# A stand-in for each of Slurm's commands: srun fails with the codes that lie in a file, one line each call.
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node-[7-8]" ] && printf "node-7\\nnode-8\\n"
"""
SRUN = """#!/bin/sh
echo "$MASTER_ADDR $MASTER_PORT $*" >> srun.log
code=$(head -n 1 codes); sed -i 1d codes; exit "$code"
"""
TORCHRUN = """#!/bin/sh
echo "$*" > torchrun.log
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment with the stand-ins first on its path."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("torchrun", TORCHRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "AGAIN_S": "0"}


def run(name: str, *arguments: str, folder: Path, env: dict[str, str]) -> int:
    command = ["bash", str(MACHINES / name), *arguments]
    return subprocess.run(command, cwd=folder, env=env, check=False, timeout=60).returncode


@pytest.mark.parametrize("name", ["torchrun.sh", "train.sbatch"])
def test_bash_reads_the_file(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(MACHINES / name)], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(("codes", "last"), [((75, 137, 0), 0), ((2,), 2), ((3,), 3)])
def test_under_slurm_ranks_start_again_until_they_are_done_or_settings_are_wrong_or_they_are_taken_over(
    tmp_path: Path, machine: dict[str, str], codes: tuple[int, ...], last: int
) -> None:
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    env = {**machine, "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_ID": "41007"}
    assert run("train.sbatch", "my.toml", folder=tmp_path, env=env) == last
    called = (tmp_path / "srun.log").read_text().splitlines()
    assert called == ["node-7 29507 --kill-on-bad-exit=1 headrace train --config my.toml"] * len(codes)


def test_torchrun_is_told_how_many_machines_where_they_meet_and_what_to_run(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    env = {**machine, "MASTER": "node-7", "NODES": "2", "GPUS": "8"}
    assert run("torchrun.sh", "--config", "my.toml", folder=tmp_path, env=env) == 0
    words = (tmp_path / "torchrun.log").read_text().split()
    assert words[-5:] == ["--no-python", "headrace", "train", "--config", "my.toml"]
    told = dict(zip(words[:-5:2], words[1:-5:2], strict=True))
    assert told["--nnodes"] == "2" and told["--nproc-per-node"] == "8" and told["--rdzv-endpoint"] == "node-7:29500"


def test_the_how_to_shows_the_files_as_they_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "infra/docs/howto/train-on-several-machines.md").read_text()
    shown = dict(re.findall(r"^```text (\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    assert shown == {name: (MACHINES / name).read_text() for name in ("torchrun.sh", "train.sbatch")}
