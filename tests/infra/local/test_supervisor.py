"""The supervisor, groups of ranks, and the folder of the broker: restarts, order, one owner, and nothing left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.files import lock_folder, release_folder
from infra.local.broker import HOST, PORTS, is_free, plan_address, read_address
from infra.local.supervisor import Child, ChildEvent, Supervisor, session_rss_bytes
from schemas.errors import ConfigError
from tests.actors.rig import gone, until
from trainer.learners.ranks import RankGroup, run_ranks


def script(name: str, folder: Path, code: str, **fields: object) -> Child:
    return Child(name=name, argv=(sys.executable, "-S", "-c", code), log=folder / f"{name}.log", **fields)  # type: ignore[arg-type]


async def test_a_child_that_dies_is_restarted_and_counted(tmp_path: Path) -> None:
    flag = tmp_path / "second"
    code = (
        f"import sys, pathlib; flag = pathlib.Path({str(flag)!r}); again = flag.exists(); flag.touch();"
        "sys.exit(0 if again else 7)"
    )
    events: list[ChildEvent] = []
    async with Supervisor([script("flaky", tmp_path, code)], events.append) as supervisor:
        await supervisor.wait()
        assert supervisor.states["flaky"].restarts == 1
    assert [event.kind for event in events] == ["started", "exited", "restarting", "started", "exited"]
    assert events[1].exit_code == 7


async def test_a_mistake_at_the_start_is_given_up_at_once(tmp_path: Path) -> None:
    events: list[ChildEvent] = []
    child = script("serve", tmp_path, "raise SystemExit(2)", mistakes=(2,))
    async with Supervisor([child], events.append) as supervisor:
        await supervisor.wait()
        assert supervisor.states["serve"].given_up
    assert [event.kind for event in events] == ["started", "exited", "gave_up"]


async def test_a_mistake_of_a_child_that_has_run_is_tried_again_for_ever(tmp_path: Path) -> None:
    """A topic that somebody deletes under a running role, and makes again: nobody has to start the role by hand."""
    flags = [tmp_path / name for name in ("once", "twice")]
    code = (
        f"import sys, pathlib; flags = [pathlib.Path(one) for one in {[str(flag) for flag in flags]!r}];"
        "done = [flag for flag in flags if flag.exists()];"
        "len(done) < 2 and flags[len(done)].touch(); sys.exit((7, 2, 0)[len(done)])"
    )
    events: list[ChildEvent] = []
    child = script("train", tmp_path, code, mistakes=(2,), max_backoff_s=0.4)
    async with Supervisor([child], events.append) as both:
        await both.wait()
        assert both.states["train"].exit_code == 0 and not both.states["train"].given_up
    assert [event.exit_code for event in events if event.kind == "exited"] == [7, 2, 0]


async def test_tiers_stop_from_the_highest_and_a_deaf_child_is_killed(tmp_path: Path) -> None:
    events: list[ChildEvent] = []
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    polite = "import time; print('up', flush=True); time.sleep(60)"
    children = [
        script("broker", tmp_path, polite, tier=0),
        script("role", tmp_path, polite),
        script("deaf", tmp_path, deaf, stop_s=0.3),
    ]
    async with Supervisor(children, events.append):
        await until(lambda: all(c.log.exists() and "up" in c.log.read_text() for c in children))
    stopped = [event for event in events if event.kind == "stopped"]
    assert {event.name for event in stopped[:2]} == {"role", "deaf"}
    assert stopped[2].name == "broker"
    assert all(event.stopping for event in stopped)
    codes = {event.name: event.exit_code for event in stopped}
    assert codes == {"broker": -signal.SIGTERM, "role": -signal.SIGTERM, "deaf": -signal.SIGKILL}


async def test_grandchildren_are_ended_with_their_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(60)'];"
        "print(subprocess.Popen(sleep).pid, flush=True); time.sleep(60)"
    )
    child = script("parent", tmp_path, code)
    async with Supervisor([child]) as supervisor:
        await until(lambda: child.log.exists() and child.log.read_text().strip().isdigit())
        grandchild = int(child.log.read_text())
        supervisor.kill("parent")
        await until(lambda: gone(grandchild))


def test_a_process_that_cannot_be_looked_at_ends_no_supervisor(tmp_path: Path) -> None:
    # As with hidepid=1, an error other than that of a process that has ended.
    (tmp_path / "1" / "stat").mkdir(parents=True)
    assert not session_rss_bytes(tmp_path) and session_rss_bytes()[os.getsid(0)] > 0


def test_a_supervisor_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time; sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(60)'];"
        "print(os.getpid(), subprocess.Popen(sleep).pid, flush=True); time.sleep(60)"
    )
    program = (
        "import asyncio, sys, pathlib\n"
        "from infra.local.supervisor import Child, Supervisor\n"
        "async def main():\n"
        f"    log = pathlib.Path({str(tmp_path)!r}) / 'c.log'\n"
        f"    child = Child(name='c', argv=(sys.executable, '-S', '-c', {code!r}), log=log)\n"
        "    async with Supervisor([child]) as supervisor:\n"
        "        await supervisor.wait()\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program])
    log = tmp_path / "c.log"
    asyncio.run(until(lambda: log.exists() and len(log.read_text().split()) == 2))
    pids = [int(pid) for pid in log.read_text().split()]
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    asyncio.run(until(lambda: all(gone(pid) for pid in pids)))


# Every rank writes its pid; then rank 0 does what the first argument says, the others wait to be ended.
SCRIPT = """
import os, signal, sys, time, pathlib
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[2])
assert os.environ["WORLD_SIZE"] == "3" and os.environ["LOCAL_RANK"] == str(rank) and os.environ["MASTER_PORT"]
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
while not (folder / "done").exists():
    time.sleep(0.02)
