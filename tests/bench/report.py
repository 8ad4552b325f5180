"""Figures of benchmarks: their rows and table, the file with the newest run of each benchmark, and the pages that show them."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
MEASURED = Path(__file__).with_name("measured.json")
AREAS = Path(__file__).with_name("areas")
PAGES = ROOT / "infra" / "docs" / "measured"
WRITTEN = """*Written by `make docs` from `tests/bench/areas` and `tests/bench/measured.json`, which `make bench NAME=…
ARGS=--save` writes.* Load: processes that ran or waited for a core before the run; above the number of cores, trust ratios and
processor time. A comparison's value is the peer's figure over headrace's: above 1 headrace is cheaper.

"""
UNIT_COSTS = ROOT / "infra" / "cli" / "plan" / "unit_costs.json"


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure.

    what: Figure's name. value: In `unit`; for a comparison `peer / ours`, above 1 where headrace is cheaper; None where it
    was not measured. ours, peer: Both sides of a comparison, in `unit`. low, high: Target, None for none. why: What bounds a
    missed target, or why there is no value. cost: Unit cost of `headrace plan` that this figure is.

    Example: Row("pause p50", 27.0, "ms", high=60.0)
    """

    what: str
    value: float | None = None
    unit: str = ""
    ours: float | None = None
    peer: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""
    cost: str = ""

    @property
    def target(self) -> str:
        if self.low is not None and self.low == self.high:
            return number(self.low)
        parts = ("at least", self.low), ("at most", self.high)
        return ", ".join(f"{words} {number(bound)}" for words, bound in parts if bound is not None)

    @property
    def verdict(self) -> str:
        if self.value is None:
            return f"not measured: {self.why}"
        if not self.target:
            return ""
        is_met = (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)
        return "met" if is_met else "missed"


class Run(msgspec.Struct, frozen=True):
    """One run of a benchmark. load: Mean processes that ran or waited for a core, before it. took_s: Seconds."""

    command: str
    at: str
    commit: str
    machine: str
    load: float
    took_s: float
    rows: tuple[Row, ...]


def compared(what: str, unit: str, ours: float, peer: float, low: float | None = None, why: str = "") -> Row:
    """The row of a comparison in which less is better."""
    return Row(what, peer / ours, unit, ours=ours, peer=peer, low=low, why=why)


def table(name: str, rows: Sequence[Row]) -> Table:
    """Table for the terminal."""
    shown = Table("figure", title=name)
    for title in ("headrace", "peer", "value"):
        shown.add_column(title, justify="right")
    shown.add_column("target")
    shown.add_column("")
    for row in rows:
        ours, peer = ("" if side is None else f"{number(side)} {row.unit}" for side in (row.ours, row.peer))
        unit = "times" if row.peer is not None else row.unit
        value = "" if row.value is None else f"{number(row.value)} {unit}"
        style = "red" if row.verdict.startswith("missed") else ""
        shown.add_row(row.what, ours, peer, value, row.target, row.verdict, style=style)
    return shown


def read() -> dict[str, Run]:
    """The newest run of each benchmark."""
    return msgspec.json.decode(MEASURED.read_bytes(), type=dict[str, Run])


def keep(name: str, run: Run) -> None:
    """Write a run to `MEASURED`, and its unit costs to the file of `headrace plan`."""
    _write(MEASURED, msgspec.json.encode(dict(sorted((read() | {name: run}).items()))))
    costs = msgspec.json.decode(UNIT_COSTS.read_bytes())
    source = f"make bench NAME={name}, {run.at} UTC"
    for row in run.rows:
        if row.cost and row.value is not None:
            costs[row.cost] = {"value": row.value, "unit": row.unit, "source": source}
    _write(UNIT_COSTS, msgspec.json.encode(costs))


def pages() -> dict[Path, str]:
    """Pages by path: the text of each area with the newest runs that it names."""
    runs, found = read(), {}
    for path in sorted(AREAS.glob("*.md")):
        text = re.sub(r"<!-- run ([\w-]+) -->", lambda name: markdown(runs[name[1]]), path.read_text(encoding="utf-8"))
        title, about, rest = text.split("\n\n", 2)
        found[PAGES / path.name] = f"{title}\n\n{about}\n\n{WRITTEN}{rest}"
    return found


def markdown(run: Run) -> str:
    """A run's command and its figures, in a table by case if several figures share their cases."""
    cases: dict[str, dict[str, Row]] = {}
    for row in run.rows:
        case, _, name = row.what.rpartition(": ")
        cases.setdefault(case, {})[name] = row
    names = list(dict.fromkeys(name for case, rows in cases.items() if case and len(rows) > 1 for name in rows))
    shared = {case: rows for case, rows in cases.items() if case and rows.keys() <= set(names)}
    tables = []
    if len(shared) > 1:
        by_case = [
            [case, *(_value(rows[name]) if name in rows else "" for name in names)] for case, rows in shared.items()
        ]
        tables.append([["case", *names], *by_case])
    rest = [row for row in run.rows if len(shared) < 2 or row.what.rpartition(": ")[0] not in shared]
    if any(row.peer is not None for row in rest):
        sides = [
            [f"{number(side)} {row.unit}" if side is not None else "" for side in (row.ours, row.peer)] for row in rest
        ]
        lines = [[row.what, *both, _value(row)] for row, both in zip(rest, sides, strict=True)]
        tables.append([["figure", "headrace", "peer", "value"], *lines])
    elif rest:
        tables.append([["figure", "value"], *([row.what, _value(row)] for row in rest)])
    text = [f"`{run.command}`, {run.at} UTC, commit {run.commit}, {run.machine}, load {run.load:g}.\n"]
    for first, *lines in tables:
        text += [f"| {' | '.join(first)} |", "|---" * len(first) + "|"]
        text += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines] + [""]
    return "\n".join(text).rstrip()


def _value(row: Row) -> str:
    """The value with its target, as in "26.8 ms (at most 60: met)"; "" for none."""
    if row.value is None:
        return ""
    shown = f"{number(row.value)} {'times' if row.peer is not None else row.unit}".strip()
    return shown + (f" ({row.target}: {row.verdict})" if row.target else "")


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(msgspec.json.format(data, indent=1) + b"\n")


def described(command: str, began: float, rows: Sequence[Row], load: float) -> Run:
    """The run of `command` that began at `began`, in seconds since the epoch."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(began))
    return Run(command, at, commit, machine(), round(load, 1), round(time.time() - began, 1), tuple(rows))


def machine() -> str:
    """Cores, CPU model and memory of this machine."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {names[0] if names else platform.machine()}, {memory:.0f} GiB"


def _lines(path: str) -> Iterator[str]:
    yield from Path(path).read_text().splitlines()


def number(value: float) -> str:
    """Whole from 100 on, else three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
