"""What grows with the log: all that starts, answers or holds, at 10,000, 100,000 and 1,000,000 of what it grows with.

    master, from nothing   groups ever issued, read from the log      master, snapshot   the same from what a master before left
    readers                reports of roles: what a trainer, an explorer and `status` read at their start
    collect                answers that wait for feedback: a worker takes the partition over from the store
    audit, trace           experiences of a log that is made as it is read; of trace the index from nothing, and a question
    buffer, draw           experiences in a trainer's buffer: filling it, and a draw of 1,000
    uses                   groups that a trainer remembers: counted, in a checkpoint, and forgotten

The parts are those of the benchmarks `starts`, `takeover`, `audit` and `draw`. Each point is a process of its own: seconds of
its CPU in the work alone, and the most memory of the process above what it began with, the made log included. A point that the
one before it says would take longer than `limit_s` is named and left out. The exponent is the slope of a straight line through
the points in logarithms: 1 is linear, 0 does not grow.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from infra.cli.bench.common.children import apart
from infra.cli.bench.common.peak import held_bytes, most_bytes, peak_anew

SIZES = (10_000, 100_000, 1_000_000)
LIMIT_S = 600.0
LINEAR = 1.1  # what an exponent may be, with the noise of three points
LEAST_S = 0.002  # less is noise
WARM = 100  # of a first run, whose imports are not counted
DRAWS = 5
Say = Callable[[str], None]
Figures = dict[str, float]  # CPU seconds by what took them


class GrowthPoint(msgspec.Struct, frozen=True):
    """One measurement.

    what: grows. size: of what it grows with. cpu_s: of the work. mb: at most, above the start. work: of WORKS. why: it
    was left out, if it was.
    """

    what: str
    size: int
    cpu_s: float = 0.0
    mb: float = 0.0
    work: str = ""
    why: str = ""


class GrowthLine(msgspec.Struct, frozen=True):
    """One thing over its sizes. what: it is. points: by size. exponent: None where fewer than two points are above the
    noise.
    """

    what: str
    points: tuple[GrowthPoint, ...]
    exponent: float | None

    @property
    def is_met(self) -> bool | None:
        """Whether it grows no worse than linearly, None where nothing can be said."""
        return None if self.exponent is None else self.exponent <= LINEAR


def run(
    sizes: Sequence[int], out: Path, say: Say, limit_s: float = LIMIT_S, *, only: Collection[str] = ()
) -> list[GrowthLine]:
    """Everything over the sizes; in `out` growth.json, written anew after each point, and growth.png. only: of WORKS, all where
    there is none.
    """
    points: list[GrowthPoint] = []
    out.mkdir(parents=True, exist_ok=True)
    for name in only or WORKS:
        work, took_s, known = WORKS[name], 0.0, dict[str, None]()
        for at, size in enumerate(sizes):
            expected_s = took_s * size / sizes[at - 1] if at else 0.0
            if expected_s > limit_s:
                why = f"about {expected_s / 60:.0f} minutes"
                points += [GrowthPoint(what, size, work=name, why=why) for what in known]
                say(f"growth: {name} at {size:,} is left out: it would take {why}")
                continue
            figures = apart(partial(_watched, work, size))
            mb, took_s = figures.pop("mb"), figures.pop("wall_s")
            points += [GrowthPoint(what, size, cpu_s, mb, name) for what, cpu_s in figures.items()]
            known = dict.fromkeys(figures)
            (out / "growth.json").write_bytes(msgspec.json.format(msgspec.json.encode(lines_of(points)), indent=1))
            say(f"growth: {name} at {size:,}: {took_s:.1f} s")
    lines = lines_of(points)
    (out / "growth.json").write_bytes(msgspec.json.format(msgspec.json.encode(lines), indent=1))
    if any(one.exponent is not None for one in lines):
        draw(lines, out / "growth.png")
    return lines


def lines_of(points: Sequence[GrowthPoint]) -> list[GrowthLine]:
    """By what they are of."""
    lines: dict[str, list[GrowthPoint]] = {}
    for one in points:
        lines.setdefault(one.what, []).append(one)
    return [GrowthLine(what, tuple(own), exponent([one for one in own if not one.why])) for what, own in lines.items()]


def exponent(points: Sequence[GrowthPoint]) -> float | None:
    """Slope of log(CPU) over log(size), by least squares.

    >>> round(exponent([GrowthPoint("", 10, 0.5), GrowthPoint("", 100, 5.0), GrowthPoint("", 1000, 50.0)]), 6)
    1.0
    """
    known = [one for one in points if one.cpu_s >= LEAST_S]
    if len(known) < 2:
        return None
    return float(np.polyfit([math.log(one.size) for one in known], [math.log(one.cpu_s) for one in known], 1)[0])


def draw(lines: Sequence[GrowthLine], out: Path) -> None:
    """CPU seconds over size, both logarithmic."""
    from infra.cli.demo.curves import draw_curves

    curves = {
        one.what: [[(point.size, point.cpu_s) for point in one.points if point.cpu_s >= LEAST_S]]
        for one in lines
        if one.exponent is not None
    }
    draw_curves({"growth": curves}, out, x="groups, reports, answers or experiences", y="CPU seconds", logarithmic=True)


async def _watched(work: Callable[[int], Figures], size: int) -> Figures:
    await asyncio.to_thread(work, WARM)  # in a thread: it has loops and processes of its own
    before = held_bytes()
    peak_anew()
    begin_s = time.monotonic()
    figures = await asyncio.to_thread(work, size)
    return {"mb": (most_bytes() - before) / 1e6, "wall_s": time.monotonic() - begin_s} | figures


def _master(size: int) -> Figures:
    from infra.cli.bench.growth.starts import log_of_groups, master_start
    from infra.store.memory import MemoryStore

    async def started() -> Figures:
        log, store = await log_of_groups(size), MemoryStore()
        without = await master_start(log, store)
        return {"master, from nothing": without, "master, snapshot": await master_start(log, store)}

    return asyncio.run(started())


def _readers(size: int) -> Figures:
    from infra.cli.bench.growth.starts import GROUPS, READERS, REPORT, cpu_s, log_of_groups, store_records
    from schemas.topics import REPORTS

    async def read() -> Figures:
        log = await log_of_groups(GROUPS)
        store_records(log, REPORTS, [REPORT] * size)
        found = {f"readers, {role}": await cpu_s(partial(act, log)) for role, act in READERS.items()}
        del found["readers, audit"]  # which has a line of its own
        return found

    return asyncio.run(read())


def _collect(size: int) -> Figures:
    from infra.cli.bench.records.takeover import TakeoverPlan
    from infra.cli.bench.records.takeover import run as taken_over

    found = taken_over(TakeoverPlan(waiting=size, closed=0, rebuild=False), lambda line: None)
    return {
        "collect, taken over": found["taken_over_s"],
        "collect, state stored": found["snapshot_s"],
        "mb": found["taken_over_peak_mb"],
    }


def _audit(size: int) -> Figures:
    from infra.cli.bench.looking.audit import audited, whole_versions

    return {"audit": asyncio.run(audited(whole_versions(size), lambda line: None))["audit_cpu_s"]}


def _trace(size: int) -> Figures:
    from infra.cli.bench.looking.audit import traced, whole_versions

    found = asyncio.run(traced(whole_versions(size), lambda line: None))
    return {"trace, index": found["trace_build_cpu_s"], "trace, a question": found["trace_answer_ms_p50"] / 1000}


def _buffer(size: int) -> Figures:
    from infra.cli.bench.learner.draw import LANES, USES, filled
    from trainer.loop.supply import drawn_from

    begin_s = time.process_time()
    buffer = filled(size, 1, users=1000)
    figures = {"buffer, filled": time.process_time() - begin_s}
    for name, lane in LANES.items():
        assert lane.max_uses == USES
        took_s = []
        for seed in range(DRAWS):
            begin_s = time.process_time()
            drawn_from(buffer.drawable("live"), lane, num_experiences=1_000, seed=seed)
            took_s.append(time.process_time() - begin_s)
        figures[f"buffer, draw by {name}"] = min(took_s)
    return figures


def _uses(size: int) -> Figures:
    from infra.store.memory import MemoryStore
    from trainer.buffer.uses import Uses, use_key
    from trainer.journal.checkpoint import Checkpoint, Position, load_newest, save

    uses = Uses()
    begin_s = time.process_time()
    for number in range(size):
        uses.add(use_key(f"t{number}.0", 0, "live"), number)
    figures = {"uses, counted": time.process_time() - begin_s}
    store = MemoryStore()
    state = Checkpoint(position=Position(step=1), learner={}, uses=uses, references=())
    begin_s = time.process_time()
    save(store, "bench", state)
    figures["uses, checkpoint written"] = time.process_time() - begin_s
    begin_s = time.process_time()
    found = load_newest(store, "bench")
    figures["uses, checkpoint read"] = time.process_time() - begin_s
    assert found is not None and len(found.uses) == size
    begin_s = time.process_time()
    assert found.uses.forget_below(size, ()) == size
    figures["uses, forgotten"] = time.process_time() - begin_s
    return figures


WORKS: Mapping[str, Callable[[int], Figures]] = {
    "master": _master,
    "readers": _readers,
    "collect": _collect,
    "audit": _audit,
    "trace": _trace,
    "buffer": _buffer,
    "uses": _uses,
}
