"""Measures `trace` on a log in memory of a million experiences: building the index from nothing, and the questions then.

`headrace up` keeps the index up beside the run, so that questions find it built; without it the first one waits for that.

Every experience lies in `experiences`, `verified` and `buffer`, has a closure and was trained once, one step to 64 of them
and one version to 16 steps. Those that are asked about are whole records; the others share one, since the index opens none
of them. A broker adds what reading from it takes: hundreds of MB a second to building it, milliseconds to a question.
"""

import asyncio
import random
import tempfile
import time
from pathlib import Path

from infra.ledger.index import LogIndex
from infra.ledger.trace import trace_answer, trace_policy
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import (
    Batch,
    BatchItem,
    Block,
    Closure,
    Experience,
    Message,
    PolicyEvent,
    Span,
    encode,
    make_experience,
    topics,
)
from schemas.ids import experience_id, partition_key, request_group, session_name

RUN = "bench"
STEP_ITEMS = 64
STEPS_PER_VERSION = 16
ASKED = 200
PARTITIONS = 4


def run(*, experiences: int = 1_000_000, seed: int = 0) -> dict[str, float]:
    """Seconds of building the index, of a question after 1,000 more experiences, and milliseconds of those that follow."""
    return asyncio.run(_run(experiences, seed))


async def _run(experiences: int, seed: int) -> dict[str, float]:
    chosen = sorted(random.Random(seed).sample(range(experiences), min(ASKED, experiences)))
    log = Log(MemoryBus(), RUN)
    await log.create_topics(partitions=PARTITIONS, keep_ms=-1)
    await _fill(log, range(experiences), frozenset(chosen))
    figures: dict[str, float] = {"experiences": experiences}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.sqlite"
        index = LogIndex(path, run=RUN, policy="main")
        try:
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await index.refresh(log)
            figures["build_s"] = time.perf_counter() - began_s
            figures["build_cpu_s"] = time.process_time() - cpu_s
            await _fill(log, range(experiences, experiences + 1000), frozenset())
            figures["after_1000_more_s"] = await _asked(log, index, chosen[0])
            answers_ms = sorted([1000 * await _asked(log, index, number) for number in chosen])
            figures["answer_ms_p50"] = answers_ms[len(answers_ms) // 2]
            figures["answer_ms_p99"] = answers_ms[len(answers_ms) * 99 // 100]
            began_s = time.perf_counter()
            await trace_policy(log, index, index.newest_version() // 2)
            figures["policy_ms"] = 1000 * (time.perf_counter() - began_s)
        finally:
            index.close()
        figures["index_mb"] = path.stat().st_size / 2**20
    return figures


async def _asked(log: Log, index: LogIndex, number: int) -> float:
    """Seconds of one question, as the command asks it."""
    began_s = time.perf_counter()
    await index.refresh(log)
    found = await trace_answer(log, index, _name(number))
    assert found.published is not None and len(found.uses) == 1, f"{_name(number)} was trained once"
    return time.perf_counter() - began_s


async def _fill(log: Log, numbers: range, whole: frozenset[int]) -> None:
    other = encode(Block((_experience(-1),)))
    items: list[BatchItem] = []
    for number in numbers:
        frame = encode(Block((_experience(number),))) if number in whole else other
        key = partition_key(_group(number)).encode()
        for topic in (topics.EXPERIENCES, topics.VERIFIED, topics.BUFFER):
            await log.bus.send(log.name(topic), frame, key=key)
        await log.publish(topics.PROGRESS, Closure(group=_group(number), outcome="buffered"))
        items.append(BatchItem(id=_name(number), partition=0, offset=number, index=0, lane="live"))
        if len(items) == STEP_ITEMS:
            step = number // STEP_ITEMS
            batch = Batch(run=RUN, token=0, step=step, version=step // STEPS_PER_VERSION, items=tuple(items))
            await log.publish(topics.BATCHES, batch)
            items.clear()
            if step % STEPS_PER_VERSION == 0:
                version = step // STEPS_PER_VERSION
                event = PolicyEvent(event="published", policy="main", version=version, parent=version - 1, step=step)
                await log.publish(topics.POLICIES, event)


def _group(number: int) -> str:
    return request_group(session_name("bench", str(number // 4)), 7, number)


def _name(number: int) -> str:
    return experience_id(_group(number), 0, 0)


def _experience(number: int) -> Experience:
    return make_experience(
        id=_name(number),
        group=_group(number),
        episode=0,
        group_size=1,
        lane="live",
        spans=(Span(start=6, stop=11, version=1),),
        tokens=list(range(11)),
        logprobs=[-0.5] * 5,
        messages=(Message(role="user", content="37+45="), Message(role="assistant", content="280")),
    )
