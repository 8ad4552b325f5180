"""Measures `reprocess` on a log in memory: groups of 16 answers through verify and collect, with and without comparing.

The log holds what the stages made of it, so that a comparison finds everything and nothing different. A broker adds what
reading from it takes (hundreds of MB a second), which is little beside this. Seconds are of this process's CPU time: one
core, whatever else the machine does.
"""

import asyncio
import time

import numpy as np

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import Floor
from schemas import Block, Message, Span, make_experience
from schemas.ids import experience_id
from schemas.topics import BUFFER, EXPERIENCES, PROGRESS, VERIFIED, Topic
from streams.config import ScoreConfig, StreamsConfig
from streams.reprocess.report import ReprocessReport
from streams.reprocess.run import ReprocessOrder, StageName, plan, reprocess

GROUP_SIZE = 16
PROMPT_TOKENS = 40
RESPONSE_TOKENS = 60
CONFIG = StreamsConfig(score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),))


def run(*, experiences: int = 20_000, seed: int = 0) -> dict[str, float]:
    """Experiences and records per second of each stage, and how much of what was compared differed (expected: 0)."""
    return asyncio.run(_run(experiences // GROUP_SIZE, seed))


async def _run(groups: int, seed: int) -> dict[str, float]:
    log = Log(MemoryBus(), "bench")
    await log.create_topics(partitions=4, keep_ms=-1)
    random = np.random.default_rng(seed)
    for index in range(groups):
        await log.publish(EXPERIENCES, _group(f"t{index}.0", random))
    figures: dict[str, float] = {"experiences": groups * GROUP_SIZE}
    stages: tuple[tuple[StageName, tuple[Topic, ...]], ...] = (("verify", (VERIFIED,)), ("collect", (BUFFER, PROGRESS)))
    for stage, outputs in stages:
        seconds, report = await _timed(log, ReprocessOrder(stage=stage))
        figures[f"{stage}_experiences_per_s"] = groups * GROUP_SIZE / seconds
        figures[f"{stage}_records_per_s"] = report.records / seconds
        await _record(log, stage, outputs)
        seconds, report = await _timed(log, ReprocessOrder(stage=stage, diff=True))
        figures[f"{stage}_diff_experiences_per_s"] = groups * GROUP_SIZE / seconds
        figures[f"{stage}_compared"] = report.compared
        figures[f"{stage}_different"] = sum(change.count for change in report.changes)
    return figures


async def _timed(log: Log, order: ReprocessOrder) -> tuple[float, ReprocessReport]:
    ranges = await plan(log, order)
    started_s = time.process_time()
    report = await reprocess(log, order, ranges, Floor(app=log.app), CONFIG, lambda count: None)
    return time.process_time() - started_s, report


async def _record(log: Log, stage: StageName, outputs: tuple[Topic, ...]) -> None:
    """Have the log record what the stage makes of it."""
    order = ReprocessOrder(stage=stage, publish=f"{log.app}-{stage}")
    await reprocess(log, order, await plan(log, order), Floor(app=log.app), CONFIG, lambda count: None)
    made = Log(log.bus, order.publish)
    for topic in outputs:
        async for message in made.read_all(topic):
            record = message.record
            await log.bus.send(log.name(topic), record.value, key=record.key, partition=record.partition)


def _group(group: str, random: np.random.Generator) -> Block:
    prompt = random.integers(0, 30_000, PROMPT_TOKENS)
    question = Message(role="user", content="37+45=")
    return Block(
        tuple(
            make_experience(
                id=experience_id(group, 0, episode),
                group=group,
                episode=episode,
                group_size=GROUP_SIZE,
                tokens=np.concatenate([prompt, random.integers(0, 30_000, RESPONSE_TOKENS)]),
                logprobs=-random.random(RESPONSE_TOKENS),
                messages=(question, Message(role="assistant", content=str(int(random.integers(0, 3))))),
                spans=(Span(PROMPT_TOKENS, PROMPT_TOKENS + RESPONSE_TOKENS, 7),),
                answer="1",
            )
            for episode in range(GROUP_SIZE)
        )
    )
