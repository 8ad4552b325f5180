"""Measures a worker that takes a partition of waiting answers over, from a snapshot in the store and from the log alone.

One partition on a log in memory and a store in a folder, through the workers' own collector: answers come, feedback joins some
of them, which closes these, and the state is stored. Then a worker with an empty folder begins: seconds of this process's CPU,
and the most memory above what lay there before. A broker and a store across a network add what they take.
"""

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from infra.cli.bench.common.children import apart
from infra.cli.bench.common.peak import held_bytes, most_bytes, peak_anew
from infra.cli.bench.records.feedback import DAY_MS, answer, collector_of, take
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.roles.memory import search_seldom
from infra.store.directory import DirectoryStore
from infra.store.store import Store
from schemas import Feedback
from schemas.ids import answer_id, experience_id, request_group, session_name
from schemas.topics import VERIFIED
from streams.collect.collector import Collector

MB = 1e6
JOINS = 2_000  # after the take-over, whose answers have to be fetched from the log


class TakeoverPlan(msgspec.Struct, frozen=True, kw_only=True):
    """waiting, closed: answers on the partition. rebuild: also from the log alone, which takes as long as all of it took.

    Example: TakeoverPlan(waiting=10_000, closed=0)
    """

    waiting: int
    closed: int
    rebuild: bool = True


def run(plan: TakeoverPlan, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds of CPU, and megabytes."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-takeover-") as name:
        folder = Path(name)
        log = asyncio.run(_filled(plan, DirectoryStore(folder / "store")))
        say(f"{plan.waiting + 2 * plan.closed:,} records are in the log")
        gc.collect()
        gc.freeze()  # the log in memory is no garbage of a worker's
        figures: dict[str, float] = {"waiting": plan.waiting, "closed": plan.closed}
        figures |= apart(lambda: _first(log, folder / "first"))
        stored = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
        figures["store_mb"] = stored / MB
        figures |= apart(lambda: _begun("taken_over", log, folder / "second", plan))
        if plan.rebuild:
            log.store = None
            figures |= apart(lambda: _begun("rebuilt", log, folder / "third", plan))
        return figures


async def _first(log: Log, folder: Path) -> dict[str, float]:
    """Fold all but the last record, store the state, fold that, store it again."""
    search_seldom()  # as a worker does
    records = [record async for chunk in log.chunks(VERIFIED) for record in chunk]
    collector, figures = collector_of(log, folder), {}
    await collector.recover(0, lambda: False)
    for name, part in (("snapshot_s", records[:-1]), ("snapshot_again_s", records[-1:])):
        await take(collector, part)
        gc.collect()  # a search that falls into the measurement is not part of its work
        begin = time.process_time()
        await collector.snapshot()
        figures[name] = time.process_time() - begin
    collector.close()
    return figures


async def _begun(name: str, log: Log, folder: Path, plan: TakeoverPlan) -> dict[str, float]:
    """A worker with an empty folder: its start, and what it joins then."""
    search_seldom()  # as a worker does
    end = (await log.bounds(VERIFIED))[1][0]
    before = held_bytes()
    peak_anew()
    begin, wall = time.process_time(), time.perf_counter()
    collector = collector_of(log, folder)
    await collector.recover(end, lambda: False)
    figures = {
        f"{name}_s": time.process_time() - begin,
        f"{name}_wall_s": time.perf_counter() - wall,
        f"{name}_peak_mb": (most_bytes() - before) / MB,
    }
    assert collector.num_open() == plan.waiting, f"{collector.num_open()} groups wait, expected {plan.waiting}"
    figures[f"{name}_join_ms"] = await _join(log, collector, plan)
    collector.close()
    return figures


async def _join(log: Log, collector: Collector, plan: TakeoverPlan) -> float:
    """Feedback on answers whose blocks may lie in the log alone: milliseconds of CPU each."""
    begin = (await log.bounds(VERIFIED))[1][0]
    joins = min(JOINS, plan.waiting)
    for number in np.random.default_rng(1).permutation(plan.waiting)[:joins]:
        await log.publish(VERIFIED, _said(plan.closed + int(number)))
    records = [record async for chunk in log.chunks(VERIFIED, {0: begin}) for record in chunk]
    cpu = time.process_time()
    await take(collector, records)
    return (time.process_time() - cpu) / joins * 1000


async def _filled(plan: TakeoverPlan, store: Store) -> Log:
    log = Log(MemoryBus(), "bench", store=store)
    await log.create_topics(partitions=1, keep_ms=30 * DAY_MS)
    random = np.random.default_rng(0)
    for number in range(plan.closed + plan.waiting):
        await log.publish(VERIFIED, answer(_group(number), random))
        if number < plan.closed:
            await log.publish(VERIFIED, _said(number))
    return log


def _group(number: int) -> str:
    return request_group(session_name("bench", f"s{number}"), 1, number)


def _said(number: int) -> Feedback:
    ref = answer_id(experience_id(_group(number), 0, 0))
    return Feedback(ref=ref, id=f"f{number}", value=float(number % 2), source="csat", rater=f"user-{number}")
