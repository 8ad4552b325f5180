"""The sandbox: what goes in and out, what ends a run, and that nothing is left of it."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.sandbox.command import SandboxLimits, is_machine_root
from infra.sandbox.sandbox import Sandbox, SandboxResult
from schemas.errors import SandboxUnavailable
from tests.infra.sandbox.confining import sandbox_or_skip

MEBIBYTE = 1024 * 1024
SLEEP = "import time; time.sleep(300)"
PR_SET_CHILD_SUBREAPER = 36
BAD_ENDS = (
    f"import os\nfor _ in range(3): os.fork()\n{SLEEP}",
    "while True: print('x' * 4096)",
    f"import os\nif os.fork() == 0:\n    os.setsid()\n    {SLEEP}",
    "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(os.getpid(), 11)",
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return sandbox_or_skip()


def python(sandbox: Sandbox, code: str, stdin: bytes = b"") -> SandboxResult:
    return sandbox.run(sandbox.python_command("-c", textwrap.dedent(code)), stdin)


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def test_input_output_files_and_exit_code(sandbox: Sandbox) -> None:
    code = "import sys; print(sys.stdin.read() + open('/program/a.txt').read()); print('words', file=sys.stderr); sys.exit(3)"
    finished = sandbox.run(sandbox.python_command("-c", code), b"in ", {"a.txt": b"file"})
    assert (finished.code, finished.fault) == (3, "")
    assert (finished.stdout, finished.stderr) == (b"in file\n", b"words\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_ends_the_run_at_its_limit(sandbox: Sandbox, stream: str) -> None:
    finished = python(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * 4096)")
    assert (finished.code, finished.fault) == (None, "output limit")
    assert len(getattr(finished, stream)) == sandbox.limits.output_bytes


def test_the_end_of_time_ends_everything() -> None:
    slow = sandbox_or_skip(SandboxLimits(wall_s=1.5))
    finished = python(slow, "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.fork()\ntime.sleep(300)")
    assert (finished.code, finished.fault) == (None, "wall time")


def test_a_busy_program_is_killed_at_its_cpu_limit() -> None:
    busy = sandbox_or_skip(SandboxLimits(wall_s=120.0, cpu_s=1))
    finished = python(busy, "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass")
    assert finished.code == 128 + signal.SIGKILL


def test_memory_files_and_descriptors_are_limited(sandbox: Sandbox) -> None:
    assert b"MemoryError" in python(sandbox, f"bytearray({600 * MEBIBYTE})").stderr
    assert python(sandbox, f"open('/tmp/x', 'wb').write(bytes({17 * MEBIBYTE}))").code != 0
    assert b"Too many open files" in python(sandbox, "held = [open('/dev/null') for _ in range(99)]").stderr


def test_processes_that_hold_too_much_memory_together_end_their_run() -> None:
    """Each far below its own limit: eight of 100 MB where 400 MB are allowed."""
    small = sandbox_or_skip(SandboxLimits(wall_s=60.0, total_bytes=400 * MEBIBYTE))
    hoards = """
    import os, time
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(b"x") * (100 << 20)
            time.sleep(300)
    time.sleep(300)
    """
    finished = python(small, hoards)
    assert (finished.code, finished.fault) == (None, "memory")
    modest = python(small, "held = [bytearray(b'x') * (30 << 20) for _ in range(8)]; print(len(held))")
    assert (modest.fault, modest.stdout) == ("", b"8\n")


def test_what_programs_commonly_use_still_works(sandbox: Sandbox) -> None:
    code = """
    import asyncio, multiprocessing, shutil, sqlite3, subprocess, tempfile, threading
    async def later():
        await asyncio.sleep(0)
        return 1
    found = [asyncio.run(later())]
    base = sqlite3.connect("/tmp/base")
    base.execute("create table t (x)")
    base.execute("insert into t values (2)")
    base.commit()
    found += base.execute("select x from t").fetchone()
    with multiprocessing.Pool(2) as pool:
        found += pool.map(abs, [-3])
    found.append(int(subprocess.run(["echo", "4"], capture_output=True).stdout))
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"5"); file.flush()
        shutil.copy(file.name, "/tmp/copy"), shutil.copystat(file.name, "/tmp/copy")
        found.append(int(open("/tmp/copy").read()))
    print(found)
    """
    finished = python(sandbox, code)
    assert finished.stdout == b"[1, 2, 3, 4, 5]\n", finished


def test_orphans_count_too() -> None:
    small = sandbox_or_skip(SandboxLimits(wall_s=60.0, total_bytes=300 * MEBIBYTE))
    hoards = """
    import os, time
    for _ in range(5):
        if os.fork() == 0:
            if os.fork() == 0:
                held = bytearray(b"x") * (100 << 20)
                time.sleep(300)
            os._exit(0)
        os.wait()
    time.sleep(300)
    """
    assert python(small, hoards).fault == "memory"


def test_a_fork_bomb_is_held_to_the_limit_of_processes(sandbox: Sandbox) -> None:
    if not is_machine_root() and os.geteuid() == 0:
        pytest.skip("root of a container's user namespace: the kernel may not count its processes")
    code = """
    import os, time
    started = 0
    try:
        for _ in range(200):
            if os.fork() == 0:
                time.sleep(300)
            started += 1
    except OSError:
        pass
    print(started)
    """
    assert int(python(sandbox, code).stdout) < sandbox.limits.processes


def test_lines_are_asked_and_answered_one_by_one(sandbox: Sandbox) -> None:
    code = "while True: print(int(input()) + 1, flush=True)"
    with sandbox.open(sandbox.python_command("-c", code)) as child:
        for number in (1, 41):
            child.send(b"%d\n" % number)
            assert child.line() == b"%d" % (number + 1)


def test_what_a_program_started_ends_with_it(sandbox: Sandbox) -> None:
    """It leaves four in sessions of their own; when `run` returns, they are gone and nobody has to be waited for."""
    before = descendants()
    code = f"import os\nfor _ in range(2): os.fork()\nif os.fork() == 0:\n    os.setsid()\n    {SLEEP}\nprint(1)"
    assert python(sandbox, code).stdout.startswith(b"1")
    assert descendants() == before


@pytest.mark.slow
def test_runs_of_every_end_leave_no_orphan_and_no_zombie(sandbox: Sandbox) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    impatient = Sandbox(SandboxLimits(wall_s=0.5))
    before = descendants()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a run leaves behind becomes our child
    try:
        for code in BAD_ENDS * 5:
            impatient.run(impatient.python_command("-c", code))
            assert python(sandbox, "print(1)").stdout == b"1\n"
        assert descendants() == before
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.parametrize("as_root", [True, False], ids=["users", "user namespace"])
def test_a_killed_worker_takes_its_sandboxes_with_it(as_root: bool, tmp_path: Path) -> None:
    if as_root and not is_machine_root():
        pytest.skip("only root can confine by real users")
    sandbox_or_skip(as_root=as_root)
    worker = f"""
    import time
    from infra.sandbox.sandbox import Sandbox
    sandbox = Sandbox(as_root={as_root})
    code = "import os, time; os.fork(); print(1, flush=True); time.sleep(300)"
    with sandbox.open(sandbox.python_command("-c", code)) as child:
        child.line()
        print("ready", flush=True)
        time.sleep(300)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(worker)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    eventually(lambda: len(descendants(process.pid)) >= 4, "bubblewrap, the shell, and the program twice")
    held = descendants(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    eventually(lambda: not any(is_running(pid) for pid in held), f"some of {held} are still running")


def test_where_bubblewrap_is_missing_the_error_says_what_to_install(tmp_path: Path) -> None:
    script = "from infra.sandbox.sandbox import Sandbox\nSandbox()"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True,
        env={"PATH": str(tmp_path), "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode != 0
    assert "no bwrap on PATH: install bubblewrap" in done.stderr


@pytest.mark.parametrize(
    "fake", ["exit 1", 'shift $(($# - 3)); exec "$@"', "echo 0 0"], ids=["refuses", "runs unconfined", "lies"]
)
def test_a_bubblewrap_that_does_not_confine_is_found_out(fake: str, tmp_path: Path) -> None:
    sandbox_or_skip()
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{fake}\n", encoding="ascii")
    (tmp_path / "bwrap").chmod(0o755)
    script = "from infra.sandbox.sandbox import Sandbox\nSandbox()\nprint('RAN')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/bin", "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert "RAN" not in done.stdout
    assert "cannot be confined here" in done.stderr


def test_a_program_that_is_not_there_is_its_own_failure(sandbox: Sandbox) -> None:
    assert sandbox.run(["/usr/bin/no-such-thing"]).code in (126, 127)


def test_what_bubblewrap_cannot_mount_is_not_the_programs_failure() -> None:
    sandbox = sandbox_or_skip()
    with pytest.raises(SandboxUnavailable, match="could not confine"):
        sandbox.run(["/bin/true"], files={"": b""})


def descendants(pid: int = 0) -> set[int]:
    """All processes below `pid` (this one by default), zombies included."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid or os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid or os.getpid()}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
