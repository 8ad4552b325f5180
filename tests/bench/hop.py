"""Verify and collect of `headrace process` on a real broker, compared with an aiokafka loop that does the same work.

Processor time is that of the worker, from the first sent record until its last output is read. The untimed first round checks
that both send the same answers with the same numbers. The rows are unit costs of `headrace plan`.
"""

import asyncio
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from infra.local.broker import EmbeddedKafka
from infra.local.process import Watched
from infra.log.access import PLAINTEXT
from infra.log.bus import Reader
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.roles.memory import search_seldom
from infra.roles.role import Role, instance_name
from infra.settings.config import Floor
from infra.store.directory import DirectoryStore
from schemas import Block, DropMarker, Experience, Feedback, Message, Score, Span, decode, encode, make_experience
from schemas.ids import answer_id, experience_id, request_group
from schemas.topics import BUFFER, EXPERIENCES, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from streams.config import RewardConfig, ScoreConfig, StreamsConfig
from streams.hosted import BrokerLogin
from streams.processors.filter import MIN_LOOP_TOKENS, repetition
from streams.stages.chain_builder import build_collect
from streams.worker import run_worker
from tests.bench.measuring import against, cpu_s, ended, idle_share, last_words, started
from tests.bench.report import Row
from tests.bench.texts import RawAnswer, samples
from tests.names import session_name

CHAIN = StreamsConfig(score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),))
TRAFFIC = StreamsConfig(reward=RewardConfig(blend={"csat": 1.0}, require=("csat",)))
SHAPES = {"16 x (200 + 500)": (16, 200, 500), "16 x (6 + 5)": (16, 6, 5), "1 x (200 + 500)": (1, 200, 500)}
SHORT, LONG, ALONE = "16 x (6 + 5)", "16 x (200 + 500)", "1 x (200 + 500)"
COSTS = {
    ("verify", SHORT): "verify_short", ("verify", LONG): "verify_long", ("verify", ALONE): "verify_alone",
    ("collect", SHORT): "collect_short", ("collect", LONG): "collect_long",
}  # fmt: skip
PARTITIONS = 4
MAX_REPETITION, MIN_PRIORITY, EPSILON = 0.9, 0.1, 1e-4  # of the built-in chain
ANSWER_S = 180.0
DAY_MS = 86_400_000


class PlainAnswer(msgspec.Struct):
    """An answer as a team would send it: a record of lists."""

    id: str
    group: str
    episode: int
    group_size: int
    num_prompt: int
    tokens: list[int]
    logprobs: list[float]
    messages: list[tuple[str, str]]
    answer: str
    score: float | None = None
    reward: float | None = None
    advantage: float | None = None
    priority: float = 1.0
    reason: str = ""


class Worker(NamedTuple):
    """One of both sides: its process, what it reads and writes."""

    name: str
    child: Watched
    log: Path
    source: str
    reader: Reader


PLAIN = msgspec.msgpack.Decoder(PlainAnswer)


def run(rounds: int = 5, groups: int = 64, pending: int = 100_000, joins: int = 20_000) -> Iterator[Row]:
    """rounds: timed rounds. groups: groups of 16 per round. pending: answers awaiting feedback. joins: rated answers."""
    with tempfile.TemporaryDirectory() as name, EmbeddedKafka(Path(name) / "kafka") as broker:
        for stage in ("verify", "collect"):
            yield from asyncio.run(stage_rows(broker.bootstrap, stage, Path(name) / stage, rounds, groups))
    thresholds = gc.get_threshold()
    search_seldom()  # as a worker does
    try:
        yield from asyncio.run(feedback_rows(pending, joins))
    finally:
        gc.set_threshold(*thresholds)


