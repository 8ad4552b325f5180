"""Growth of the CPU time of starts, draws and queries with the size of the log, as exponents; the target is linear.

Logs are in memory; a broker adds 20 to 25 µs to each record read.
"""

import asyncio
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from infra.ledger.account import audit
from infra.ledger.index import LogIndex
from infra.ledger.trace import trace_answer
from infra.log.log import Log, lately
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from schemas import Batch, BatchItem, Block, Closure, Message, PolicyEvent, Span, encode, make_experience
from schemas.ids import experience_id, request_group
from schemas.topics import BATCHES, BUFFER, EXPERIENCES, POLICIES, PROGRESS, REPORTS, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from streams.stages.chain_builder import build_collect
from tests.bench.hop import DAY_MS, TRAFFIC, waiting_answer
from tests.bench.report import Row
from tests.names import session_name
from tests.starts import REPORT, cpu_s, log_of_groups, start_master, store_records
from trainer.buffer.buffer import Buffer, Uses, use_key
from trainer.config import LaneConfig
from trainer.loop.supply import drawn_from

Figures = dict[str, float]
LINEAR = 1.1  # exponent at most: noise is in it
LEAST_S = 0.005  # of what is too short to say anything
USES = 1_000_000
GROUP = 16
LONE = make_experience(
    tokens=range(1, 141), logprobs=[-0.5] * 100, messages=(Message("user", "How far?"), Message("assistant", "240 km")),
    id=experience_id("live.0", 0, 0), group="live.0", episode=0, group_size=1, lane="live", spans=(Span(40, 140, 3),),
)  # fmt: skip


def run(sizes: str = "10000,100000,1000000", only: str = "") -> Iterator[Row]:
    """sizes: record counts, separated by commas. only: names of measured functions, separated by commas."""
    at = [int(size) for size in sizes.split(",")]
    for name in only.split(",") if only else WORKS:
        WORKS[name](min(at[0], 1000))  # warms up
        found = []
        for size in at:
            gc.collect()
            found.append(WORKS[name](size))
        for what in found[0]:
            points = [
                (size, figures[what]) for size, figures in zip(at, found, strict=True) if figures[what] >= LEAST_S
            ]
            seconds = ", ".join(f"{figures[what]:.3g}" for figures in found)
            if len(points) < 2:
                yield Row(what, None, "", why=f"too short to say: {seconds} s")
                continue
            slope = np.polyfit([math.log(size) for size, _ in points], [math.log(cpu) for _, cpu in points], 1)[0]
            yield Row(what, float(slope), "exponent", high=LINEAR, why=f"CPU {seconds} s")


def master(size: int) -> Figures:
    async def started() -> Figures:
        log, store = await log_of_groups(size), MemoryStore()
        alone = await cpu_s(partial(start_master, log, store))
        return {"master, from nothing": alone, "master, snapshot": await cpu_s(partial(start_master, log, store))}

    return asyncio.run(started())


def readers(size: int) -> Figures:
    async def trainer(log: Log) -> None:
        async for _ in log.scan(REPORTS, await lately(log)):
            pass

    async def read() -> Figures:
        log = await log_of_groups(1_000)
        store_records(log, REPORTS, [REPORT] * size)
        return {"readers, trainer": await cpu_s(partial(trainer, log))}

    return asyncio.run(read())


def collect(size: int) -> Figures:
    """A partition of waiting answers that a worker with an empty folder takes over."""

    async def taken_over(folder: Path) -> Figures:
        log, random = Log(MemoryBus(), "bench", store=DirectoryStore(folder / "store")), np.random.default_rng(0)
        await log.create_topics(partitions=1, keep_ms=30 * DAY_MS)
        groups = [request_group(session_name("bench", f"s{number}"), 1, number) for number in range(size)]
        await log.publish_all(VERIFIED, (waiting_answer(group, random) for group in groups))
        records = [record async for chunk in log.chunks(VERIFIED) for record in chunk]
        first, second = (collector_of(log, folder / name) for name in ("first", "second"))
        await first.recover(0, lambda: False)
        for at in range(0, size, 64):
            await first.take(records[at : at + 64])
        stored = await cpu_s(first.snapshot)
        first.close()
        took = await cpu_s(partial(second.recover, size, lambda: False))
        assert second.state.num_open() == size
        second.close()
        return {"collect, taken over": took, "collect, state stored": stored}

    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(taken_over(Path(name)))


