"""The page of all rows of `headrace bench all`, in Markdown: what was aimed at, what was seen, by how much a target is missed
and what bounds it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from infra.cli.bench.all import USES, BenchUse
from infra.cli.bench.common.figures import number, words
from infra.cli.bench.ends import BenchEnd, read_ends
from infra.cli.bench.limits import LIMITS
from infra.cli.bench.rows import NO_LEAST, BenchRow, rows_without
from infra.cli.docs.text import cell

SHIPPED = Path(__file__).parents[1] / "bench" / "measured" / "all.json"
BUSY = 4.0  # twice the cores that all figures are of
NOT_YET = "it was not run for this page"


def page(begin: str, known: Sequence[str], file: Path = SHIPPED) -> str:
    """The page. begin: its first lines. known: benchmarks that there are. file: of `headrace bench all`."""
    measured = {one.bench: one for one in read_ends(file, known)}
    found = [measured.get(name) or without(name) for name in sorted(known)]
    return begin + "".join(summary(found)) + "".join("".join(section(one)) for one in found)


def without(name: str) -> BenchEnd:
    """One that is not in the file: its targets, and why there are no figures."""
    why = USES.get(name, BenchUse()).why or NOT_YET
    return BenchEnd(name, tuple(rows_without(name, why)), why=why, is_run=False)


def summary(found: Sequence[BenchEnd]) -> Iterator[str]:
    """How many targets are met."""
    rows = [row for one in found for row in one.rows]
    aimed = [row for row in rows if row.has_target]
    counts = {verdict: sum(row.verdict == verdict for row in aimed) for verdict in ("met", "missed", "not run")}
    yield f"Of {len(aimed)} targets " + ", ".join(f"{count} are {verdict}" for verdict, count in counts.items()) + ".\n"


def section(end: BenchEnd) -> Iterator[str]:
    """One benchmark: where and when, its rows, and what bounds those that miss their target."""
    yield f"\n## {end.bench}\n\n"
    if end.why:
        yield f"Not measured: {end.why}.\n"
        return
    options = " ".join(end.options)
    asked = f", with `{options}`" if options else ""
    beside = " Beside so much other work its figures of the clock say little." if end.load > BUSY else ""
    yield f"{end.at} UTC, {end.took_s / 60:.1f} minutes, load {end.load:g} on two cores{asked}.{beside}\n\n"
    yield "| | headrace | peer | target | seen | |\n|---|---|---|---|---|---|\n"
    for row in end.rows:
        own, peer = ("" if value is None else number(round(value, 1)) for value in (row.ours, row.peer))
        target = words(row.low, row.high) if row.has_target else ""
        seen = "" if row.value is None else number(row.value)
        yield f"| {cell(row.what)} | {own} | {peer} | {target} | {seen} | {cell(verdict(row))} |\n"
    if end.bench in LIMITS and any(row.verdict == "missed" for row in end.rows):
        yield f"\nWhat bounds it: {LIMITS[end.bench]}\n"


def verdict(row: BenchRow) -> str:
    """Whether it is met, else by how much not.

    >>> verdict(BenchRow("hop", "loop", 0.5, low=1.0)), verdict(BenchRow("start", "demo", 60.0, low=0.0, high=40.0))
    ('missed: 0.5 of it', 'missed: 1.5 times it')
    """
    if row.value is None:
        return f"not run: {row.why}"
    if row.verdict != "missed":
        return row.verdict
    if row.low != NO_LEAST and row.value < row.low:
        return f"missed: {number(row.value / row.low)} of it"
    return f"missed: {number(row.value / row.high)} times it" if row.high > 0 else "missed"
