"""Processor time and memory of processes, rounds taken in turn, and the environment of the peers."""

import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from infra.local.process import Watched, start_watched
from tests.bench.report import ROOT, Row, compared

PEERS_PYTHON = Path(sys.prefix) / "bench" / "bin" / "python"  # made by `make bench-deps`


def cpu_s(pid: int) -> float:
    """Processor seconds, user and system, of a process and of all that it started and that still run."""
    total_s, left = 0.0, [pid]
    while left:
        process = left.pop()
        with suppress(OSError):  # it has ended
            total_s += time.clock_gettime((~process << 3) | 2)
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                left += map(int, task.read_text(encoding="ascii").split())
    return total_s


def idle_share(spent_s: Callable[[], float], over_s: float = 2.0) -> float:
    """Processor seconds a second of what has nothing to do."""
    before_s, begin = spent_s(), time.perf_counter()
    time.sleep(over_s)
    return (spent_s() - before_s) / (time.perf_counter() - begin)


def started(arguments: list[str], log: Path, python: str = sys.executable) -> Watched:
    """A Python process that finds this source and ends with this one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'infra' / 'sdk'}", "PYTHONUNBUFFERED": "1"}
    return start_watched([python, *arguments], log=log, env=env, cwd=log.parent)


def ended(child: Watched) -> None:
    """End a process and all that it started."""
    child.kill_group()
    child.process.wait()
    child.release()


def last_words(log: Path) -> str:
    """The last line that a process wrote."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][-300:] if lines else "it said nothing"


def lacks(module: str) -> str:
    """Why a module of the peers' environment is missing, "" where it is there."""
    if not PEERS_PYTHON.exists():
        return "not installed: make bench-deps"
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return f"no {module}: make bench-deps" if subprocess.run([PEERS_PYTHON, "-c", look], check=False).returncode else ""


def turns(contestants: Mapping[str, Callable[[], object]], rounds: int, budget_s: float) -> dict[str, float]:
    """CPU seconds per call of each function: the best of its rounds. Rounds alternate, so other work affects all functions."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, contestant in contestants.items():
            calls, begin_s = 0, time.process_time()
            while (spent_s := time.process_time() - begin_s) < budget_s or not calls:
                contestant()
                calls += 1
            best[name] = min(best[name], spent_s / calls)
    return best


def against(what: str, unit: str, ours: list[float], peer: list[float], low: float | None = None, why: str = "") -> Row:
    """The row of two that took rounds in turn, by their medians."""
    return compared(what, unit, statistics.median(ours), statistics.median(peer), low, why)


async def timed(work: Awaitable[object]) -> float:
    """Wall seconds that the work takes."""
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin
