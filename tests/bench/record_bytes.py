"""Bytes of a group, an answer and a rating in each topic, for `headrace plan`.

Texts are real prose and code, the chain is the built-in chain with one score, and nothing is sealed. A record counts its value,
key and headers, and Kafka's overhead of a batch with a single record, which is the largest. Sizes are fitted by least squares:
bytes once, per member, per token of the prompt and per sampled token.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from schemas import (
    Batch,
    BatchItem,
    Block,
    Drawn,
    Experience,
    Feedback,
    Issued,
    Progress,
    Received,
    Span,
    Task,
    Tick,
    make_experience,
)
from schemas.ids import answer_id, experience_id, request_group
from schemas.topics import ALL, BATCHES, EXPERIENCES, FEEDBACK, PROGRESS, REPORTS, TASKS, VERIFIED
from schemas.wire.block import split_blocks
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from streams.config import RewardConfig, ScoreConfig, StreamsConfig
from streams.stages.chain_builder import build_collect, build_verify
from streams.stages.stage import publish_all
from streams.stages.verify import Verifier
from tests.bench.report import Row
from tests.bench.texts import RawAnswer, samples
from tests.names import session_name

MADE = 4  # of each: texts differ in how well they are packed
RECORD_BYTES = 70  # 61 of a batch's header and at least 7 of a record's own: kafka.apache.org, message format 2
DAY_MS = 86_400_000
CONFIG = StreamsConfig(score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),))
REPORT = Progress(
    role="explore", instance="explore/host/1", life="working",
    counters={f"counter_{number}": 1000.0 * number for number in range(16)},
    gauges={f"gauge_{number}": 0.5 * number for number in range(16)},
)  # fmt: skip
TRAFFIC = StreamsConfig(score=CONFIG.score, reward=RewardConfig(blend={"csat": 1.0}, require=("csat",)))
Bytes = dict[str, float]


GRID = [(size, prompt, answer) for size in (4, 16) for prompt in (100, 1000) for answer in (50, 500)]
LONE = [(1, prompt, answer) for prompt in (100, 1000) for answer in (50, 500)]


def run(small: bool = False) -> Iterator[Row]:
    """Fit every kind of record. small: few shapes, for a quick test."""
    grid, lone = (GRID[::3], LONE[:2]) if small else (GRID, LONE)
    groups = {shape: asyncio.run(group_bytes(*shape)) for shape in grid}
    yield from fitted("group", groups, ("once", "member", "prompt", "token"))
    singles = {shape: asyncio.run(lone_bytes(*shape[1:])) for shape in lone}
    for at, kind in enumerate(("answer", "rating", "unrated")):
        yield from fitted(kind, {shape: found[at] for shape, found in singles.items()}, ("once", "prompt", "token"))
    yield from fitted("report", {(1, 1, 1): asyncio.run(report_bytes())}, ("once",))


def fitted(kind: str, found: Mapping[tuple[int, int, int], Bytes], names: Sequence[str]) -> Iterator[Row]:
    """A row for each topic and term, of at least a hundredth of a byte."""
    terms = {
        "once": lambda s, p, a: 1,
        "member": lambda s, p, a: s,
        "prompt": lambda s, p, a: p,
        "token": lambda s, p, a: s * a,
    }
    rows = np.array([[terms[name](*shape) for name in names] for shape in found], float)
    for topic in sorted({topic for sizes in found.values() for topic in sizes}):
        sizes = np.array([shape.get(topic, 0.0) for shape in found.values()])
        solution = np.linalg.lstsq(rows, sizes, rcond=None)[0]
        for name, value in zip(names, solution, strict=True):
            if abs(value) > 0.01:
                yield Row(
                    f"{kind}, {topic}, {name}", round(float(value), 3), "bytes", cost=f"bytes.{kind}.{topic}.{name}"
                )


async def group_bytes(size: int, prompt: int, answer: int) -> Bytes:
    """A usual group, from its task to the step that trained it."""
    log = await _log()
    for number in range(MADE):
        await _issue(log, f"task-{number}.2", samples(size, prompt, answer, seed=number))
    await _through(log, CONFIG)
    await _train(log, [f"task-{number}.2" for number in range(MADE)], size)
    return _each(_held(log))


async def report_bytes() -> Bytes:
    """A report of a role."""
    log = await _log()
    await log.publish(REPORTS, REPORT)
    return {topic: float(held) for topic, held in _held(log).items() if held}


async def lone_bytes(prompt: int, answer: int) -> tuple[Bytes, Bytes, Bytes]:
    """Bytes of a waiting lone answer, of a rating with the outcome of its answer, and of the outcome without feedback."""
    groups = [request_group(session_name("bench", f"s{number}"), 1, number) for number in range(MADE)]
    lone = [samples(1, prompt, answer, seed=number)[0] for number in range(MADE)]
    waiting, rated = await _of_traffic(lone, groups, [answer_id(experience_id(name, 0, 0)) for name in groups])
    _, silent = await _of_traffic(lone, groups, ())
    return _each(waiting), _each(rated - waiting), _each(silent - waiting)


async def _of_traffic(
    lone: Sequence[RawAnswer], groups: Sequence[str], rated: Sequence[str]
) -> tuple[Counter[str], Counter[str]]:
    """Bytes while lone answers wait, and after they were rated and trained or, without ratings, after their window."""
    log = await _log()
    for name, one in zip(groups, lone, strict=True):
        await log.publish(EXPERIENCES, Block((_experience(one, name, 0, 1),)))
    await _through(log, TRAFFIC)
    waiting = _held(log)
    for ref in rated:
        await _rate(log, ref)
    if rated:
        await _through(log, TRAFFIC, verify=False)
        await _train(log, groups, 1)
        return waiting, _held(log)
    bus = log.bus
    assert isinstance(bus, MemoryBus)
    bus.clock = lambda: wall_ms() + 2 * DAY_MS
    await log.publish(
        VERIFIED, Tick(partition=0, due_ms=0)
    )  # one for all of them, as on a busy partition there is none
    ticked = _held(log) - waiting
    await _through(log, TRAFFIC, verify=False)
    return waiting, _held(log) - ticked


async def _log() -> Log:
    log = Log(MemoryBus(), "bench", store=MemoryStore())
    await log.create_topics(partitions=1, keep_ms=-1)
    return log


def _each(held: Mapping[str, int]) -> Bytes:
    return {topic: num_bytes / MADE for topic, num_bytes in held.items() if num_bytes}


async def _issue(log: Log, name: str, group: Sequence[RawAnswer]) -> None:
    """Its task, and what an explorer recorded of it: every other answer is right."""
    issued = Issued(group=name, attempt=0, num_episodes=len(group), max_tokens=len(group[0].response), sequence=1000)
    await log.publish(TASKS, Task(id=name.rpartition(".")[0], messages=group[0].messages[:1], issued=issued))
    members = [_experience(one, name, at, len(group)) for at, one in enumerate(group)]
    for block in split_blocks(members):
        await log.publish(EXPERIENCES, block)


def _experience(one: RawAnswer, group: str, episode: int, size: int) -> Experience:
    start = len(one.prompt)
    return make_experience(
        id=experience_id(group, 0, episode),
        group=group,
        episode=episode,
        group_size=size,
        sequence=-1 if size == 1 else 1000,
        lane="live" if size == 1 else "usual",
        origin="explore/host-1.example/4711",
        tokens=one.prompt + one.response,
        logprobs=one.logprobs,
        messages=one.messages,
        spans=(Span(start, start + len(one.response), 1000),),
        answer=one.messages[-1].content if episode % 2 == 0 else "no",
    )


async def _through(log: Log, config: StreamsConfig, *, verify: bool = True) -> None:
    """Run verify and collect over the log."""
    if verify:
        verifier = Verifier(build_verify(config))
        async for message in log.scan(EXPERIENCES):
            handled = await verifier.handle(message)
            await publish_all(log, [*handled.first, *handled.then])
    sources = {"csat": FeedbackRules(window_ms=DAY_MS, late="amend", discount=0.0)}
    rules = Rules(deadline_ms=DAY_MS, keep_ms=DAY_MS, sources=sources)
    with tempfile.TemporaryDirectory() as folder:
        settings = CollectSettings(Path(folder), rules, build_collect(config))
        collector = Collector(log, Metrics("process"), 0, settings)
        await collector.recover(0, lambda: False)
        await collector.take([message.record async for message in log.scan(VERIFIED)])
        collector.close()


async def _rate(log: Log, ref: str) -> None:
    """Write a rating like the gateway and the feedback source."""
    name, rater = "5f2b8c1d9e3a4b6c7d8e9f01", "kq7mzt4wv2xh5n3p"  # as long as those that it makes
    body = msgspec.json.encode({"value": 1.0, "answer_id": ref, "id": name, "rater": rater})
    await log.publish(FEEDBACK, Received(path="/v1/feedback", body=body, id=name, ref=ref, tenant="acme", rater=rater))
    await log.publish(VERIFIED, Feedback(ref=ref, id=name, value=1.0, source="csat", rater=rater))


async def _train(log: Log, groups: Sequence[str], size: int) -> None:
    """The journal of one step with all of them, and the record that the master reads."""
    items = tuple(
        BatchItem(id=experience_id(name, 0, at), partition=0, offset=100_000, index=at, lane="usual", min_version=1000)
        for name in groups
        for at in range(size)
    )
    digests = tuple(number.to_bytes(16) for number in range(len(groups)))
    await log.publish(BATCHES, Batch(run="bench", token=17, step=1000, version=1000, items=items, blocks=digests))
    await log.publish(PROGRESS, Drawn(token=17, step=1000, version=1000, groups=tuple(groups)))


def _held(log: Log) -> Counter[str]:
    """Bytes by topic."""
    bus, found = log.bus, Counter[str]()
    assert isinstance(bus, MemoryBus)
    for topic in ALL:
        for one in bus.log(Partition(log.name(topic), 0)).records:
            headers = sum(len(name) + len(value) for name, value in one.headers)
            found[topic.name] += len(one.value) + len(one.key) + headers + RECORD_BYTES
    return found
