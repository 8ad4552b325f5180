"""Processes that a benchmark starts, and the processor time they took."""

import asyncio
import json
import os
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

from infra.local.process import Watched


def cpu_s(pid: int) -> float:
    """Processor time, user and system, of a process and of all that it started and that still run, in seconds."""
    total_s, left = 0.0, [pid]
    while left:
        one = left.pop()
        total_s += _own_s(one)
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                left += map(int, task.read_text(encoding="ascii").split())
            except OSError:  # it has ended
                continue
    return total_s


def idle_share(pid: int, over_s: float = 2.0) -> float:
    """Processor seconds a second of a process that has nothing to do."""
    before_s, begin = cpu_s(pid), time.perf_counter()
    time.sleep(over_s)
    return (cpu_s(pid) - before_s) / (time.perf_counter() - begin)


def apart(work: Callable[[], Coroutine[None, None, dict[str, float]]]) -> dict[str, float]:
    """What it measures in a process of its own, so that no memory of the one before is used again."""
    with tempfile.TemporaryFile() as said:
        if not (child := os.fork()):
            code = 1
            try:
                said.write(json.dumps(asyncio.run(work())).encode())
                said.flush()
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"measuring ended with {status}, see above")
        said.seek(0)
        found: dict[str, float] = json.loads(said.read())
        return found


def end(child: Watched) -> None:
    """End a process that was started, and all that it started."""
    child.kill_group()
    child.process.wait()
    child.release()


def end_gently(child: Watched, within_s: float) -> None:
    """As Ctrl-C does, and after `within_s` for certain."""
    child.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(timeout=within_s)
    end(child)


def last_words(log: Path) -> str:
    """The last line that a process wrote, for an error about it."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][-300:] if lines else "it said nothing"


def source_path() -> dict[str, str]:
    """The environment by which a child finds this very source, wherever it is started."""
    root = str(Path(__file__).parents[4])
    return {"PYTHONPATH": os.pathsep.join(one for one in (root, os.environ.get("PYTHONPATH", "")) if one)}


def _own_s(pid: int) -> float:
    """By the clock of the process (clock_getcpuclockid), which counts nanoseconds where /proc counts hundredths."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # it has ended
        return 0.0
