"""Measures `audit`, and `trace` with its index built from nothing, over a log of any length that is not held in memory.

Each is a process of its own: the most memory that it held, all libraries included, and seconds of its CPU without those that
making the records took. A broker adds 20 to 25 µs to each record that is read from it.
"""

import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from infra.cli.bench.common.children import apart
from infra.cli.bench.common.made_log import APP, STEP_ITEMS, STEPS_PER_VERSION, MadeBus, name_of
from infra.cli.bench.common.peak import most_bytes
from infra.ledger.audit import audit
from infra.ledger.index import LogIndex
from infra.ledger.trace import trace_answer
from infra.log.log import Log

MB, GB = 1e6, 1e9
ASKED = 200
EVERY_S = 30.0  # between two lines of progress
Say = Callable[[str], None]


def tell(words: str) -> None:
    """How far it is, beside the figures."""
    print(words, file=sys.stderr, flush=True)


def run(*, experiences: int, say: Say = tell) -> dict[str, float]:
    """CPU seconds, megabytes of memory, gigabytes of disk."""
    count = whole_versions(experiences)
    say(f"{count:,} experiences, {count * 4 + count // STEP_ITEMS:,} records")
    figures: dict[str, float] = {"experiences": count}
    figures |= apart(lambda: audited(count, say))
    return figures | apart(lambda: traced(count, say))


def whole_versions(experiences: int) -> int:
    """Nearly so many: as many as are all trained."""
    whole = STEP_ITEMS * STEPS_PER_VERSION
    return max(whole, experiences // whole * whole)


async def audited(count: int, say: Say) -> dict[str, float]:
    """Audit, of this process."""
    bus, taken, shown_s = MadeBus(count), [0.0], [time.monotonic()]

    def on_reading(topic: str, left: int) -> None:
        taken[0] = max(taken[0], _unnamed_bytes())
        _now_and_then(shown_s, say, f"audit: {topic or 'parts'}: {left:,} left")

    began_s, wall_s = time.process_time(), time.perf_counter()
    found = await audit(Log(bus, APP), APP, on_reading)
    assert found.is_clean and found.trained == found.published == count, f"all were trained: {found}"
    return {
        "audit_cpu_s": time.process_time() - began_s - bus.made_cpu_s,
        "audit_wall_s": time.perf_counter() - wall_s,
        "audit_making_cpu_s": bus.made_cpu_s,
        "audit_peak_mb": most_bytes() / MB,
        "audit_disk_gb": taken[0] / GB,
    }


async def traced(count: int, say: Say) -> dict[str, float]:
    """Trace and its index, of this process."""
    bus, shown_s = MadeBus(count), [time.monotonic()]
    log = Log(bus, APP)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-audit-") as folder:
        path = Path(folder) / "trace.sqlite"
        index = LogIndex(path, run=APP, policy="main")
        try:
            began_s, wall_s = time.process_time(), time.perf_counter()
            await index.refresh(log, lambda topic, left: _now_and_then(shown_s, say, f"trace: {topic}: {left:,} left"))
            figures = {
                "trace_build_cpu_s": time.process_time() - began_s - bus.made_cpu_s,
                "trace_build_wall_s": time.perf_counter() - wall_s,
            }
            took_ms = sorted([await _asked(log, index, number) for number in range(0, count, -(-count // ASKED))])
            figures["trace_answer_ms_p50"] = took_ms[len(took_ms) // 2]
        finally:
            index.close()
        figures["trace_peak_mb"] = most_bytes() / MB
        figures["trace_index_gb"] = path.stat().st_size / GB
    return figures


async def _asked(log: Log, index: LogIndex, number: int) -> float:
    """Milliseconds of one question, as the command asks it."""
    began_s = time.perf_counter()
    await index.refresh(log)
    found = await trace_answer(log, index, name_of(number))
    assert found.published is not None and len(found.uses) == 1, f"{name_of(number)} was trained once"
    return 1000 * (time.perf_counter() - began_s)


def _now_and_then(shown_s: list[float], say: Say, words: str) -> None:
    if time.monotonic() - shown_s[0] > EVERY_S:
        shown_s[0] = time.monotonic()
        say(words)


def _unnamed_bytes() -> int:
    """Of the files that this process has open and that have no name."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.fstat(int(name))
        except OSError:  # that of the listing itself
            continue
        if stat.S_ISREG(found.st_mode) and not found.st_nlink:
            total += found.st_size
    return total
