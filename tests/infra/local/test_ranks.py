"""Ranks start together, end together, and start again together."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from infra.local.ranks import RankGroup, adopt_slurm, launched_rank, run_ranks
from schemas.errors import ConfigError
from tests.actors.rig import until

# Every rank writes its pid; then rank 0 does what the first argument says, the others wait to be ended.
SCRIPT = """
import os, sys, time, pathlib
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[2])
assert os.environ["WORLD_SIZE"] == "3" and os.environ["LOCAL_RANK"] == str(rank) and os.environ["MASTER_PORT"]
lives = len(list(folder.glob("0-*")))
(folder / f"{rank}-{os.getpid()}").write_text(os.environ["MASTER_PORT"])
if sys.argv[1] == "done" and rank == 0:
    (folder / "done").touch()
    sys.exit(0)
if sys.argv[1] == "late":  # rank 0 has told the others, and ends after them
    if rank == 0:
        time.sleep(1.0)
    sys.exit(0)
if sys.argv[1] == "refuse" and rank == 2:
    sys.exit(2)
if sys.argv[1] == "again" and rank == 0 and lives:
    (folder / "done").touch()
    sys.exit(0)
while not (folder / "done").exists():
    time.sleep(0.02)
"""


def group(tmp_path: Path, what: str, **settings: object) -> RankGroup:
    argv = (sys.executable, "-c", SCRIPT, what, str(tmp_path))
    return RankGroup(argv=argv, num_ranks=3, log=tmp_path / "logs", final_codes=(0, 2), **settings)  # type: ignore[arg-type]


def pids(tmp_path: Path, rank: int | str = "[0-9]") -> list[int]:
    return [int(path.name.partition("-")[2]) for path in tmp_path.glob(f"{rank}-*")]


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_when_rank_0_has_done_its_work_all_end(tmp_path: Path) -> None:
    assert asyncio.run(run_ranks(group(tmp_path, "done"), asyncio.Event())) == 0
    assert not any(map(alive, pids(tmp_path)))


def test_what_no_restart_can_mend_ends_the_group_with_its_code(tmp_path: Path) -> None:
    assert asyncio.run(run_ranks(group(tmp_path, "refuse"), asyncio.Event())) == 2
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_takes_the_others_with_it_and_all_start_again(tmp_path: Path, victim: int) -> None:
    running = asyncio.create_task(run_ranks(group(tmp_path, "again"), asyncio.Event()))
    await until(lambda: len(pids(tmp_path)) == 3)
    first = pids(tmp_path)
    os.kill(pids(tmp_path, victim)[0], signal.SIGKILL)
    await until(lambda: len(pids(tmp_path)) > 3)
    assert not any(map(alive, first)), "a new group begins when nothing is left of the old one"
    assert await running == 0
    assert not any(map(alive, pids(tmp_path)))


async def test_a_stop_ends_the_group_also_where_nobody_listens(tmp_path: Path) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(run_ranks(group(tmp_path, "wait", stop_s=0.5), stop))
    await until(lambda: len(pids(tmp_path)) == 3)
    stop.set()
    code = await running
    # Who is killed is gone once its watcher has reaped it, which may be a moment later.
    await until(lambda: not any(map(alive, pids(tmp_path))))
    assert code == 0


def test_a_rank_is_what_a_launcher_says() -> None:
    assert launched_rank({}) is None
    assert launched_rank({"WORLD_SIZE": "2", "RANK": "1"}) == 1


SRUN = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
MASTER = {"MASTER_ADDR": "node-1", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    ("visible", "local"), [({}, "1"), ({"CUDA_VISIBLE_DEVICES": "0,1"}, "1"), ({"CUDA_VISIBLE_DEVICES": "3"}, "0")]
)
def test_what_srun_says_of_a_rank_has_the_names_that_torch_knows(visible: dict[str, str], local: str) -> None:
    found = {**SRUN, **MASTER, **visible}
    adopt_slurm(found)
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": local
    }  # fmt: skip
    assert launched_rank(found) == 9


def test_srun_without_an_address_of_rank_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT: missing, with 16 tasks of srun; expected the host of rank 0"):
        adopt_slurm({**SRUN, "MASTER_ADDR": "node-1"})