def collector_of(log: Log, folder: Path) -> Collector:
    sources = {"csat": FeedbackRules(window_ms=DAY_MS, late="amend", discount=0.9)}
    rules = Rules(deadline_ms=300_000, keep_ms=30 * DAY_MS, sources=sources)
    return Collector(log, Metrics("process"), 0, CollectSettings(folder, rules, build_collect(TRAFFIC)))


def ledger(size: int) -> Figures:
    """Audit, and trace with its index built from nothing."""

    async def audited() -> Figures:
        log = await trained_log(size)
        spent = await cpu_s(partial(audit, log, log.app))
        with tempfile.TemporaryDirectory() as folder:
            index = LogIndex(Path(folder) / "trace.sqlite", run=log.app, policy="main")
            built = await cpu_s(partial(index.refresh, log))
            asked = await cpu_s(partial(trace_answer, log, index, experience_id(f"t{size // 2 // GROUP}.0", 0, 0)))
            index.close()
        return {"audit": spent, "trace, index": built, "trace, a question": asked}

    return asyncio.run(audited())


async def trained_log(size: int) -> Log:
    """So many experiences in groups, each trained once: four groups to a step, 16 steps to a version."""
    log = Log(MemoryBus(), "bench")
    await log.create_topics(partitions=1, keep_ms=-1)
    names = [f"t{number}.0" for number in range(size // GROUP)]
    blocks = [
        Block(
            tuple(
                msgspec.structs.replace(LONE, id=experience_id(name, 0, at), group=name, episode=at, lane="usual")
                for at in range(GROUP)
            )
        )
        for name in names
    ]
    for topic in (EXPERIENCES, BUFFER):
        store_records(log, topic, blocks)
    store_records(log, PROGRESS, [Closure(group=name, outcome="buffered", experiences=GROUP) for name in names])
    steps = [
        Batch(
            run=log.app, token=0, step=at // 4, version=at // 64,
            items=tuple(
                BatchItem(id=member.id, partition=0, offset=offset, index=member.episode, lane="usual")
                for offset, made in enumerate(blocks[at : at + 4], at)
                for member in made.experiences
            ),
        )
        for at in range(0, len(blocks), 4)
    ]  # fmt: skip
    store_records(log, BATCHES, steps)
    events = [PolicyEvent(event="published", policy="main", version=at, step=16 * at) for at in range(len(steps) // 16)]
    store_records(log, POLICIES, events)
    return log


def buffer(size: int) -> Figures:
    """Lone answers drawn by priority and evenly."""
    held = Buffer({"live": USES})
    frame, priorities = encode(Block((LONE,))), np.random.default_rng(0).random(size).tolist()
    begin_s = time.process_time()
    for at, priority in enumerate(priorities):
        made = msgspec.structs.replace(
            LONE, group=f"live-{at}.0", priority=priority, tenant=f"t{at % 20}", subject=f"u{at % 1000}"
        )
        assert held.add(at, frame, Block((made,))) == ""
    figures = {"buffer, filled": time.process_time() - begin_s}
    for name in ("priority", "spread"):
        lane = LaneConfig(draw=name, max_uses=USES)  # type: ignore[arg-type]
        begin_s = time.process_time()
        drawn_from(held.drawable("live"), lane, num_experiences=min(1000, size), seed=0)
        figures[f"buffer, draw by {name}"] = time.process_time() - begin_s
    return figures


def uses(size: int) -> Figures:
    counted = Uses()
    begin_s = time.process_time()
    for number in range(size):
        counted.add(use_key(f"t{number}.0", 0, "live"), number)
    figures = {"uses, counted": time.process_time() - begin_s}
    begin_s = time.process_time()
    assert counted.forget_below(size, ()) == size
    return figures | {"uses, forgotten": time.process_time() - begin_s}


WORKS: dict[str, Callable[[int], Figures]] = {
    "master": master, "readers": readers, "collect": collect, "ledger": ledger, "buffer": buffer, "uses": uses
}  # fmt: skip
