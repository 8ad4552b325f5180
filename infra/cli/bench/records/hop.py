"""A stage hop beside what people would write instead: answers from one topic of a real broker, through the work of verify or
collect, into another.

Ours is the worker of `headrace process` with one stage. Its peers do the same work on the same answers, one record each: a
plain aiokafka loop (getmany, one commit) with msgspec, tokens as lists or as packed bytes, and Faust as its tutorial has it,
with JSON records of its own or with msgspec. All run at once, each a process on topics of its own, and are given their rounds
in turn; the first shows that all send the same answers with the same numbers, and is not timed. Processor time is of the
worker alone, from the first record sent to it until all that it made of the round has been read; the share that it takes
while it has nothing to do is taken off.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from infra.cli.bench.beside import OURS, Beside, Spent, compared
from infra.cli.bench.common.children import cpu_s, end, idle_share, last_words, source_path
from infra.cli.bench.peers.plain import StageName
from infra.cli.bench.records.hop_data import (
    GroupOfAnswers,
    HopOutcome,
    ToSend,
    blocks,
    groups,
    records,
    verdicts_of_block,
    verdicts_of_record,
)

if TYPE_CHECKING:
    from infra.local.process import Watched
    from infra.log.bus import Bus, Reader
    from infra.log.log import Log

STAGES: tuple[StageName, ...] = ("verify", "collect")
SHAPES = {"16 x (200 + 500)": (16, 200, 500), "16 x (6 + 5)": (16, 6, 5), "1 x (200 + 500)": (1, 200, 500)}
ANSWERS = 16  # that `groups` counts by, so that each shape has as many
PEERS = {  # by name: module of infra.cli.bench.peers, form of its records
    "aiokafka loop, lists": ("loop", "lists"),
    "aiokafka loop, packed bytes": ("loop", "packed"),
    "Faust, JSON": ("stock_faust", "json"),
    "Faust, msgspec": ("stock_faust", "lists"),
}
TARGETS = {"16 x (200 + 500)": {"aiokafka loop, lists": 1.0, "Faust, JSON": 8.0}}
PARTITIONS = 4
IDLE_S = 2.0
ANSWER_S = 180.0  # a worker that has sent nothing for so long is stuck
LINGER_MS = 5


class HopPlan(msgspec.Struct, frozen=True):
    """What is measured.

    shapes: name to answers of a group, prompt and answer in tokens. groups: of ANSWERS answers, in each round; of other
    shapes as many answers. rounds: of each shape. idle_s: for how long idle workers are watched.
    """

    shapes: dict[str, tuple[int, int, int]] = msgspec.field(default_factory=lambda: dict(SHAPES))
    groups: int = 64
    rounds: int = 5
    idle_s: float = IDLE_S


class Contestant(msgspec.Struct):
    """One worker, and how it is spoken to.

    name: in the table. child: its process. log: what that prints. source, sinks: topics it reads and writes. inputs:
    records of a round. read: what an output says. reader: of the sinks. idle: share of a core that it takes with
    nothing to do.
    """

    name: str
    child: "Watched"
    log: Path
    source: str
    sinks: tuple[str, ...]
    inputs: Callable[[Sequence[GroupOfAnswers], int], list[ToSend]]
    read: Callable[[bytes], dict[str, HopOutcome]]
    reader: "Reader | None" = None
    idle: float = 0.0


def run(plan: HopPlan, say: Callable[[str], None]) -> list[Beside]:
    """Ours and its peers for each stage and shape. Raises RuntimeError where one sends other answers, or none."""
    from infra.local.broker import EmbeddedKafka

    found: list[Beside] = []
    with tempfile.TemporaryDirectory() as name, EmbeddedKafka(Path(name) / "kafka") as broker:
        for stage in STAGES:
            folder = Path(name) / stage
            found += asyncio.run(_stage(broker.bootstrap, stage, folder, plan, say))
    return found


async def _stage(
    bootstrap: str, stage: StageName, folder: Path, plan: HopPlan, say: Callable[[str], None]
) -> list[Beside]:
    from infra.log.kafka import KafkaBus
    from infra.log.log import Log

    bus = KafkaBus(bootstrap, linger_ms=LINGER_MS)
    await bus.start()
    try:
        with ExitStack() as ending:
            contestants = [await _ours(Log(bus, f"hop-{stage}"), bootstrap, stage, folder)]
            ending.callback(end, contestants[0].child)
            for name in PEERS:
                contestants.append(await _peer(bus, name, bootstrap, stage, folder))
                ending.callback(end, contestants[-1].child)
            for one in contestants:
                one.reader = await _reader(bus, one.sinks)
            try:
                return await _measured(bus, contestants, stage, plan, say)
            finally:
                for one in contestants:
                    if one.reader is not None:
                        await one.reader.close()
    finally:
        await bus.close()


async def _ours(log: "Log", bootstrap: str, stage: StageName, folder: Path) -> Contestant:
    from schemas.topics import BUFFER, EXPERIENCES, VERIFIED

    await log.create_topics(partitions=PARTITIONS, keep_ms=-1)
    source, sink = (EXPERIENCES, VERIFIED) if stage == "verify" else (VERIFIED, BUFFER)
    said = folder / "headrace.log"
    command = ["infra.cli.bench.records.hop_worker", bootstrap, stage, log.app, str(folder / "ours")]
    return Contestant(
        name=OURS,
        child=_started(command, said),
        log=said,
        source=log.name(source),
        sinks=(log.name(sink),),
        inputs=partial(blocks, stage),
        read=verdicts_of_block,
    )


async def _peer(bus: "Bus", name: str, bootstrap: str, stage: StageName, folder: Path) -> Contestant:
    module, form = PEERS[name]
    source, sink = (f"{module}-{form}-{stage}.{end}" for end in ("in", "out"))
    for topic in (source, sink):
        await bus.create_topic(topic, PARTITIONS, {})
    said = folder / f"{module}-{form}.log"
    return Contestant(
        name=name,
        child=_started([f"infra.cli.bench.peers.{module}", bootstrap, stage, form, source, sink], said),
        log=said,
        source=source,
        sinks=(sink,),
        inputs=partial(records, stage, form),
        read=partial(verdicts_of_record, form),
    )


def _started(command: list[str], log: Path) -> "Watched":
    from infra.local.process import start_watched

    log.parent.mkdir(parents=True, exist_ok=True)
    return start_watched([sys.executable, "-m", *command], log=log, env=source_path(), cwd=log.parent)


async def _reader(bus: "Bus", topics: Sequence[str]) -> "Reader":
    starts = {at: offset for topic in topics for at, offset in (await bus.end_offsets(topic)).items()}
    return await bus.assigned(starts)


async def _measured(
    bus: "Bus", contestants: Sequence[Contestant], stage: StageName, plan: HopPlan, say: Callable[[str], None]
) -> list[Beside]:
    found: list[Beside] = []
    num_rounds = 0
    for shape, sizes in plan.shapes.items():
        if sizes[0] == 1 and stage == "collect":
            continue  # collect drops a group of one: there is no other to compare with
        given = groups(max(1, plan.groups * ANSWERS // sizes[0]), sizes)
        await _check(bus, contestants, given, num_rounds)
        say(f"hop: {stage}, {shape}: all of {len(contestants)} send the same answers")
        if not num_rounds:
            for one in contestants:
                one.idle = await asyncio.to_thread(idle_share, one.child.pid, plan.idle_s)
        spent: dict[str, list[Spent]] = {one.name: [] for one in contestants}
        for number in range(num_rounds + 1, num_rounds + 1 + plan.rounds):
            for one in contestants:
                spent[one.name].append(await _round(bus, one, given, number))
        num_rounds += 1 + plan.rounds
        found += compared(f"{stage}, {shape}", spent, len(given) * sizes[0], TARGETS.get(shape, {}))
        say(f"hop: {stage}, {shape}: {plan.rounds} rounds")
    return found


async def _check(bus: "Bus", contestants: Sequence[Contestant], given: Sequence[GroupOfAnswers], number: int) -> None:
    """A round of all, not timed, which shows that they send the same. Raises RuntimeError."""
    expected: dict[str, HopOutcome] = {}
    for one in contestants:
        verdicts = await _sent(bus, one, one.inputs(given, number), sum(len(group.answers) for group in given))
        expected = expected or verdicts
        if verdicts != expected:
            other = sum(verdicts.get(name) != verdict for name, verdict in expected.items())
            raise RuntimeError(
                f"bench hop: {one.name} sends {other} of {len(expected)} answers otherwise than headrace"
            )


async def _round(bus: "Bus", one: Contestant, given: Sequence[GroupOfAnswers], number: int) -> Spent:
    inputs, count = one.inputs(given, number), sum(len(group.answers) for group in given)
    before_s, begin = cpu_s(one.child.pid), time.perf_counter()
    await _sent(bus, one, inputs, count)
    wall_s = time.perf_counter() - begin
    return Spent(cpu_s(one.child.pid) - before_s - one.idle * wall_s, wall_s)


async def _sent(bus: "Bus", one: Contestant, inputs: Sequence[ToSend], count: int) -> dict[str, HopOutcome]:
    """Send a round to a worker and read what it makes of `count` answers. Raises RuntimeError."""
    assert one.reader is not None
    sending = asyncio.gather(*(bus.send(one.source, record.value, key=record.key) for record in inputs))
    verdicts: dict[str, HopOutcome] = {}
    heard = time.perf_counter()
    while len(verdicts) < count:
        for record in await one.reader.get_many(timeout_s=0.2):
            verdicts |= one.read(record.value)
            heard = time.perf_counter()
        if one.child.process.poll() is not None or time.perf_counter() - heard > ANSWER_S:
            raise RuntimeError(f"bench hop: {one.name}: {len(verdicts)} of {count} answers; {last_words(one.log)}")
    await sending
    return verdicts