"""


def group(tmp_path: Path, what: str, stop_s: float = 30.0) -> RankGroup:
    argv = (sys.executable, "-c", SCRIPT, what, str(tmp_path))
    return RankGroup(argv=argv, num_ranks=3, log=tmp_path / "logs", stop_s=stop_s)


def pids(tmp_path: Path, rank: int | str = "[0-9]") -> list[int]:
    return [int(path.name.partition("-")[2]) for path in tmp_path.glob(f"{rank}-*")]


@pytest.mark.parametrize("what", ["done", "late"])
def test_when_rank_0_has_done_its_work_all_end(tmp_path: Path, what: str) -> None:
    assert asyncio.run(run_ranks(group(tmp_path, what), asyncio.Event())) == 0
    assert all(map(gone, pids(tmp_path)))


def test_what_no_restart_can_mend_ends_the_group_with_its_code(tmp_path: Path) -> None:
    assert asyncio.run(run_ranks(group(tmp_path, "refuse"), asyncio.Event())) == 2
    asyncio.run(until(lambda: all(map(gone, pids(tmp_path)))))


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_takes_the_others_with_it(tmp_path: Path, victim: int) -> None:
    running = asyncio.create_task(run_ranks(group(tmp_path, "wait"), asyncio.Event()))
    await until(lambda: len(pids(tmp_path)) == 3)
    os.kill(pids(tmp_path, victim)[0], signal.SIGKILL)
    assert await running == 1
    await until(lambda: all(map(gone, pids(tmp_path))))  # its watcher reaps a killed process, a moment later


@pytest.mark.parametrize(("what", "stop_s", "expected"), [("wait", 30.0, 0), ("deaf", 0.5, 1)])
async def test_a_stop_ends_the_group_and_tells_where_rank_0_did_not_end_by_itself(
    tmp_path: Path, what: str, stop_s: float, expected: int
) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(run_ranks(group(tmp_path, what, stop_s=stop_s), stop))
    await until(lambda: len(pids(tmp_path)) == 3)
    stop.set()
    code = await running
    await until(lambda: all(map(gone, pids(tmp_path))))
    assert code == expected


def test_a_folder_keeps_its_address(tmp_path: Path) -> None:
    first = plan_address(tmp_path)
    assert plan_address(tmp_path) == first == read_address(tmp_path)
    assert first.port in PORTS
    assert first.port != first.controller_port


def test_a_taken_port_gives_a_new_address(tmp_path: Path) -> None:
    first = plan_address(tmp_path)
    with socket.socket() as taken:
        taken.bind((HOST, first.port))
        taken.listen()
        assert not is_free(first.port)
        second = plan_address(tmp_path)
    assert second.port != first.port
    assert read_address(tmp_path) == second


def test_whoever_killed_what_held_the_lock_with_it_waits_for_its_end(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "lock", "the folder")
    with subprocess.Popen(["sleep", "0.5"], pass_fds=[lock.fileno()]) as child:
        release_folder(lock)
        again = lock_folder(tmp_path / "lock", "the folder")
        assert child.poll() is not None or child.wait(1) == 0
    release_folder(again)


def test_a_folder_in_use_by_a_process_that_lives_is_refused(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "lock", "the folder")
    with pytest.raises(ConfigError, match="the folder is in use by process"):
        lock_folder(tmp_path / "lock", "the folder")
    release_folder(lock)