async def stage_rows(bootstrap: str, stage: str, folder: Path, rounds: int, groups: int) -> list[Row]:
    bus = KafkaBus(bootstrap, linger_ms=5)
    await bus.start()
    rows = []
    with ExitStack() as ending:
        workers = [await open_worker(bus, name, bootstrap, stage, folder) for name in ("headrace", "aiokafka loop")]
        for worker in workers:
            ending.callback(ended, worker.child)
        number, idle = 0, [0.0, 0.0]
        for shape, sizes in SHAPES.items():
            if stage == "collect" and sizes[0] == 1:
                continue  # collect drops a group of one
            given = made_groups(groups * 16 // sizes[0], sizes)
            ours, peer = [await passed(bus, worker, stage, given, number) for worker in workers]
            if ours != peer:
                raise RuntimeError(f"hop: {stage}, {shape}: the loop sends other answers than headrace")
            if not number:
                idle = [await asyncio.to_thread(idle_share, lambda w=w: cpu_s(w.child.pid)) for w in workers]
            spent: tuple[list[float], list[float]] = ([], [])
            for number in range(number + 1, number + 1 + rounds):  # noqa: B020 - goes on
                for at, worker in enumerate(workers):
                    before_s, begin = cpu_s(worker.child.pid), time.perf_counter()
                    await passed(bus, worker, stage, given, number)
                    took_s = time.perf_counter() - begin
                    each_us = 1e6 * (cpu_s(worker.child.pid) - before_s - idle[at] * took_s) / len(ours)
                    spent[at].append(each_us)
            number += 1
            low = 1.0 if shape == LONG else None
            rows.append(against(f"{stage}, {shape}, aiokafka loop", "µs", *spent, low))
            if cost := COSTS.get((stage, shape)):
                rows.append(Row(f"{stage}, {shape}, an answer", statistics.median(spent[0]), "µs", cost=cost))
        for worker in workers:
            await worker.reader.close()
    await bus.close()
    return rows


async def open_worker(bus: KafkaBus, name: str, bootstrap: str, stage: str, folder: Path) -> Worker:
    source, sink = f"loop-{stage}.in", f"loop-{stage}.out"
    if name == "headrace":
        log = Log(bus, f"hop-{stage}")
        await log.create_topics(partitions=PARTITIONS, keep_ms=-1)
        topics = (EXPERIENCES, VERIFIED) if stage == "verify" else (VERIFIED, BUFFER)
        source, sink = (log.name(topic) for topic in topics)
    else:
        for topic in (source, sink):
            await bus.create_topic(topic, PARTITIONS, {})
    said = folder / f"{name.split()[0]}.log"
    child = started(["-m", "tests.bench.hop", name, bootstrap, stage, source, sink, str(folder)], said)
    return Worker(name, child, said, source, await bus.assigned(await bus.end_offsets(sink)))


async def passed(
    bus: KafkaBus, worker: Worker, stage: str, given: Sequence[list[RawAnswer]], number: int
) -> dict[str, object]:
    """Send a round to a worker and read what it makes of it."""
    is_plain, made = worker.name != "headrace", list(blocks(stage, given, number))
    answers = [each for block in made for each in block.experiences]
    pack = msgspec.msgpack.encode
    inputs = [(each.group, pack(plain(each))) for each in answers]
    if not is_plain:
        inputs = [(block.experiences[0].group, encode(block)) for block in made]
    sending = asyncio.gather(*(bus.send(worker.source, value, key=group.encode()) for group, value in inputs))
    found: dict[str, object] = {}
    heard = time.perf_counter()
    while len(found) < len(answers):
        for record in await worker.reader.get_many(timeout_s=0.2):
            found |= outcomes(record.value, is_plain)
            heard = time.perf_counter()
        if worker.child.process.poll() is not None or time.perf_counter() - heard > ANSWER_S:
            raise RuntimeError(f"hop: {worker.name}: {len(found)} of {len(answers)} answers; {last_words(worker.log)}")
    await sending
    return found


def made_groups(count: int, shape: tuple[int, int, int]) -> list[list[RawAnswer]]:
    """Answers to each prompt; of every fourth group the last one repeats itself, where it is long enough to tell."""
    found = []
    for number in range(max(1, count)):
        answers = samples(*shape, seed=number)
        if number % 4 == 0 and shape[2] >= MIN_LOOP_TOKENS:
            last = answers[-1]
            answers[-1] = msgspec.structs.replace(last, response=(last.response[:4] * shape[2])[: shape[2]])
        found.append(answers)
    return found


def blocks(stage: str, given: Sequence[list[RawAnswer]], number: int) -> Iterator[Block]:
    """The input of headrace's stage: a record a group, every other answer of which is right."""
    for at, answers in enumerate(given):
        name, judged, members = f"r{number}g{at}.0", stage == "collect", []
        for episode, each in enumerate(answers):
            is_right, start = episode % 2 == 0, len(each.prompt)
            members.append(
                make_experience(
                    id=experience_id(name, 0, episode), group=name, episode=episode, group_size=len(answers),
                    tokens=each.prompt + each.response, logprobs=each.logprobs, messages=each.messages,
                    spans=(Span(start, start + len(each.response), 7),),
                    answer=each.messages[-1].content if is_right else "no",
                    scores=(Score("exact", float(is_right)),) if judged else (),
                    stamps=("validate@1", "dedupe@1", "filter@1", "exact@1") if judged else (),
                )
            )  # fmt: skip
        yield Block(tuple(members))


def plain(each: Experience) -> PlainAnswer:
    """The same answer for the loop, which has a record an answer."""
    return PlainAnswer(
        id=each.id, group=each.group, episode=each.episode, group_size=each.group_size, num_prompt=each.num_prompt,
        tokens=each.tokens.tolist(), logprobs=each.logprobs.tolist(), answer=each.answer or "",
        messages=[(message.role, message.content) for message in each.messages], score=each.score("exact"),
        reward=each.reward, advantage=each.advantage, priority=each.priority,
    )  # fmt: skip


def outcomes(value: bytes, is_plain: bool) -> dict[str, object]:
    """The outcomes of the answers of a record, in a form that both sides share."""
    record = PLAIN.decode(value) if is_plain else decode(value)
    if isinstance(record, DropMarker):
        return {record.id: record.reason}
    made = [record] if is_plain else map(plain, record.experiences) if isinstance(record, Block) else []
    numbers = ("score", "reward", "advantage", "priority")
    return {
        each.id: each.reason
        or (each.tokens, each.logprobs, each.messages, *(round(getattr(each, name) or 0.0, 6) for name in numbers))
        for each in made
    }


def verified(plain: PlainAnswer, seen: dict[str, Any]) -> list[PlainAnswer]:
    """Validate, dedupe, filter, score."""
    if plain.id in seen:
        return []
    seen[plain.id] = True
    sampled = np.array(plain.tokens[plain.num_prompt :], np.uint32)
    if len(plain.logprobs) != len(sampled) or not -math.inf < min(plain.logprobs) <= max(plain.logprobs) <= 0:
        plain.reason = "bad frame"
    elif len(sampled) >= MIN_LOOP_TOKENS and repetition(sampled) > MAX_REPETITION:
        plain.reason = "repetition"
    else:
        plain.score = float(plain.messages[-1][1].strip() == plain.answer.strip())
    return [plain]


def collected(plain: PlainAnswer, groups: dict[str, Any]) -> list[PlainAnswer]:
    """Reward, advantage and priority once a group is complete."""
    group = groups.setdefault(plain.group, {})
    group[plain.episode] = plain
    if len(group) < plain.group_size:
        return []
    members = [group[episode] for episode in sorted(groups.pop(plain.group))]
    rewards = [member.score or 0.0 for member in members]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    for member, reward in zip(members, rewards, strict=True):
        member.reward, member.advantage = reward, (reward - mean) / (std + EPSILON)
        member.priority = min(1.0, max(MIN_PRIORITY, 2 * std))
    return members if std else []


async def loop(bootstrap: str, stage: str, source: str, sink: str) -> None:
    """The peer: getmany, the work, everything sent, one commit."""
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    work, held = verified if stage == "verify" else collected, dict[str, Any]()
    consumer = AIOKafkaConsumer(
        source, bootstrap_servers=bootstrap, group_id=f"{source}.group", auto_offset_reset="earliest",
        enable_auto_commit=False,
    )  # fmt: skip
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=5, max_batch_size=2**20)
    await producer.start()
    await consumer.start()
    while True:
        found = await consumer.getmany(timeout_ms=1000, max_records=500)
        made = [out for each in found.values() for record in each for out in work(PLAIN.decode(record.value), held)]
        await asyncio.gather(
            *[await producer.send(sink, msgspec.msgpack.encode(out), key=out.group.encode()) for out in made]
        )
        if found:
            await consumer.commit()


