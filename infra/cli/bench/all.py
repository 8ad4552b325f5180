"""Every benchmark, one after the other, and their figures in one table.

Each is a process of `headrace bench` with a time of its own, so that none finds what another left behind nor keeps the others
waiting. One that fails, or takes too long, is one line, and the rest continues. What runs ends with this process, however
that ends. Those that take least come first.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from infra.cli.bench.common.children import end
from infra.cli.bench.ends import BenchEnd
from infra.cli.bench.rows import rows_of, rows_without
from infra.local.process import start_watched

Say = Callable[[str], None]
QUICK_MINUTES = 5.0  # of each, for a first look
TAIL_S = 5.0  # for the last words of one that has ended


class BenchUse(msgspec.Struct, frozen=True):
    """How one is run with all others. minutes: at most. quick: its options for a first look, None where it is left out of one.
    asked: other options. why: it is never run, "" where it is.

    Example: BenchUse(minutes=20, quick=("--repeat", "1"))
    """

    minutes: float = 30.0
    quick: tuple[str, ...] | None = ()
    asked: tuple[str, ...] = ()
    why: str = ""


# Of those that are named here; every other one is run as BenchUse() says.
USES: Mapping[str, BenchUse] = {
    "audit": BenchUse(quick=("--experiences", "20000")),
    "codec": BenchUse(minutes=20, quick=("--repeat", "2")),
    "console": BenchUse(minutes=40, quick=None),
    "console-load": BenchUse(minutes=40, quick=None),
    "days": BenchUse(minutes=20),
    "delta": BenchUse(minutes=40, quick=None),
    "draw": BenchUse(minutes=20),
    "episodes": BenchUse(minutes=15, quick=("--episodes", "100")),
    "fan-out": BenchUse(minutes=20, quick=("--mb", "4", "--hosts", "2", "--followers", "2")),
    "feedback": BenchUse(minutes=15, quick=None),
    "gate": BenchUse(minutes=90, quick=("--paths", "8")),
    "gateway": BenchUse(minutes=20),
    "gateway-peers": BenchUse(minutes=40, quick=("--repeat", "1", "--no-model")),
    "growth": BenchUse(minutes=90, quick=("--sizes", "1000,10000")),
    "held": BenchUse(minutes=20),
    "hop": BenchUse(quick=("--repeat", "1", "--groups", "16")),
    "learner": BenchUse(minutes=40, quick=("--repeat", "1", "--hidden", "128", "--layers", "2")),
    "life": BenchUse(minutes=40, quick=("--hidden", "128", "--layers", "2")),
    "memory": BenchUse(minutes=20, quick=("--hidden", "256", "--layers", "2")),
    "mix": BenchUse(minutes=180, quick=None),
    "offpolicy": BenchUse(minutes=360, quick=None),
    "outage": BenchUse(minutes=25, quick=("--minutes", "0.5")),
    "overlap": BenchUse(minutes=15, quick=None),
    "plan": BenchUse(why="it computes from rates, settings and what the others measured"),
    "reload": BenchUse(quick=("--versions", "20")),
    "sandbox": BenchUse(minutes=20),
    "start": BenchUse(minutes=30, quick=None),
    "starts": BenchUse(quick=None),
    "state": BenchUse(minutes=40, quick=("--hidden", "256", "--layers", "2")),
    "stream": BenchUse(minutes=20),
    "takeover": BenchUse(quick=("--waiting", "10000", "--closed", "10000")),
    "trace": BenchUse(quick=None),
    "train": BenchUse(minutes=240, quick=None),
    "transport": BenchUse(quick=("--repeat", "1", "--answers", "256")),
    "turn": BenchUse(minutes=20),
    "weights": BenchUse(quick=("--gb", "0.05")),
}


def command_of(name: str, options: Sequence[str]) -> list[str]:
    """What runs a benchmark."""
    return [sys.executable, "-m", "infra.cli.main", "bench", name, *options, "--json"]


def in_order(names: Iterable[str]) -> list[str]:
    """Those that may take least first."""
    return sorted(names, key=lambda name: USES.get(name, BenchUse()).minutes)


def run(
    names: Sequence[str],
    say: Say,
    *,
    quick: bool = False,
    command: Callable[[str, Sequence[str]], list[str]] = command_of,
    uses: Mapping[str, BenchUse] = USES,
    ended: Callable[[BenchEnd], None] = lambda one: None,
) -> list[BenchEnd]:
    """All of them, in this order. ended: called with each as soon as it is over."""
    found: list[BenchEnd] = []
    for number, name in enumerate(names, 1):
        use = uses.get(name, BenchUse())
        why = use.why or ("left out of a first look" if quick and use.quick is None else "")
        if why:
            one = BenchEnd(name, tuple(rows_without(name, why)), why=why, is_run=False)
            say(f"bench {name} ({number} of {len(names)}) is not run: {why}")
        else:
            minutes = min(QUICK_MINUTES, use.minutes) if quick else use.minutes
            say(f"bench {name} ({number} of {len(names)}) begins: {minutes:g} minutes at most")
            options = [*use.asked, *(use.quick or ())] if quick else use.asked
            ran = _run_one(name, command(name, options), minutes, say)
            one = msgspec.structs.replace(
                ran,
                at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
                load=round(load_of(ran.took_s), 1),
                options=tuple(options),
            )
            say(_summed_up(one))
        found.append(one)
        ended(one)
    return found


def load_of(seconds: float) -> float:
    """The machine's load over about the last `seconds`: Linux knows it of one, five and fifteen minutes."""
    one, five, fifteen = os.getloadavg()
    return one if seconds < 150 else five if seconds < 600 else fifteen


def _run_one(name: str, command: list[str], minutes: float, say: Say) -> BenchEnd:
    begin_s = time.monotonic()
    said: list[str] = []

    def heard(line: str) -> None:
        said.append(line)
        say(f"  {line}")

    try:
        rows, why = rows_of(name, _figures(command, heard, 60 * minutes), said), ""
    except Exception as error:  # whatever a benchmark does, or prints, is one line
        why = f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
        rows = rows_without(name, why)
    return BenchEnd(name, tuple(rows), why=why, took_s=time.monotonic() - begin_s)


def _summed_up(one: BenchEnd) -> str:
    took = f"after {one.took_s / 60:.1f} minutes"
    if one.why:
        return f"bench {one.bench} failed {took}: {one.why}"
    counts = {verdict: sum(row.verdict == verdict for row in one.rows) for verdict in ("met", "missed", "not run")}
    return f"bench {one.bench} ended {took}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _figures(command: list[str], say: Say, limit_s: float) -> Any:
    """What a benchmark printed as JSON, its progress said as it comes. Raises RuntimeError with its last line."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed.json"
        child = start_watched(command, log=printed, stderr=subprocess.PIPE)
        last = ["it said nothing"]
        assert child.process.stderr is not None
        hearing = threading.Thread(target=_hear, args=(child.process.stderr, say, last), daemon=True)
        hearing.start()
        try:
            code = child.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {limit_s / 60:g} minutes: {last[0][-300:]}") from None
        finally:
            end(child)
            hearing.join(TAIL_S)  # what it left behind may hold the pipe open
        if code:
            raise RuntimeError(f"exit code {code}: {last[0][-300:]}")
        return msgspec.json.decode(printed.read_bytes())


def _hear(pipe: IO[bytes], say: Say, last: list[str]) -> None:
    """Say each line as it comes. last: the newest that says anything."""
    with pipe:
        for raw in pipe:
            line = raw.decode(errors="replace").rstrip()
            last[0] = line or last[0]
            say(line)
