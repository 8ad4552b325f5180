"""Partitions that wait, on logs with a store, and the collectors that take them over."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from schemas import Block, Closure, Control
from schemas.ids import request_group
from schemas.topics import BUFFER, DEAD_LETTERS, PROGRESS, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from streams.collect.snapshots import series_of
from tests.names import session_name
from tests.streams.collect.collecting import answer, block, said, stub, tick
from tests.streams.deliveries import values

DAY_MS = 86_400_000
SOURCE = FeedbackRules(window_ms=400, late="amend", discount=0.5, per_rater=6, within_ms=600)
RULES = Rules(deadline_ms=300, keep_ms=10 * DAY_MS, sources={"csat": SOURCE}, session_ms=150, session_turns=5)
SERIES = series_of("app", 0)
STEP_MS = 20


def group_of(session: int, number: int) -> str:
    return request_group(session_name("acme", f"chat-{session}"), 7, number)


def record_of(kind: str, one: int, other: int) -> Block | Control:
    if kind == "turn":
        made = answer(group_of(one, other), 0, size=1, lane="live")
        return block(msgspec.structs.replace(made, turn=1 + 2 * other))
    if kind == "said":
        type = "retraction" if other == 4 else "value"
        return said(f"hr-{group_of(one, other % 3)}.0-0-0", other / 5, id=str(other), rater=f"r{other % 2}", type=type)
    if kind == "rollout":
        return block(answer(f"t{one}.0", other % 2, attempt=other // 3))
    return stub(f"t{one}.0", other % 2) if kind == "stub" else tick()


class Clock:
    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


async def filled(steps: Sequence[tuple[str, int, int]], store: MemoryStore | None, from_ms: int = 1_000_000) -> Log:
    clock = Clock(from_ms)
    log = Log(MemoryBus(clock), "app", store=store)
    await log.create_topics(partitions=1, keep_ms=-1)
    for step in steps:
        clock.now_ms += STEP_MS
        await log.publish(VERIFIED, record_of(*step))
    return log


async def everything(log: Log) -> list[Record]:
    end = (await log.bounds(VERIFIED))[1][0]
    return [record async for chunk in log.chunks(VERIFIED, {0: 0}, {0: end}) for record in chunk]


def collector_of(log: Log, folder: Path, metrics: Metrics | None = None, rules: Rules = RULES) -> Collector:
    return Collector(log, metrics or Metrics("process"), 0, CollectSettings(folder, rules, (), give_up_s=0.0))


async def opened(log: Log, folder: Path, metrics: Metrics | None = None, committed: int = 0) -> Collector:
    collector = collector_of(log, folder, metrics)
    await collector.recover(committed, lambda: False)
    return collector


async def outcome(log: Log) -> tuple[list[str], list[str], list[str]]:
    """Every closure, block and letter, in an order of their own."""
    closures = sorted(repr(one) for one in await values(log, PROGRESS) if isinstance(one, Closure))
    blocks = sorted(
        repr([(one.id, one.revision, one.lane, one.scores, one.turn) for one in sent.experiences])
        for sent in await values(log, BUFFER)
        if isinstance(sent, Block)
    )
    return closures, blocks, sorted(repr(one) for one in await values(log, DEAD_LETTERS))


def some(count: int) -> list[tuple[str, int, int]]:
    """Open turns, closed ones and rollouts that wait."""
    return [(kind, number % 3, number % 5) for number in range(count) for kind in ("turn", "said", "rollout")]


async def stored_once(folder: Path, count: int = 8) -> tuple[Log, MemoryStore, Collector]:
    store = MemoryStore()
    log = await filled(some(count), store)
    collector = await opened(log, folder)
    await collector.take(await everything(log))
    await collector.snapshot()
    return log, store, collector


def counted(metrics: Metrics, name: str) -> dict[str, float]:
    return {key: value for key, value in metrics.counters().items() if key.startswith(name) and value}