async def stage_worker(bootstrap: str, stage: str, folder: Path) -> None:
    """One stage as `headrace process` runs it."""
    bus, store = KafkaBus(bootstrap), DirectoryStore(folder / "store")
    await bus.start()
    app = f"hop-{stage}"
    role = Role(
        floor=Floor(app=app, folder=folder), log=Log(bus, app, store=store), store=store, metrics=Metrics("process"),
        stop=asyncio.Event(), instance=instance_name("process"),
    )  # fmt: skip
    await run_worker(role, CHAIN, BrokerLogin(bootstrap, PLAINTEXT), stages=(stage,))  # type: ignore[arg-type]


async def feedback_rows(pending: int, joins: int) -> list[Row]:
    """Collect on a log in memory: lone answers arrive and wait, and feedback closes some of them."""
    log = Log(MemoryBus(), "bench")
    await log.create_topics(partitions=1, keep_ms=-1)
    random = np.random.default_rng(0)
    groups = [request_group(session_name("bench", f"s{number}"), 1, number) for number in range(pending)]
    await log.publish_all(VERIFIED, (waiting_answer(group, random) for group in groups))
    rated = random.permutation(pending)[:joins]
    said = [(f"f{at}", f"u{at}", answer_id(experience_id(groups[at], 0, 0))) for at in rated]
    await log.publish_all(
        VERIFIED, [Feedback(ref=ref, id=name, value=1.0, source="csat", rater=who) for name, who, ref in said]
    )
    taken = [message.record async for message in log.scan(VERIFIED)]
    gc.collect()
    gc.freeze()  # the log in memory is no garbage of a worker's
    sources = {"csat": FeedbackRules(window_ms=DAY_MS, late="amend", discount=0.9)}
    rules = Rules(deadline_ms=300_000, keep_ms=30 * DAY_MS, sources=sources)
    spent_us = []
    with tempfile.TemporaryDirectory() as folder:
        collector = Collector(log, Metrics("process"), 0, CollectSettings(Path(folder), rules, build_collect(TRAFFIC)))
        await collector.recover(0, lambda: False)
        for part in (taken[:pending], taken[pending:]):
            begin_s = time.process_time()
            for at in range(0, len(part), 64):
                await collector.take(part[at : at + 64])
            spent_us.append(1e6 * (time.process_time() - begin_s) / len(part))
        assert collector.state.num_open() == pending - joins
        collector.close()
    return [
        Row("collect, a lone answer that waits", spent_us[0], "µs", cost="answer_waits"),
        Row("collect, feedback joined to its answer", spent_us[1], "µs", high=500.0, cost="feedback_joined"),
    ]


def waiting_answer(group: str, random: np.random.Generator) -> Block:
    messages: Iterable[Message] = (Message("user", "Where is my order?"), Message("assistant", "On its way. " * 8))
    return Block(
        (
            make_experience(
                id=experience_id(group, 0, 0), group=group, episode=0, group_size=1, lane="live", origin="serve-0",
                tenant="bench", tokens=random.integers(0, 30_000, 120), logprobs=-random.random(60),
                messages=tuple(messages), spans=(Span(60, 120, 7),), turn=1,
            ),
        )
    )  # fmt: skip


if __name__ == "__main__":
    side, bootstrap, stage, source, sink, folder = sys.argv[1:]
    if side == "headrace":
        asyncio.run(stage_worker(bootstrap, stage, Path(folder) / "ours"))
    else:
        asyncio.run(loop(bootstrap, stage, source, sink))
