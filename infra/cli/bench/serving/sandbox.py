"""What confinement costs: a Python that does nothing, alone and in the sandbox, side by side; and that nothing is left.

Every tenth run ends badly (killed at its time, a flood, processes left behind), so that orphans could come.
"""

import ctypes
import os
import statistics
import subprocess
import time
from pathlib import Path

from infra.sandbox.command import SandboxLimits
from infra.sandbox.sandbox import Sandbox

NUM_RUNS = 1000
BAD_ENDS = (
    "import os, time\nfor _ in range(3): os.fork()\ntime.sleep(300)",
    "while True: print('x' * 4096)",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)",
    "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(os.getpid(), 11)",
)
PR_SET_CHILD_SUBREAPER = 36


def run(num_runs: int = NUM_RUNS) -> dict[str, float]:
    """Times in milliseconds; orphans: processes left running, zombies: left unburied."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a run leaves behind becomes our child, so it can be counted
    try:
        before = set(_children())
        confined = Sandbox()
        impatient = Sandbox(SandboxLimits(wall_s=0.5))
        command = confined.python_command("-c", "pass")
        alone, inside = [], []
        for index in range(num_runs):
            if index % 10 == 9:
                code = BAD_ENDS[index // 10 % len(BAD_ENDS)]
                impatient.run(impatient.python_command("-c", code))
                continue
            alone.append(_timed(command))
            started_s = time.perf_counter()
            confined.run(command)
            inside.append((time.perf_counter() - started_s) * 1000)
        states = [_children()[pid] for pid in set(_children()) - before]
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    extra = [with_it - without for with_it, without in zip(inside, alone, strict=True)]
    return {
        "runs": float(num_runs),
        "alone_ms_p50": statistics.median(alone),
        "run_ms_p50": statistics.median(inside),
        "run_ms_p95": _p95(inside),
        "overhead_ms_p50": statistics.median(extra),
        "overhead_ms_p95": _p95(extra),
        "orphans": float(sum(state != "Z" for state in states)),
        "zombies": float(sum(state == "Z" for state in states)),
    }


def _timed(command: list[str]) -> float:
    started_s = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return (time.perf_counter() - started_s) * 1000


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def _children() -> dict[int, str]:
    """Process id to state of every child of this process."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent, *_ = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid():
            found[int(entry.name)] = state
    return found
