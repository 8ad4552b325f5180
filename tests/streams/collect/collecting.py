"""Makes groups, inboxes and a small chain for the tests of collect."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from infra.chain.chain import ChainResult, Context, Dropped
from schemas import (
    Block,
    Control,
    DropMarker,
    Experience,
    Feedback,
    Message,
    Score,
    Span,
    Tick,
    encode,
    make_experience,
)
from schemas.ids import experience_id
from streams.collect.decision import Chain, Decision, Folded
from streams.collect.feedback import FeedbackRules
from streams.collect.fold import fold
from streams.collect.rules import Arrival, Rules
from streams.collect.state import State

DEADLINE_MS = 1_000
WINDOW_MS = 5_000
RULES = Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000)
REF = "hr-a1b2.0.0-0-0"  # the answer that `live` records


def rules(
    late: str = "amend",
    discount: float = 0.0,
    *,
    default: float | None = None,
    window_ms: int = WINDOW_MS,
    sources: Sequence[str] = ("csat",),
    **more: object,
) -> Rules:
    source = FeedbackRules(window_ms=window_ms, default=default, late=late, discount=discount)  # type: ignore[arg-type]
    return msgspec.structs.replace(RULES, sources=dict.fromkeys(sources, source), **more)


def answer(
    group: str, episode: int, *, attempt: int = 0, size: int = 2, part: int = 0, last: bool = True, lane: str = "usual"
) -> Experience:
    return make_experience(
        id=experience_id(group, attempt, episode, part),
        group=group,
        episode=episode,
        group_size=size,
        attempt=attempt,
        part=part,
        last=last,
        lane=lane,  # type: ignore[arg-type]
        tokens=[1, 2, 3, 4 + episode],
        logprobs=np.full(2, -0.5, dtype=np.float32),
        spans=(Span(start=2, stop=4, version=1),),
        messages=(Message(role="user", content="?"), Message(role="assistant", content=str(episode))),
        scores=(Score(name="exact", value=float(episode % 2)),),
    )


def block(*experiences: Experience) -> Block:
    return Block(experiences=experiences)


def live(group: str = "a1b2.0") -> Block:
    return block(answer(group, 0, size=1, lane="live"))


def stub(group: str, episode: int, *, attempt: int = 0, size: int = 2, reason: str = "too short") -> DropMarker:
    return DropMarker(
        id=experience_id(group, attempt, episode),
        group=group,
        episode=episode,
        group_size=size,
        reason=reason,
        attempt=attempt,
    )


def said(
    ref: str, value: float, *, id: str = "", source: str = "csat", type: str = "value", rater: str = ""
) -> Feedback:
    return Feedback(
        ref=ref,
        id=id or f"{ref}-{value}",
        value=value,
        source=source,
        type=type,
        rater=rater,  # type: ignore[arg-type]
    )


def tick() -> Tick:
    return Tick(partition=0, due_ms=1)


async def scored(experiences: Sequence[Experience], context: Context) -> ChainResult:
    """A chain: reward is csat, else exact; whoever has neither is dropped."""
    kept, dropped = [], []
    for experience in experiences:
        csat = experience.score("csat")
        reward = experience.score("exact") if csat is None else csat
        if reward is None or reward < 0:
            dropped.append(Dropped(experience, "unlabelled", "", "reward@1"))
        else:
            kept.append(msgspec.structs.replace(experience, reward=reward))
    return ChainResult(kept=tuple(kept), dropped=tuple(dropped))


class FakePartition:
    """A partition of `verified`: records with offsets and log-append times."""

    def __init__(self, step_ms: int = 10) -> None:
        self.arrivals: list[Arrival] = []
        self.time_ms = 1_000_000
        self.step_ms = step_ms

    def append(self, record: Block | Control | None, *, after_ms: int | None = None) -> Arrival:
        self.time_ms += self.step_ms if after_ms is None else after_ms
        frame = encode(record) if isinstance(record, Block) else b""
        arrival = Arrival(partition=0, offset=len(self.arrivals), timestamp_ms=self.time_ms, value=record, frame=frame)
        self.arrivals.append(arrival)
        return arrival

    def extend(self, records: Iterable[Block | Control | None]) -> "FakePartition":
        for record in records:
            self.append(record)
        return self

    async def blocks_at(self, offsets: Sequence[int]) -> dict[int, Block]:
        return {offset: value for offset in offsets if isinstance(value := self.arrivals[offset].value, Block)}


def folded(
    inbox: FakePartition, rules: Rules = RULES, state: State | None = None, kept_from: int = 0, chain: Chain = scored
) -> list[Folded]:
    """Everything the inbox leads to, record by record; kept_from: the log was trimmed below it."""
    state = State() if state is None else state
    results = []

    async def blocks_at(offsets: Sequence[int]) -> dict[int, Block]:
        return await inbox.blocks_at([offset for offset in offsets if offset >= kept_from])

    for arrival in inbox.arrivals:
        if arrival.offset >= state.next_offset:
            results.append(asyncio.run(fold(state, arrival, rules, chain, blocks_at)))
    return results


def decisions(results: Iterable[Folded]) -> list[Decision]:
    return [decision for result in results for decision in result.decisions]


def drops(results: Iterable[Folded]) -> dict[str, int]:
    return sum((Counter(result.dropped) for result in results), Counter[str]())


def buffered(results: Iterable[Folded]) -> dict[tuple[str, int], list[tuple[str, float | None]]]:
    """(group, revision) to the ids and rewards that reached the buffer; a group that comes twice fails."""
    found: dict[tuple[str, int], list[tuple[str, float | None]]] = {}
    for decision in decisions(results):
        for sent in decision.blocks:
            key = (sent.group, decision.closure.revision)
            assert key not in found
            found[key] = [(experience.id, experience.reward) for experience in sent.experiences]
    return found
