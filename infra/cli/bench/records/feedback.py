"""Measures collect under production feedback: answers that wait by the hundred thousand, joined as feedback comes.

One partition on a log in memory, through the workers' own collector and its file: answers arrive and wait, feedback on some
of them joins each to its answer, which closes and is published; then the file is deleted and rebuilt from the log. Rates are of
this process's CPU time: one core, whatever else the machine does. A broker adds what reading from it takes.
"""

import asyncio
import gc
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.roles.memory import search_seldom
from schemas import Block, Feedback, Message, Span, make_experience
from schemas.ids import answer_id, experience_id, request_group, session_name
from schemas.topics import PROGRESS, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.credit import FeedbackRules
from streams.collect.rules import Rules
from streams.config import RewardConfig, StreamsConfig
from streams.stages.chain_builder import build_collect

PROMPT_TOKENS = 60
RESPONSE_TOKENS = 60
BATCH = 64  # records that a worker takes at once
DAY_MS = 86_400_000
CONFIG = StreamsConfig(reward=RewardConfig(blend={"csat": 1.0}, require=("csat",)))


def run(*, pending: int = 100_000, joins: int = 20_000, seed: int = 0) -> dict[str, float]:
    """Seconds and rates with so many answers pending on one partition."""
    thresholds = gc.get_threshold()
    search_seldom()  # as a worker does
    try:
        return asyncio.run(_run(pending, joins, seed))
    finally:
        gc.set_threshold(*thresholds)


async def _run(pending: int, joins: int, seed: int) -> dict[str, float]:
    log = Log(MemoryBus(), "bench")
    await log.create_topics(partitions=1, keep_ms=-1)
    random = np.random.default_rng(seed)
    groups = [request_group(session_name("bench", f"s{number}"), 1, number) for number in range(pending)]
    for group in groups:
        await log.publish(VERIFIED, answer(group, random))
    for number in random.permutation(pending)[:joins]:
        ref = answer_id(experience_id(groups[number], 0, 0))
        await log.publish(
            VERIFIED, Feedback(ref=ref, id=f"f{number}", value=float(number % 2), source="csat", rater=f"user-{number}")
        )
    records = [message.record async for message in log.read_all(VERIFIED)]
    gc.collect()
    gc.freeze()  # the log in memory is no garbage of a worker's
    with tempfile.TemporaryDirectory() as folder:
        figures = await _measured(log, records, pending, Path(folder))
    closures = len([message async for message in log.read_all(PROGRESS)])
    assert closures == joins, f"{closures} closures of {joins} joins: something was lost or sent again"
    return figures


async def _measured(log: Log, records: list[Record], pending: int, folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {"pending": pending, "joins": len(records) - pending}
    collector = collector_of(log, folder)
    await collector.recover(0, lambda: False)
    begin = time.process_time()
    await take(collector, records[:pending])
    figures["answers_per_s"] = pending / (time.process_time() - begin)
    begin = time.process_time()
    await take(collector, records[pending:])
    figures["joins_per_s"] = figures["joins"] / (time.process_time() - begin)
    collector.close()
    await asyncio.to_thread(shutil.rmtree, folder)
    rebuilt = collector_of(log, folder)
    begin, wall = time.process_time(), time.perf_counter()
    await rebuilt.recover(len(records), lambda: False)
    figures["rebuild_s"] = time.process_time() - begin
    figures["rebuild_wall_s"] = time.perf_counter() - wall
    assert rebuilt.num_open() == pending - figures["joins"]
    rebuilt.close()
    return figures


async def take(collector: Collector, records: list[Record]) -> None:
    """Fold them in batches, as a worker does."""
    for start in range(0, len(records), BATCH):
        await collector.take(records[start : start + BATCH])


def collector_of(log: Log, folder: Path) -> Collector:
    """Of the one partition, its state file in `folder`."""
    sources = {"csat": FeedbackRules(window_ms=DAY_MS, late="amend", discount=0.9, per_rater=100, within_ms=3_600_000)}
    rules = Rules(deadline_ms=300_000, keep_ms=30 * DAY_MS, sources=sources)
    return Collector(log, Metrics("process"), 0, CollectSettings(folder, rules, build_collect(CONFIG)))


def answer(group: str, random: np.random.Generator) -> Block:
    """Of production, with random tokens."""
    stop = PROMPT_TOKENS + RESPONSE_TOKENS
    messages = (
        Message(role="user", content="Where is my order?"),
        Message(role="assistant", content="On its way. " * 8),
    )
    one = make_experience(
        id=experience_id(group, 0, 0),
        group=group,
        episode=0,
        group_size=1,
        lane="live",
        origin="serve-0",
        tenant="bench",
        tokens=random.integers(0, 30_000, stop),
        logprobs=-random.random(RESPONSE_TOKENS),
        messages=messages,
        spans=(Span(PROMPT_TOKENS, stop, 7),),
        turn=1,
    )
    return Block((one,))
